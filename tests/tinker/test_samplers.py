"""Which call gets which server, with servers that answer at once. 2 s of CPU."""

import asyncio
import dataclasses
import math
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract import security
from scalerl_jax.contract.codec import CompletionRequest, GroupRequest, Sampling
from scalerl_jax.gateway.generators import Generators
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.tinker import samplers as samplers_lib
from scalerl_jax.tinker.samplers import Samplers, Weights
from tests.support.models import random_tensors, toy_decoder, write_folder

HELD, OTHER = Weights("/held", "run"), Weights("/other", "run")


@dataclasses.dataclass
class _Answer:
    number: int
    versions: tuple[Any, ...] = ()


def holding(slots: int) -> Samplers:
    """One server, which holds HELD and is never switched."""
    generators = Generators(["127.0.0.1:1"], credentials=security.Credentials(), fingerprint="", vocabulary=0)
    generators.servers[0].status = pb.StatusReply(slots=slots, server_id="s")

    async def ask(server: Any, request: GroupRequest) -> _Answer:
        await asyncio.sleep(0)
        return _Answer(int(request.group_id))

    generators.ask = ask  # type: ignore[method-assign, assignment]
    made = Samplers(
        generators, decoder=toy_decoder(), dtype="float32", chunk_bytes=1, push_seconds=1.0, score_seconds=1.0
    )
    made._held[0].weights, made._held[0].process, made._turn = HELD, "s", math.inf
    return made


def request(number: int) -> GroupRequest:
    return GroupRequest(0, str(number), np.array([1], np.int32), (CompletionRequest(0, 0),), Sampling())


def test_thousands_of_calls_cost_each_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client asks for at once waits here; each call looked through all that waited, and the server hung."""
    calls, count, looked = 1000, 0, samplers_lib._ServerWeights.takes

    def takes(held: Any, wait: Any) -> bool:
        nonlocal count
        count += 1
        return looked(held, wait)

    async def ask() -> None:
        samplers = holding(slots=2)
        answered: list[int] = []

        async def one(number: int) -> None:
            completion, _ = await samplers.generate(lambda: HELD, request(number), inflight=False)
            answered.append(completion.number)  # type: ignore[attr-defined]

        others = [
            asyncio.create_task(samplers.generate(lambda: OTHER, request(i), inflight=False)) for i in range(calls)
        ]
        await asyncio.gather(*map(one, range(calls)))
        assert answered == list(range(calls))  # the oldest first
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        samplers._dispatch()
        assert not samplers._waiting and samplers._held[0].calls == 0

    monkeypatch.setattr(samplers_lib._ServerWeights, "takes", takes)
    asyncio.run(ask())
    assert count < 20 * calls


def test_a_call_that_is_given_up_as_it_is_granted_leaves_its_server_free() -> None:
    async def ask() -> None:
        samplers = holding(slots=1)
        tasks = [asyncio.create_task(samplers.generate(lambda: HELD, request(i), inflight=False)) for i in range(9)]
        await asyncio.sleep(0)  # three of them have a server: its slots, and two that it may queue
        assert samplers._held[0].pinned == 3
        for task in tasks[:8]:
            task.cancel()
        assert (await tasks[8])[0].number == 8  # type: ignore[attr-defined]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert samplers._held[0].pinned == 0 and not samplers._waiting

    asyncio.run(ask())


@pytest.mark.parametrize("what", ["dense", "qwen3_moe", "llama4_text", "a tied head", "buffers"])
def test_what_is_sent_is_what_a_server_takes(tmp_path: pathlib.Path, what: str) -> None:
    """The layout's tensors, whatever else the folder stores."""
    sizes = {"family": what} if "_" in what else {"tied_embeddings": what != "dense"}
    decoder = toy_decoder(**sizes)
    file = write_folder(tmp_path, decoder, random_tensors(decoder, 0)) / "model.safetensors"
    stored = load_file(file)
    if what == "a tied head":
        save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"]}, file)
    if what == "buffers":
        save_file({**stored, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}, file)

    async def sent() -> set[str]:
        samplers = holding(slots=1)
        samplers._decoder = decoder
        return set(samplers._tensors(Weights(str(tmp_path))))

    assert asyncio.run(sent()) == set(hf_tensors(decoder))


def test_a_server_is_sent_weights_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensors(weights: Weights) -> Any:
        raise MemoryError("too large")

    async def ask() -> None:
        samplers = holding(slots=1)
        (held,) = samplers._held
        monkeypatch.setattr(samplers, "_tensors", tensors)
        held.coming = OTHER
        await samplers._push(held, OTHER)
        assert held.coming is None and held.pushing is None and held.server.status is None
        assert "too large" in samplers.trouble

    asyncio.run(ask())

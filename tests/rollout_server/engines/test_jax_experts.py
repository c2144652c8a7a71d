"""The embedded generator tells the experts of each token: those of the routers, whatever happens on the way."""

import asyncio
import dataclasses

import numpy as np
import pytest

from scalerl_jax.contract.codec import Version
from scalerl_jax.model.decoder_config import DecoderConfig
from tests.rollout_server.conftest import jax_engine, opened_jax
from tests.rollout_server.jax_reference import ask, tiny
from tests.rollout_server.pause_decoding import pause_decoding
from tests.support.models import random_tensors, toy_decoder, write_folder
from tests.support.waiting import eventually_async

pytest.importorskip("torch")
from tests.support.transformers_reference import Reference, alone, check_experts, swapped

CONFIG = tiny(kind="qwen3_moe")
PROMPT = np.array([5, 11, 2, 40, 7])
OPTIONS = {"maximum_tokens": 96, "decode_chunk": 8, "router_replay": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model") / "moe", CONFIG, random_tensors(CONFIG, 0))


def asked(**changes):
    return dataclasses.replace(ask(PROMPT, **changes), router_replay=True)


async def collect(engine, request):
    return [completion async for completion in engine.generate(request)]


async def test_they_are_the_routers_own(folder):
    """Of prompts, of sampled tokens and of forced ones; in more completions than there are slots."""

    async with opened_jax(folder, **OPTIONS) as engine:
        reference, forced = Reference(folder, CONFIG, 0), 0
        for completion in await collect(
            engine, asked(seeds=range(9), budgets=[6] * 9, answer_budget=20, phrase=(30, 31, 32), end=(32,))
        ):
            expected = alone(reference, PROMPT, completion)
            check_experts(PROMPT, completion, CONFIG, reference.choices)
            sampled = completion.sampled()
            np.testing.assert_allclose(completion.logprobs[sampled], expected[sampled], atol=1e-4)
            forced += len(completion.forced)
        assert forced
        assert all(one.experts is None for one in await collect(engine, ask(PROMPT, seeds=range(2))))


async def test_across_a_swap_each_token_has_those_of_the_weights_it_was_fed_to(folder):
    references = [Reference(folder, CONFIG, seed) for seed in (0, 1)]
    named = random_tensors(CONFIG, 1)
    async with opened_jax(folder, **OPTIONS) as engine:
        async with pause_decoding(engine, chunks=3) as decoding:
            sampling = asyncio.create_task(collect(engine, asked(seeds=range(3), answer_budget=60)))
            await eventually_async(lambda: decoding.stands)
            loading = asyncio.create_task(engine.load(Version(0, 1), named, dict.fromkeys(named)))
            await decoding.arrival(Version(0, 1))
            assert engine.status().sampled_tokens
        await loading
        completions = await sampling
    for completion in completions:
        (_, _, at), _ = completion.versions
        expected = swapped(*references, PROMPT, completion, at)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        fed = np.concatenate([PROMPT, completion.token_ids])[:-1]
        here = len(PROMPT) + at - 1
        _, cache = references[0].feed(fed[:here], experts=completion.experts[:here])
        references[1].feed(fed[here:], cache, experts=completion.experts[here:])
        check_experts(PROMPT, completion, CONFIG, references[0].choices, references[1].choices)


@pytest.mark.parametrize(
    ("config", "tokens", "told"),
    [
        (tiny(), 96, "--router_replay: the model has no experts"),
        (toy_decoder(family="qwen3_moe", max_positions=2**30), 2**24, "a message holds a completion of 4190208 tokens"),
    ],
)
def test_what_cannot_be_told_is_refused_at_the_start(tmp_path, config: DecoderConfig, tokens: int, told: str):
    folder = write_folder(tmp_path / "model", config, random_tensors(config, 0))
    with pytest.raises(ValueError, match=told):
        jax_engine(folder, **{**OPTIONS, "maximum_tokens": tokens})


async def test_a_server_that_does_not_tell_them_refuses(folder):
    async with opened_jax(folder, **{**OPTIONS, "router_replay": False}) as engine:
        with pytest.raises(ValueError, match="experts are asked for, and this server does not tell them"):
            await collect(engine, asked())
        assert all(one.experts is None for one in await collect(engine, ask(PROMPT)))

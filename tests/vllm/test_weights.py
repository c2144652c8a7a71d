"""Weights written in place, on a bfloat16 wire: bit for bit those of the host copy, whatever came and failed before."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rollout_server.engines.vllm.engine import LOAD_ATTEMPTS, VllmEngine
from rollout_server.service import RolloutServer
from scalerl_jax.contract.codec import Version
from scalerl_jax.contract.weight_delta import Change
from tests.support.models import random_tensors
from tests.vllm.asking import LONG, HostCopy, ask, collect, tokens_seen
from tests.vllm.models import SLOTS, config, started

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = config(request.param, tied=False)
    yield from started(tmp_path_factory.mktemp("model"), model, compute_dtype="bfloat16", sync_dtype="bfloat16")


def bfloat16(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.astype(BFLOAT16) for name, value in tensors.items()}


async def assert_held(shared: Any, views: Mapping[str, np.ndarray]) -> None:
    parts = await asyncio.gather(*(shared.vllm.held(name) for name in views))
    for (name, view), (held,) in zip(views.items(), parts, strict=True):
        assert held == view.tobytes(), name


def random_change(rng: np.random.Generator, view: np.ndarray, share: float) -> Change:
    """Written into the view as well."""
    count = max(1, int(share * view.size))
    positions = np.sort(rng.choice(view.size, count, replace=False)).astype(np.int64)
    # Any bits at all, negative zeros and subnormals included, but numbers: the model is asked for tokens too.
    values = rng.normal(0, 0.3, count).astype(BFLOAT16)
    values[rng.random(count) < 0.1] = -0.0
    values.view(np.uint16)[rng.random(count) < 0.1] = 1
    view.reshape(-1)[positions] = values
    return Change(positions, values)


def test_the_weights_of_the_folder_are_rounded_to_the_wire(shared: Any) -> None:
    async def test() -> None:
        await assert_held(shared, bfloat16(random_tensors(shared.vllm.config, 0)))

    shared.run(test())


def test_many_random_changes_leave_the_workers_with_the_hosts_bits(shared: Any) -> None:
    async def test() -> None:
        rng = np.random.default_rng(3)
        engine = shared.engine(slots=SLOTS, queue=8)
        host = HostCopy(engine, bfloat16(random_tensors(shared.vllm.config, 0)))
        names = list(host.views)
        # Tokens are sampled all the while.
        sampling = asyncio.create_task(collect(engine, ask(completions=12, answer_budget=200)))
        for step in range(1, 41):
            changes: dict[str, Change | None] = {}
            for name in rng.choice(names, rng.integers(1, len(names) + 1), replace=False):
                if rng.random() < 0.1:
                    host.views[name][...] = rng.normal(0, 0.3, host.views[name].shape).astype(BFLOAT16)
                    changes[name] = None
                else:
                    changes[name] = random_change(rng, host.views[name], float(rng.choice([0.0, 0.01, 0.3])))
            await engine.load(Version(0, step), host.views, changes)
            if step % 5 == 0:
                await assert_held(shared, host.views)
        completions = await sampling
        assert len(completions) == 12 and all(len(c.token_ids) == 200 for c in completions)
        assert max(len(c.versions) for c in completions) > 3
        assert engine.status().version == Version(0, 40)
        await engine.close()

    shared.run(test())


def breaking(shared: Any, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The first `times` loads end in the middle, in the worker; the sizes of all loads, in tensors."""
    load, sizes = shared.vllm.load, []

    async def load_or_break(buffer: Any, tensors: Mapping[str, np.ndarray], changes: Mapping[str, Any]) -> None:
        sizes.append(len(changes))
        if len(sizes) <= times:
            first = dict(list(changes.items())[: len(changes) // 2 + 1])
            unknown = next(iter(tensors.values()))
            await load(buffer, {**tensors, "no such tensor": unknown}, {**first, "no such tensor": None})
            raise AssertionError("the worker took a tensor that the model does not have")
        await load(buffer, tensors, changes)

    monkeypatch.setattr(shared.vllm, "load", load_or_break)
    return sizes


def test_a_load_that_failed_midway_is_repeated_whole(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        rng = np.random.default_rng(4)
        engine = shared.engine(slots=SLOTS, queue=8)
        host = HostCopy(engine, bfloat16(random_tensors(shared.vllm.config, 0)))
        sampling = asyncio.create_task(collect(engine, ask(completions=SLOTS, answer_budget=LONG)))
        await tokens_seen(engine, 20)
        names = list(host.views)[3:9]
        changes = {name: random_change(rng, host.views[name], 0.2) for name in names}
        sizes = breaking(shared, monkeypatch, LOAD_ATTEMPTS - 1)
        await engine.load(Version(0, 1), host.views, changes)
        # The changes first, then everything: what the broken ones wrote is not known.
        assert sizes == [len(names)] + [len(host.views)] * (LOAD_ATTEMPTS - 1)
        await assert_held(shared, host.views)
        completions = await sampling
        assert [[step for step, _, _ in c.versions] for c in completions] == [[0, 1]] * SLOTS
        await engine.close()

    shared.run(test())


def test_after_too_many_failures_the_engine_is_over(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine: VllmEngine = shared.engine(slots=SLOTS, queue=8)
        server = RolloutServer(engine)
        host = HostCopy(engine, bfloat16(random_tensors(shared.vllm.config, 0)))
        sampling = asyncio.create_task(collect(engine, ask(completions=SLOTS, answer_budget=LONG)))
        await tokens_seen(engine, 20)
        sizes = breaking(shared, monkeypatch, LOAD_ATTEMPTS)
        with pytest.raises(RuntimeError, match=f"could not be written in {LOAD_ATTEMPTS} attempts"):
            await host.load(Version(0, 1), bfloat16(random_tensors(shared.vllm.config, 1)))
        assert len(sizes) == LOAD_ATTEMPTS
        # Nothing goes on with weights that are written in part; the server hears of it and ends.
        with pytest.raises(RuntimeError, match="vLLM has failed"):
            await sampling
        assert "could not be written" in str(await server.failure())
        with pytest.raises(RuntimeError, match="vLLM has failed"):
            await collect(engine, ask())
        await engine.close()

    shared.run(test())

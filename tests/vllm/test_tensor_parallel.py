"""Two workers that share one model, on this machine's CPU: each takes its own part of every version."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from scalerl_jax.contract.codec import Version
from scalerl_jax.contract.weight_delta import Change
from scalerl_jax.model.tensor_layout import pieces
from tests.support.models import random_tensors
from tests.support.transformers_reference import alone, swapped
from tests.vllm.asking import LONG, PROMPT, HostCopy, ask, collect, tokens_seen
from tests.vllm.models import SLOTS, config, reference_of, started

pytestmark = pytest.mark.slow

WORKERS = 2
TOLERANCE = 1e-4


CASES = [
    ("qwen3", True),
    ("qwen3_moe", False),
    *(pytest.param(case, marks=pytest.mark.long) for case in (("qwen3", False), ("qwen2", False))),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'tied' if case[1] else 'untied'}")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    kind, tied = request.param
    model = config(kind, tied=tied)
    yield from started(tmp_path_factory.mktemp("model"), model, workers=WORKERS, router_replay=model.experts > 0)


async def assert_held(shared: Any, views: Mapping[str, np.ndarray]) -> None:
    places = [pieces(shared.vllm.config, rank, WORKERS) for rank in range(WORKERS)]
    parts = await asyncio.gather(*(shared.vllm.held(name) for name in views))
    for (name, view), held in zip(views.items(), parts, strict=True):
        assert held == [np.ascontiguousarray(view[place[name].source]).tobytes() for place in places], name


def test_a_swap_in_mid_sequence_is_that_of_one_worker(shared: Any) -> None:
    async def test() -> None:
        engine = shared.engine(slots=SLOTS, queue=8)
        assert engine.info.devices == WORKERS
        host = HostCopy(engine, random_tensors(shared.vllm.config, 0))
        before, after = (
            reference_of(shared, 0),
            reference_of(shared, 1),
        )
        sampling = asyncio.create_task(
            collect(engine, ask(router_replay=shared.vllm.options.router_replay, completions=SLOTS, answer_budget=LONG))
        )
        await tokens_seen(engine, 20)
        await host.load(Version(0, 1), random_tensors(shared.vllm.config, 1))
        await assert_held(shared, host.views)
        for completion in await sampling:
            at = completion.versions[0][2]
            assert completion.versions == ((0, 0, at), (1, at, LONG))
            expected = swapped(before, after, PROMPT, completion, at)
            np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
        await engine.close()

    shared.run(test())


def test_each_worker_takes_its_part_of_a_patch(shared: Any) -> None:
    async def test() -> None:
        rng = np.random.default_rng(6)
        engine = shared.engine(slots=SLOTS, queue=8)
        host = HostCopy(engine, random_tensors(shared.vllm.config, 0))
        for step in range(1, 11):
            changes: dict[str, Change | None] = {}
            for name in rng.choice(list(host.views), 8, replace=False):
                view = host.views[name]
                positions = np.sort(rng.choice(view.size, max(1, view.size // 20), replace=False)).astype(np.int64)
                values = rng.normal(0, 0.3, len(positions)).astype(np.float32)
                view.reshape(-1)[positions] = values
                changes[name] = Change(positions, values)
            await engine.load(Version(0, step), host.views, changes)
            await assert_held(shared, host.views)
        await engine.close()

    shared.run(test())


def test_the_probabilities_are_those_of_the_whole_vocabulary(shared: Any) -> None:
    async def test() -> None:
        engine = shared.engine(slots=SLOTS, queue=8)
        for completion in await collect(engine, ask(router_replay=shared.vllm.options.router_replay, completions=4)):
            expected = alone(reference_of(shared, 0), PROMPT, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
        await engine.close()

    shared.run(test())

"""More prompt tokens at once than vLLM computes in a step."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.transformers_reference import alone
from tests.vllm.asking import ask, collect
from tests.vllm.models import config, reference_of, started

SLOTS, LENGTH = 8, 1000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = config(max_positions=2048)
    yield from started(tmp_path_factory.mktemp("model"), model, slots=SLOTS, maximum_tokens=LENGTH + 50)


def test_many_long_prompts_at_once(shared: Any) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 80, LENGTH).astype(np.int32) for _ in range(SLOTS)]

    async def test() -> None:
        engine = shared.engine(slots=SLOTS, queue=8)
        groups = [ask(prompt, name=f"train/{number}", answer_budget=8) for number, prompt in enumerate(prompts)]
        together = await asyncio.gather(*(collect(engine, group) for group in groups))
        reference = reference_of(shared, 0)
        for prompt, group, (completion,) in zip(prompts, groups, together, strict=True):
            np.testing.assert_allclose(completion.logprobs, alone(reference, prompt, completion), atol=1e-4)
            (again,) = await collect(engine, group)
            assert again.token_ids.tolist() == completion.token_ids.tolist()  # same seed, same tokens
        await engine.close()

    shared.run(test())

"""What vLLM samples: tokens as often as they are likely, and the same from more prompt tokens than a step computes."""

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from scalerl_jax.contract.codec import CompletionRequest
from tests.support.transformers_reference import alone
from tests.vllm.asking import PROMPT, ask, collect
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


def test_tokens_are_drawn_as_often_as_they_are_likely(shared: Any) -> None:
    """First and second tokens of many completions, each of a seed of its own, by Pearson's chi-squared."""
    many, at_once = 3000, SLOTS

    async def test() -> None:
        engine, reference = shared.engine(slots=SLOTS, queue=8), reference_of(shared, 0)
        pairs = []
        for number in range(many // at_once):
            wanted = [CompletionRequest(i, number * at_once + i) for i in range(at_once)]
            request = dataclasses.replace(ask(answer_budget=2), completions=tuple(wanted))
            pairs += [completion.token_ids for completion in await collect(engine, request)]
        first, second = np.array(pairs).T
        rows, _ = reference.feed(PROMPT)
        expected = [rows[-1].exp().numpy()]
        # Of the second tokens, those after the most common first one.
        common = int(np.bincount(first).argmax())
        rows, _ = reference.feed(np.append(PROMPT, common))
        expected.append(rows[-1].exp().numpy())
        for drawn, p in zip((first, second[first == common]), expected, strict=True):
            counts = np.bincount(drawn, minlength=len(p))
            often = p * len(drawn) >= 5  # the rest is taken together
            o = np.append(counts[often], counts[~often].sum())
            e = np.append(p[often], p[~often].sum()) * len(drawn)
            degrees = len(o) - 1
            assert degrees >= 5
            assert ((o - e) ** 2 / e).sum() < degrees + 4 * np.sqrt(2 * degrees)
        await engine.close()

    shared.run(test())

"""The policy that vLLM samples from, against transformers in float32: also across a change of the weights."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from scalerl_jax.contract.codec import GroupRequest, Interruption, ScoreRequest, Version
from tests.rollout_server.client import serving
from tests.support.models import random_tensors
from tests.support.transformers_reference import alone, check_experts, logprobs_of, swapped
from tests.vllm import asking
from tests.vllm.asking import LONG, PROMPT, HostCopy, collect, tokens_seen
from tests.vllm.models import SLOTS, config, reference_of, started

TOLERANCE = 1e-4
CASES = [
    ("qwen3", True),
    ("llama", False),
    ("qwen3_moe", False),
    *(
        pytest.param(case, marks=[pytest.mark.slow, pytest.mark.long])
        for case in (("qwen3", False), ("llama", True), ("qwen2", True))
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'tied' if case[1] else 'untied'}")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    kind, tied = request.param
    model = config(kind, tied=tied)
    yield from started(tmp_path_factory.mktemp("model"), model, router_replay=model.experts > 0)


def ask(shared: Any, *arguments: Any, **options: Any) -> GroupRequest:
    """Of a mixture of experts also which of them were chosen."""
    return asking.ask(*arguments, router_replay=shared.vllm.options.router_replay, **options)


def test_log_probabilities_are_those_of_transformers(shared: Any) -> None:
    async def test() -> None:
        async with serving(shared.engine(slots=SLOTS, queue=8)) as served:
            completions = await collect(served.engine, ask(shared, completions=6))
            reference = reference_of(shared, 0)
            for completion in completions:
                assert len(completion.token_ids) == 40
                expected = alone(reference, PROMPT, completion)
                np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
                if shared.vllm.config.experts:
                    check_experts(PROMPT, completion, shared.vllm.config, reference.choices)
                scored, version = await served.score(np.concatenate([PROMPT, completion.token_ids]))
                assert version == Version(0, 0) and scored[0] == 0
                np.testing.assert_allclose(scored[len(PROMPT) :], expected, atol=TOLERANCE)
            tokens = np.concatenate([PROMPT, completion.token_ids])
            rows = reference.feed(tokens[:-1], experts=completion.experts)[0].numpy()[len(PROMPT) - 1 :]
            targets = np.random.default_rng(0).integers(-1, shared.vllm.config.vocab_size, (len(rows), 3))
            scores = await served.scores(ScoreRequest(tokens, len(PROMPT), 7, targets))
            told = np.where(targets < 0, 0, np.take_along_axis(rows, np.maximum(targets, 0), axis=1))
            np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE)
            np.testing.assert_allclose(scores.top_logprobs, -np.sort(-rows, axis=1)[:, :7], atol=TOLERANCE)
            np.testing.assert_allclose(
                scores.top_logprobs, np.take_along_axis(rows, scores.top_ids, axis=1), atol=TOLERANCE
            )
            np.testing.assert_allclose(scores.target_logprobs, told, atol=TOLERANCE)

    shared.run(test())


def test_tokens_after_a_forced_phrase_have_the_log_probabilities_of_their_place(shared: Any) -> None:
    phrase = Interruption(text_token_ids=(60, 61, 62, 63), end_of_thinking_token_ids=(62, 63))

    async def test() -> None:
        async with serving(shared.engine(slots=SLOTS, queue=8)) as served:
            wanted = ask(shared, completions=8, thinking_budget=11, answer_budget=9, interruption=phrase)
            forced = 0
            for completion in await collect(served.engine, wanted):
                if completion.forced:
                    forced += 1
                    assert completion.forced == ((11, 15),) and len(completion.token_ids) == 24
                    assert completion.token_ids[11:15].tolist() == [60, 61, 62, 63]
                    assert not completion.logprobs[11:15].any()
                expected = alone(reference_of(shared, 0), PROMPT, completion)
                sampled = completion.sampled()
                np.testing.assert_allclose(completion.logprobs[sampled], expected[sampled], atol=TOLERANCE)
            assert forced >= 4

    shared.run(test())


def test_other_temperatures_tell_the_distribution_that_was_sampled_from(shared: Any) -> None:
    async def test() -> None:
        async with serving(shared.engine(slots=SLOTS, queue=8)) as served:
            (completion,) = await collect(served.engine, ask(shared, temperature=0.7, top_k=5))
            rows, _ = reference_of(shared, 0).feed(np.concatenate([PROMPT, completion.token_ids]))
            kept = (rows / 0.7).topk(5, dim=-1)
            rows = torch.full_like(rows, -torch.inf).scatter(1, kept.indices, kept.values.log_softmax(-1))
            expected = logprobs_of([rows], PROMPT, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)

    shared.run(test())


def test_a_swap_in_mid_sequence_keeps_the_old_keys_and_values(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []  # vLLM's own word for which weights sampled what: the last output of each request
    generate = shared.vllm.engine.generate

    async def listening(*arguments: Any, **options: Any) -> Any:
        async for output in generate(*arguments, **options):
            if output.finished:
                told.append(output.outputs[0].weight_versions)
            yield output

    async def test() -> None:
        monkeypatch.setattr(shared.vllm.engine, "generate", listening)
        resume = shared.vllm.resume

        async def labelled() -> None:
            await shared.vllm.engine.update_weight_version("new")
            await resume()

        monkeypatch.setattr(shared.vllm, "resume", labelled)
        engine = shared.engine(slots=SLOTS, queue=8)
        host = HostCopy(engine, random_tensors(shared.vllm.config, 0))
        await shared.vllm.engine.update_weight_version("old")
        before, after = reference_of(shared, 0), reference_of(shared, 1)
        sampling = asyncio.create_task(collect(engine, ask(shared, completions=SLOTS, answer_budget=LONG)))
        await tokens_seen(engine, 20)
        await host.load(Version(0, 1), random_tensors(shared.vllm.config, 1))
        completions = await sampling
        for completion in completions:
            (first, _, at), (second, start, end) = completion.versions
            assert (first, second, start, end) == (0, 1, at, LONG)
            expected = swapped(before, after, PROMPT, completion, at)
            np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
            # A test that cannot tell the two apart would prove nothing.
            fresh = np.abs(alone(after, PROMPT, completion) - expected)[at:]
            stale = np.abs(alone(before, PROMPT, completion) - expected)[at:]
            assert fresh.max() > 100 * TOLERANCE and stale.max() > 100 * TOLERANCE
        spans = {tuple((span.version, span.start, span.end) for span in versions) for versions in told}
        ours = {(("old", 0, c.versions[0][2]), ("new", c.versions[1][1], LONG)) for c in completions}
        assert spans == ours
        await engine.close()

    shared.run(test())


def test_a_new_request_never_sees_old_keys_and_values(shared: Any) -> None:
    prompt = np.random.default_rng(5).integers(2, 80, 150).astype(np.int32)

    async def test() -> None:
        engine = shared.engine(slots=SLOTS, queue=8)
        host = HostCopy(engine, random_tensors(shared.vllm.config, 0))
        group = ask(shared, prompt, completions=3, answer_budget=12)
        reference = reference_of(shared, 0)
        for completion in await collect(engine, group):
            np.testing.assert_allclose(completion.logprobs, alone(reference, prompt, completion), atol=TOLERANCE)
            if shared.vllm.config.experts:  # of the prompt that is found in the prefix cache, too
                check_experts(prompt, completion, shared.vllm.config, reference.choices)
        # The prompt is in the prefix cache now; another completion of it is under way when the weights change.
        seen = engine.status()
        assert seen.prefill_tokens < 2 * len(prompt), "nothing was found in the prefix cache"
        long = asyncio.create_task(collect(engine, ask(shared, prompt, name="train/1", answer_budget=LONG)))
        await tokens_seen(engine, seen.sampled_tokens + 10)
        await host.load(Version(0, 1), random_tensors(shared.vllm.config, 1))
        after = reference_of(shared, 1)
        for completion in await collect(engine, ask(shared, prompt, name="train/2", completions=3, answer_budget=12)):
            assert completion.versions == ((1, 0, 12),)
            np.testing.assert_allclose(completion.logprobs, alone(after, prompt, completion), atol=TOLERANCE)
        (crossing,) = await long
        assert [step for step, _, _ in crossing.versions] == [0, 1]
        await engine.close()

    shared.run(test())

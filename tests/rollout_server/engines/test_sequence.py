"""A completion's spans from its tokens, however they came, against the same read off token by token."""

import numpy as np

from rollout_server.engines.sequence import Counters, Sequence
from tests.rollout_server.jax_reference import ask, replay


def new(request, counters=None):
    return Sequence(request, request.completions[0], counters=counters or Counters(), maximum_tokens=64)


def test_spans_are_the_stretches_of_equal_tokens():
    rng = np.random.default_rng(0)
    for _ in range(50):
        counters = Counters()
        sequence = new(ask([1, 2]), counters)
        tokens, logprobs, forced, steps, step = [], [], [], [], 3
        for size in rng.integers(1, 7, 5):
            step += int(rng.random() < 0.4)
            chunk = [rng.integers(0, 99, size), rng.normal(size=size).astype(np.float32), rng.random(size) < 0.3]
            sequence.extend(*(values.tolist() for values in chunk), step)
            tokens, logprobs, forced = (
                np.append(all_, one) for all_, one in zip((tokens, logprobs, forced), chunk, strict=True)
            )
            steps += [step] * size
        sequence.finish_reason = "stop"
        one = sequence.completion()
        assert one.token_ids.dtype == np.int32 and one.logprobs.dtype == np.float32
        np.testing.assert_array_equal(one.token_ids, tokens)
        np.testing.assert_array_equal(one.logprobs, logprobs.astype(np.float32))
        np.testing.assert_array_equal(one.token_steps(), steps)
        np.testing.assert_array_equal(one.sampled(), ~forced.astype(bool))
        # No longer than needed, and they cover the whole.
        assert [step for step, _, _ in one.versions] == sorted(set(steps))
        assert all(before[1] < after[0] for before, after in zip(one.forced, one.forced[1:]))
        assert one.versions[0][1] == 0 and one.versions[-1][2] == len(tokens) == sequence.length
        assert counters.forced_tokens == forced.sum() and counters.sampled_tokens == len(tokens) - forced.sum()


def test_tokens_that_arrive_on_the_host_are_judged_by_the_budget():
    rng = np.random.default_rng(1)
    reasons = set()
    for _ in range(200):
        request = ask(
            [1, 2], budgets=[int(rng.integers(0, 6))], phrase=(4, 5, 6), end=(5, 6), stop_token_ids=(7,),
            answer_budget=int(rng.integers(1, 9)),
        )  # fmt: skip
        sequence = new(request)
        while not sequence.finish_reason:
            # A few at a time, of which the last may come after the end.
            for _ in range(int(rng.integers(1, 4))):
                token = sequence.budget.forced if not sequence.finish_reason else None
                sequence.extend_within_budget([int(rng.integers(3, 9)) if token is None else token], [-0.5], 2)
        one = sequence.completion()
        marks, reason = replay(request, request.completions[0].thinking_budget, one.token_ids, 64)
        np.testing.assert_array_equal(one.sampled(), ~marks)
        assert one.finish_reason == reason
        np.testing.assert_array_equal(one.logprobs, np.where(marks, 0.0, -0.5).astype(np.float32))
        reasons.add(reason)
    assert reasons == {"stop", "length"}

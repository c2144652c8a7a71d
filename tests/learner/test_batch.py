"""From finished groups to segments: every number here is worked out by hand."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.contract.codec import Completion, TeacherScores
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.learner.batch import build, per_token


@dataclasses.dataclass(frozen=True)
class Group:
    row: Row
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]
    teachers: tuple[tuple[TeacherScores, ...], ...] | None = None


def completion(index, tokens, *, versions=None, forced=(), finish_reason="stop"):
    """Tokens 100, 101, ... with log-probs -0.5, -1, -1.5, ...; 0 where forced, as the contract has it."""
    logprobs = -0.5 * np.arange(1, tokens + 1, dtype=np.float32)
    for start, end in forced:
        logprobs[start:end] = 0
    return Completion(
        incarnation=1,
        group_id="train/0",
        index=index,
        token_ids=np.arange(100, 100 + tokens, dtype=np.int32),
        logprobs=logprobs,
        versions=versions or ((5, 0, tokens),),
        forced=forced,
        finish_reason=finish_reason,
    )


def group(index, completions, correct, prompt_tokens=2):
    row = Row("", "", index=index, token_ids=np.arange(7, 7 + prompt_tokens, dtype=np.int32))
    return Group(row, tuple(completions), tuple(RIGHT if one else WRONG for one in correct))


def mixed_groups():
    """Prompt 30: right (4 tokens), wrong (2), wrong (3, of them 1 forced), cut (5).  Prompt 31: all right.
    Prompt 32: right (1 token), wrong (2), and two that were cut, one of them called right by the verifier."""
    return [
        group(
            30,
            [
                completion(0, 4),
                completion(1, 2),
                completion(2, 3, forced=((1, 2),)),
                completion(3, 5, finish_reason="length"),
            ],
            (True, False, False, False),
        ),
        group(31, [completion(i, 2) for i in range(4)], (True,) * 4),
        group(
            32,
            [
                completion(0, 1),
                completion(1, 2),
                completion(2, 6, finish_reason="length"),
                completion(3, 6, finish_reason="length"),
            ],
            (True, False, False, True),
            prompt_tokens=3,
        ),
    ]


def test_excluded_completions_leave_mean_scale_weights_and_group():
    batch = build(mixed_groups(), ObjectiveConfig(), number=7)

    # Prompt 30 counts +1, -1, -1: mean -1/3, so A = 4/3, -2/3, -2/3.  Prompt 32 counts +1, -1: A = 1, -1.
    # mean A^2 = (16/9 + 4/9 + 4/9 + 1 + 1) / 5 = 14/15
    scale = np.sqrt(14 / 15)
    expected = [4 / 3 / scale, -2 / 3 / scale, -2 / 3 / scale, 1 / scale, -1 / scale]
    # P = 2;  T_30 = 4 + 2 + 2 sampled tokens, T_32 = 1 + 2
    weights = [1 / 16, 1 / 16, 1 / 16, 1 / 6, 1 / 6]
    # Of each segment, the tokens of the completion: which are trained on.
    trained = [[1, 1, 1, 1], [1, 1], [1, 0, 1], [1], [1, 1]]
    prompts = [2, 2, 2, 3, 3]

    assert len(batch.segments) == 5
    for segment, advantage, weight, mask, prompt in zip(batch.segments, expected, weights, trained, prompts):
        tokens = len(mask)
        assert segment.tokens.tolist() == [*range(7, 7 + prompt), *range(100, 100 + tokens)]
        np.testing.assert_allclose(segment.weights, [0] * prompt + [weight * m for m in mask], rtol=1e-6)
        np.testing.assert_allclose(segment.advantages[prompt:], [advantage] * tokens, rtol=1e-6)
        logprobs = [-0.5 * (t + 1) * m for t, m in enumerate(mask)]
        np.testing.assert_allclose(segment.generator_logprobs, [0] * prompt + logprobs)
    assert sum(s.weights.sum() for s in batch.segments) == pytest.approx(1)  # P prompts of 1/P each
    assert batch.prompt_tokens == sum(prompts) + 4 + 2 + 3 + 1 + 2

    assert batch.metrics["prompts_surviving"] == 2
    assert batch.metrics["completions_counted"] == 5
    assert batch.metrics["loss_tokens"] == 11
    # Prompt 32's last completion was cut: what the verifier says of it does not count.
    assert batch.metrics["pass_rate"] == pytest.approx(6 / 12)
    assert batch.metrics["truncated"] == pytest.approx(3 / 12)
    assert batch.metrics["interrupted"] == pytest.approx(1 / 12)
    assert batch.metrics["length_mean"] == pytest.approx((4 + 2 + 2 + 5 + 4 * 2 + 1 + 2 + 6 + 6) / 12)
    assert batch.metrics["length_max"] == 6


def test_each_turn_has_the_advantage_of_what_comes_behind_it():
    """Turns of 2 tokens with a reply of 1 between: three of them, two, one, and a completion that knows no turns."""

    def episode(index, turns):
        replies = tuple((3 * t + 2, 3 * t + 3) for t in range(turns - 1))
        return dataclasses.replace(completion(index, 3 * turns - 1, forced=replies), replies=replies)

    rewards = ((1.0, 0.0, 1.0), (0.0, 1.0), (0.5,), ())
    scores = tuple(Score(sum(one) or -1.0, bool(index % 2), turns=one) for index, one in enumerate(rewards))
    row = Row("", index=3, token_ids=np.arange(2, dtype=np.int32))
    made = Group(row, tuple(episode(index, len(one) or 1) for index, one in enumerate(rewards)), scores)
    objective = ObjectiveConfig(credit="turn", advantage_normalization="none")
    batch = build([made], objective, number=7)
    # What is behind: 2, 1, 1 / 1, 1 / .5 / -1; means 2.5 / 4, 1, 1.
    expected = [[1.375] * 2 + [0.0] * 6, [0.375] * 2 + [0.0] * 3, [-0.125] * 2, [-1.625] * 2]
    for segment, advantage in zip(batch.segments, expected, strict=True):
        loss = segment.weights[2:] > 0
        np.testing.assert_allclose(segment.advantages[2:][loss], np.array(advantage)[loss], atol=1e-6)

    # Where later turns begin new branches they are the same turns.
    def rest(first, branch, prompt):
        return dataclasses.replace(
            branch, prompt=np.arange(prompt, dtype=np.int32), token_ids=branch.token_ids[first:],
            logprobs=branch.logprobs[first:], versions=((0, 0, len(branch.token_ids) - first),),
            forced=tuple((a - first, b - first) for a, b in branch.forced if a >= first),
            replies=tuple((a - first, b - first) for a, b in branch.replies if a >= first),
        )  # fmt: skip

    long, two, *others = made.completions
    split = (
        dataclasses.replace(episode(0, 1), others=(rest(3, long, 5),)),
        dataclasses.replace(episode(1, 1), others=(rest(3, two, 4),)),
    )
    branched = build([dataclasses.replace(made, completions=(*split, *others))], objective, number=7)
    assert branched.origins == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 3, 0)]
    for whole, i in zip(batch.segments, range(4), strict=True):
        parts = [s for s, (_, of, _) in zip(branched.segments, branched.origins, strict=True) if of == i]
        for of in ("tokens", "advantages", "weights", "generator_logprobs"):
            found = np.concatenate([getattr(s, of)[s.weights > 0] for s in parts])
            np.testing.assert_array_equal(found, getattr(whole, of)[whole.weights > 0])
    # An episode that is cut is worth -1 from its first turn on.
    cut = dataclasses.replace(made.completions[0], finish_reason="length")
    penalized = dataclasses.replace(objective, truncated="penalize")
    batch = build([dataclasses.replace(made, completions=(cut, *made.completions[1:]))], penalized, number=7)
    np.testing.assert_allclose(batch.segments[0].advantages[2:4], -1 - (-1 + 1 + 0.5 - 1) / 4)
    # Without rewards of turns, and with as many turns in each, it is the advantage of the episode.
    alike = Group(row, tuple(episode(index, 2) for index in range(4)), tuple(RIGHT if i else WRONG for i in range(4)))
    by_turn, whole = (build([alike], ObjectiveConfig(credit=credit), number=7) for credit in ("turn", "episode"))
    for one, other in zip(by_turn.segments, whole.segments, strict=True):
        np.testing.assert_allclose(one.advantages, other.advantages, rtol=1e-6)


def taught(made, *, k=0):
    """The group, and what its teacher gives its tokens above what their generator did: .1, .2, ... nats in the first
    completion, 1.1, 1.2, ... in the second; nothing is looked at before a completion, or where a token was forced."""

    def scores(i, branch):
        prompt = made.row.token_ids if branch.prompt is None else branch.prompt
        above = i + 0.1 * np.arange(1, len(branch.token_ids) + 1)
        own = np.where(branch.sampled(), branch.logprobs + above, np.nan)
        logprobs = np.concatenate([np.full(len(prompt), np.nan), own]).astype(np.float32)
        ids = np.full((len(logprobs), k), i, np.int32)
        return TeacherScores(logprobs, ids, ids.astype(np.float32)) if k else TeacherScores(logprobs)

    branches = (completion.branches for completion in made.completions)
    return dataclasses.replace(
        made, teachers=tuple(tuple(scores(i, b) for b in some) for i, some in enumerate(branches))
    )


def test_what_a_teacher_says_of_sampled_tokens_is_added_to_their_advantages():
    mixed, right, untaught = mixed_groups()
    groups = [taught(mixed), taught(right), untaught]
    objective = ObjectiveConfig(distill="sampled", distill_weight=2.0, reward_weight=0.5)
    batch = build(groups, objective, number=7)
    # As without a teacher, halved; the prompt that is all right has none, and is trained on for its teacher.
    scale = 2 * np.sqrt(14 / 15)
    rewarded = [4 / 3 / scale, -2 / 3 / scale, -2 / 3 / scale, *[0] * 4, 1 / scale, -1 / scale]
    places = [(0, 0), (0, 1), (0, 2), *((1, i) for i in range(4)), (2, 0), (2, 1)]
    weights = [1 / (3 * 8)] * 3 + [1 / (3 * 8)] * 4 + [1 / (3 * 3)] * 2
    assert [(p, i) for p, i, _ in batch.origins] == places
    for segment, advantage, weight, (p, i) in zip(batch.segments, rewarded, weights, places, strict=True):
        trained = segment.weights > 0
        places_of = np.flatnonzero(trained) - len(groups[p].row.token_ids) + 1
        above = i + 0.1 * places_of if p < 2 else 0.0
        np.testing.assert_allclose(segment.advantages[trained], advantage + 2 * above, rtol=1e-5)
        np.testing.assert_allclose(segment.weights[trained], weight, rtol=1e-6)
        assert segment.teacher is None  # the loss needs no more
    # -.1, -.2, -.3, -.4 / -1.1, -1.2 / -2.1, -2.3 (the second was forced) and -i - .1, -i - .2 for i = 0, 1, 2, 3
    assert batch.metrics["teacher_kl"] == pytest.approx(-((1 + 2.3 + 4.4) + (2 * (0 + 1 + 2 + 3) + 4 * 0.3)) / 16)
    assert batch.metrics["prompts_surviving"] == 3
    assert batch.metrics["completions_counted"] == 9
    assert "teacher_kl" not in build(mixed_groups(), objective, number=7).metrics
    # What is not asked for is not looked at.
    plain, without = build(groups, ObjectiveConfig(), number=7), build(mixed_groups(), ObjectiveConfig(), number=7)
    assert plain.metrics == without.metrics and len(plain.segments) == 5
    assert all(segment.teacher is None for segment in plain.segments)


def test_without_rewards_what_no_teacher_scored_is_left_out():
    mixed, right, untaught = mixed_groups()
    failed = dataclasses.replace(right.scores[0], excluded=True)
    right = dataclasses.replace(right, scores=(failed, *right.scores[1:]))
    groups = [taught(mixed, k=3), taught(right, k=3), untaught]
    objective = ObjectiveConfig(distill="topk_forward", reward_weight=0.0)
    batch = build(groups, objective, number=7)
    # Neither what the budget cut, nor what its environment failed.
    assert [(p, i) for p, i, _ in batch.origins] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]
    for segment, (p, i, b) in zip(batch.segments, batch.origins, strict=True):
        assert not segment.advantages.any()
        assert segment.teacher is groups[p].teachers[i][b]
        np.testing.assert_allclose(segment.weights[segment.weights > 0], 1 / (2 * (8, 6)[p]), rtol=1e-6)
    # With `penalize` a completion that was cut stays, and its reward weighs nothing.
    batch = build(groups, dataclasses.replace(objective, truncated="penalize"), number=7)
    assert [(p, i) for p, i, _ in batch.origins if p == 0] == [(0, i) for i in range(4)]
    assert not any(segment.advantages.any() for segment in batch.segments)


def test_each_branch_and_turn_has_its_teacher():
    other = dataclasses.replace(completion(0, 3), prompt=np.array([9, 9, 9, 9], np.int32))
    first = dataclasses.replace(completion(0, 5, forced=((2, 3),)), replies=((2, 3),), others=(other,))
    second = dataclasses.replace(completion(1, 5, forced=((2, 3),)), replies=((2, 3),))
    made = taught(group(4, [first, second], (True, False)))
    scores = (
        dataclasses.replace(made.scores[0], turns=(0.0, 1.0)),
        dataclasses.replace(made.scores[1], turns=(0.0, 0.0)),
    )
    made = dataclasses.replace(made, scores=scores)
    objective = ObjectiveConfig(credit="turn", advantage_normalization="none")
    plain = build([made], objective, number=7)
    batch = build([made], dataclasses.replace(objective, distill="sampled"), number=7)
    assert batch.origins == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    for one, before, (_, i, b) in zip(batch.segments, plain.segments, batch.origins, strict=True):
        trained = one.weights > 0
        above = np.flatnonzero(trained) - (4 if b else 2) + 1
        np.testing.assert_allclose((one.advantages - before.advantages)[trained], i + 0.1 * above, rtol=1e-5)
        np.testing.assert_array_equal(one.weights, before.weights)


def test_truncated_as_failures():
    batch = build(mixed_groups(), ObjectiveConfig(truncated="penalize"), number=7)

    # Prompt 30: +1, -1, -1, -1: mean -1/2, A = 3/2, -1/2 three times.  Prompt 32 the same.
    # mean A^2 = 2 (9/4 + 3/4) / 8 = 3/4
    scale = np.sqrt(3 / 4)
    expected = [1.5 / scale, *[-0.5 / scale] * 3] * 2
    # T_30 = 4 + 2 + 2 + 5, T_32 = 1 + 2 + 6 + 6
    weights = [1 / 26] * 4 + [1 / 30] * 4
    assert len(batch.segments) == 8
    for segment, advantage, weight in zip(batch.segments, expected, weights):
        trained = segment.weights > 0
        np.testing.assert_allclose(segment.advantages[trained], advantage, rtol=1e-6)
        np.testing.assert_allclose(segment.weights[trained], weight, rtol=1e-6)
    assert batch.rewards.tolist() == [[1, -1, -1, -1], [1, 1, 1, 1], [1, -1, -1, -1]]
    assert batch.metrics["reward"] == pytest.approx(0)


@pytest.mark.parametrize("truncated", ["exclude", "penalize"])
def test_the_curriculum_hears_of_every_completion(truncated):
    """A completion that was cut counts as wrong there, excluded or not; and so does a group that does not survive."""
    batch = build(mixed_groups(), ObjectiveConfig(truncated=truncated), number=7)
    assert batch.outcomes == [(30, 1, 4), (31, 4, 4), (32, 1, 4)]


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("prompt", [1 / 16] * 3 + [1 / 6] * 2),
        ("sample", [1 / (2 * 3 * n) for n in (4, 2, 2)] + [1 / (2 * 2 * n) for n in (1, 2)]),
        ("token", [1 / 11] * 5),
    ],
)
def test_aggregation_is_a_choice_of_weights(aggregation, weights):
    batch = build(mixed_groups(), ObjectiveConfig(aggregation=aggregation), number=7)
    found = [segment.weights.max() for segment in batch.segments]
    np.testing.assert_allclose(found, weights, rtol=1e-6)
    assert sum(s.weights.sum() for s in batch.segments) == pytest.approx(1)


def test_nothing_survives():
    """All right, all wrong, and one right completion whose fellows were all cut: P = 0."""
    groups = [
        group(0, [completion(i, 3) for i in range(3)], (True,) * 3),
        group(1, [completion(i, 3) for i in range(3)], (False,) * 3),
        group(2, [completion(0, 3), *(completion(i, 3, finish_reason="length") for i in (1, 2))], (True, False, False)),
    ]
    batch = build(groups, ObjectiveConfig(), number=5)
    assert batch.segments == [] and batch.prompt_tokens == 0
    assert batch.metrics["prompts_surviving"] == batch.metrics["loss_tokens"] == 0
    assert batch.metrics["pass_rate"] == pytest.approx(4 / 9)
    assert batch.outcomes == [(0, 3, 3), (1, 0, 3), (2, 1, 3)]
    assert sum(batch.lags.values()) == 27
    assert all(np.isfinite(value) for value in batch.metrics.values())


def test_lags_are_counted_by_token_over_everything_sampled():
    spans = ((3, 0, 2), (5, 2, 5), (6, 5, 6))
    groups = [
        # 6 tokens; the forced ones, 4 and 5, were fed by versions 5 and 6: neither is counted.
        group(0, [completion(0, 6, versions=spans, forced=((4, 6),)), completion(1, 2)], (True, False)),
        # Not trained on, yet sampled.
        group(1, [completion(0, 3, versions=((7, 0, 3),)), completion(1, 1)], (False, False)),
    ]
    batch = build(groups, ObjectiveConfig(), number=8)
    assert batch.lags == {5: 2, 3: 2 + 2 + 1, 1: 3}
    assert batch.metrics["lag_max"] == 5
    assert batch.metrics["lag_mean"] == pytest.approx((5 * 2 + 3 * 5 + 1 * 3) / 10)
    assert sum(batch.lags.values()) == 10


def test_a_completion_that_is_all_forced_has_no_loss():
    """Thinking began with its end: nothing was sampled that could be trained on."""
    groups = [group(0, [completion(0, 3, forced=((0, 3),)), completion(1, 2)], (True, False))]
    batch = build(groups, ObjectiveConfig(), number=5)
    # The advantages are those of a group of two; the weight is the other's alone.
    (segment,) = batch.segments
    np.testing.assert_allclose(segment.advantages[2:], [-1, -1])
    np.testing.assert_allclose(segment.weights, [0, 0, 0.5, 0.5])


def test_sums_become_means_over_loss_tokens():
    sums = {
        "tokens": 4.0,
        "loss": -0.25,
        "entropy": 8.0,
        "mismatch": 0.4,
        "max_mismatch": 0.3,
        "other_bits": 1.0,
        "kl": 0.2,
        "ratio": 4.0,
        "ratio_squared": 5.0,
        "max_ratio": 2.0,
        "clipped": 1.0,
        "masked": 2.0,
        "gradient_norm": 3.0,
        "micro_batches": 2,
        "row_use": 0.5,
    }
    values = per_token(sums)
    assert values["loss"] == -0.25 and values["gradient_norm"] == 3.0
    assert (values["entropy"], values["clipped"], values["masked"], values["other_bits"]) == (2.0, 0.25, 0.5, 0.25)
    assert values["effective_sample_size"] == pytest.approx(16 / 20)  # (sum r)^2 / (n sum r^2)


def test_completions_whose_thinking_never_ended_are_measured():
    """Tokens are 100, 101, ...; the end is two of them on end, sampled or forced."""
    groups = [
        group(1, [completion(0, 6), completion(1, 3), completion(2, 2), completion(3, 1)], (False,) * 4),
        group(2, [completion(0, 4, forced=((2, 4),)), *(completion(i, 3) for i in (1, 2, 3))], (False,) * 4),
    ]
    assert build(groups, ObjectiveConfig(), number=7, end_of_thinking=(102, 103)).metrics["no_end_of_thinking"] == 6 / 8
    assert build(groups, ObjectiveConfig(), number=7, end_of_thinking=(103, 102)).metrics["no_end_of_thinking"] == 1
    assert build(groups, ObjectiveConfig(), number=7, end_of_thinking=(101,)).metrics["no_end_of_thinking"] == 1 / 8
    assert "no_end_of_thinking" not in build(groups, ObjectiveConfig(), number=7).metrics  # without thinking


def test_the_reward_is_what_the_objective_sees_and_correct_what_filters():
    """Two that are wrong with different rewards are no signal; with a right one among them the rewards are centred."""
    row, completions = (
        Row("", "", index=3, token_ids=np.arange(2, dtype=np.int32)),
        [completion(i, 2) for i in range(3)],
    )
    wrong = (Score(0.0, False, {"length": 2.0}), Score(0.5, False), Score(0.75, False, {"length": 4.0}))
    none = build([Group(row, tuple(completions), wrong)], ObjectiveConfig(), number=7)
    assert none.segments == [] and none.metrics["pass_rate"] == 0 and none.outcomes == [(3, 0, 3)]
    some = build([Group(row, tuple(completions), (Score(1.75, True), *wrong[1:]))], ObjectiveConfig(), number=7)
    assert some.rewards.tolist() == [[1.75, 0.5, 0.75]] and some.outcomes == [(3, 1, 3)]
    scale = np.sqrt((0.75**2 + 0.5**2 + 0.25**2) / 3)
    found = [segment.advantages[-1] for segment in some.segments]
    np.testing.assert_allclose(found, [0.75 / scale, -0.5 / scale, -0.25 / scale], rtol=1e-6)
    # What the scores say besides is a mean over those that say it.
    assert none.metrics["score/length"] == 3.0 and some.metrics["score/length"] == 4.0

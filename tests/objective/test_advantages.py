"""Advantages against the formulas as loops, and what must not change them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.objective import advantages, turn_advantages
from scalerl_jax.objective.advantages import NORMALIZATIONS
from tests.objective import reference

seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, *, prompts: int = 7, group: int = 5, shaped: bool = True):
    """(rewards, right, counted) [prompts, group]; some prompts all right or all wrong, some completions excluded."""
    rng = np.random.default_rng(seed)
    right = rng.random((prompts, group)) < rng.choice([0.0, 0.3, 0.7, 1.0], (prompts, 1))
    rewards = np.where(right, 1.0, -1.0) + (0.5 * rng.normal(size=right.shape) if shaped else 0.0)
    counted = rng.random(right.shape) > rng.choice([0.0, 0.3, 0.9], (prompts, 1))
    return rewards, right, counted


def as_lists(rewards, right, counted) -> reference.Batch:
    return [
        [reference.Completion(float(r), bool(ok), not kept, [], [], []) for r, ok, kept in zip(*rows)]
        for rows in zip(rewards, right, counted)
    ]


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@given(seed=seeds)
def test_equal_the_formulas(normalization, filtered, seed):
    rewards, right, counted = draw(seed)
    batch = as_lists(rewards, right, counted)
    got, survives = advantages(
        rewards, right, counted, normalization=normalization, filter_zero_variance=filtered
    )  # fmt: skip
    assert got.dtype == np.float64
    expected = reference.advantages(batch, normalization, filtered=filtered)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)  # a reward near the mean leaves few digits
    assert survives.tolist() == [bool(reference.counted(group, filtered=filtered)) for group in batch]


@pytest.mark.parametrize("normalization", ["batch", "prompt", "none"])
@given(seed=seeds)
def test_turns_equal_the_formulas(normalization, seed):
    rng = np.random.default_rng(seed)
    prompts, group, turns = 4, 5, 3
    counted, survives = rng.random((prompts, group, turns)) > 0.4, rng.random(prompts) > 0.3
    returns = rng.normal(size=counted.shape)
    expected = np.zeros(counted.shape)
    cells = [(p, t, [i for i in range(group) if counted[p, i, t]]) for p in range(prompts) for t in range(turns)]
    for p, t, members in cells:
        values = [returns[p, i, t] for i in members]
        if not survives[p] or len(members) < 2:
            continue
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
        for i in members:
            divisor = deviation + 1e-6 if normalization == "prompt" else 1.0
            expected[p, i, t] = (returns[p, i, t] - mean) / divisor
    kept = sum(len(members) for p, _, members in cells if survives[p])
    if normalization == "batch" and (square := (expected**2).sum()) > 0:
        expected /= (square / kept) ** 0.5
    got = turn_advantages(returns, counted, survives, normalization=normalization)
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)


def test_by_hand():
    """A = 4/3, -2/3, -2/3 and 1, -1; the third prompt has one completion left, the others no variance."""
    rewards = np.array([[1, -1, -1], [1, -1, 1], [1, -1, -1], [1, 1, 1], [-1, -1, -1]], float)
    counted = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]], bool)
    centred = np.array([[4 / 3, -2 / 3, -2 / 3], [1, -1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    for normalization, scale in (
        ("none", np.ones((5, 1))),
        ("batch", np.full((5, 1), np.sqrt((16 + 4 + 4 + 9 + 9) / 9 / 5))),
        ("prompt", np.array([[np.sqrt(24 / 9 / 3) + 1e-6], [1 + 1e-6], [1], [1], [1]])),
    ):
        got, survives = advantages(rewards, rewards > 0, counted, normalization=normalization)
        np.testing.assert_allclose(got, centred / scale, rtol=1e-12)
        assert survives.tolist() == [True, True, False, False, False]


@given(seed=seeds)
def test_a_batch_has_mean_zero_and_mean_square_one(seed):
    rewards, right, counted = draw(seed)
    got, survives = advantages(rewards, right, counted)
    kept = counted & survives[:, None]
    np.testing.assert_allclose(got.sum(axis=1), 0, atol=1e-12)
    if kept.any():
        assert (got[kept] ** 2).mean() == pytest.approx(1)
    assert not got[~kept].any()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@given(seed=seeds)
def test_what_does_not_count_has_no_part(normalization, seed):
    """The rewards of excluded completions and of dropped prompts may be anything at all."""
    rewards, right, counted = draw(seed)
    got, survives = advantages(rewards, right, counted, normalization=normalization)
    kept = counted & survives[:, None]
    for nonsense in (np.nan, np.inf, 1e300):
        other, same = advantages(np.where(kept, rewards, nonsense), right, counted, normalization=normalization)
        np.testing.assert_array_equal(other, got)
        np.testing.assert_array_equal(same, survives)
    flipped, _ = advantages(rewards, right ^ ~counted, counted, normalization=normalization)
    np.testing.assert_array_equal(flipped, got)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@given(seed=seeds)
def test_order_and_a_constant_in_the_rewards_change_nothing(normalization, seed):
    rewards, right, counted = draw(seed)
    got, survives = advantages(rewards, right, counted, normalization=normalization)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(rewards))
    moved = (rewards + rng.normal(size=(len(rewards), 1)))[order]
    other, other_survives = advantages(moved, right[order], counted[order], normalization=normalization)
    np.testing.assert_allclose(other, got[order], atol=1e-12)
    np.testing.assert_array_equal(other_survives, survives[order])


def test_right_is_the_verifiers_word_and_not_the_reward():
    """Shaped rewards that differ do not save a prompt without variance, nor do equal ones drop one that has it."""
    rewards = np.array([[1.0, 0.4, 0.9], [0.5, 0.5, 0.5]])
    right = np.array([[True, True, True], [True, False, False]])
    got, survives = advantages(rewards, right, np.ones_like(right))
    assert survives.tolist() == [False, True]
    assert not got.any()  # equal rewards: nothing to learn, and no division by zero


@pytest.mark.parametrize("normalization", ["batch", "prompt", "none"])
@given(value=st.floats(-1e6, 1e6), group=st.integers(2, 40), prompts=st.integers(1, 5))
def test_equal_rewards_have_no_advantage_at_all(normalization, value, group, prompts):
    """Their mean is off by rounding, which a division by its own size would make of order 1."""
    right = np.zeros((prompts, group), bool)
    right[:, 0] = True
    rewards = np.full((prompts, group), value)
    got, survives = advantages(rewards, right, np.ones_like(right), normalization=normalization)
    assert survives.all() and not got.any()


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_nothing_survives(normalization, filtered):
    """P = 0: no completion counts, or (where the filter is on) none differs."""
    shape = (3, 4)
    for counted, right in ((np.zeros(shape, bool), np.eye(*shape) > 0), (np.ones(shape, bool), np.ones(shape, bool))):
        rewards = np.where(right, 1.0, -1.0)
        got, survives = advantages(
            rewards, right, counted, normalization=normalization, filter_zero_variance=filtered
        )  # fmt: skip
        np.testing.assert_array_equal(got, np.zeros(shape))
        assert survives.tolist() == [bool(counted.all()) and not filtered] * 3


def test_an_unknown_normalization_is_named():
    with pytest.raises(ValueError, match="'std' is not one of batch, prompt, none, maxrl"):
        advantages(np.ones((1, 2)), np.ones((1, 2), bool), np.ones((1, 2), bool), normalization="std")

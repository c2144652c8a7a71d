"""From rewards to the loss: the whole objective equals the published ones, averages inside averages, as loops.

Here advantages, weights and objective are joined as a run joins them: numbers per completion, laid out in packed rows.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.objective import advantages, policy_loss, token_weights
from tests.objective import reference
from tests.objective.batches import Arrays, batch

# (objective, aggregation, normalization, zero-variance filter)
RECIPES = {
    "ScaleRL": (ObjectiveConfig(), "prompt", "batch", True),
    "GRPO": (ObjectiveConfig(loss="clip", clip_low=0.2, clip_high=0.2), "sample", "prompt", False),
    "DAPO": (ObjectiveConfig(loss="clip", clip_low=0.2, clip_high=0.26), "prompt", "prompt", True),
    "Dr. GRPO": (ObjectiveConfig(loss="clip", clip_low=0.2, clip_high=0.2), "token", "none", False),
    "GSPO": (ObjectiveConfig(loss="gspo", clip_low=0.1, clip_high=0.1), "sample", "batch", True),
    "ScaleRL, no filter": (ObjectiveConfig(max_ratio=1.2), "prompt", "batch", False),
    "MaxRL": (ObjectiveConfig(loss="reinforce"), "prompt", "maxrl", True),
    "ScaleRL, CPPO": (ObjectiveConfig(cppo_threshold=0.05, cppo_budget=0.01), "prompt", "batch", True),
    "ScaleRL, IcePop": (ObjectiveConfig(icepop_low=0.7, icepop_high=1.5), "token", "batch", True),
}
LENGTH = 32


@functools.cache
def compiled(fields):
    def loss(logp, rows):
        return policy_loss(**(rows | {"logp_train": logp}), objective=ObjectiveConfig(*fields))[0]

    return jax.jit(jax.value_and_grad(loss))


def loss_and_gradient(rows, objective):
    return compiled(dataclasses.astuple(objective))(rows["logp_train"], rows)


def laid_out(completions, ahat, weight, seed):
    """Rows of [24, LENGTH], completions in random order; and where each of them lies: (row, start)."""
    rng = np.random.default_rng(seed)
    rows = {name: np.zeros((24, LENGTH), np.float32) for name in ("logp_train", "logp_gen", "advantages", "weights")}
    rows["segment_ids"] = np.zeros((24, LENGTH), np.int32)
    places, row, start, number = {}, 0, 0, 0
    flat = [(p, i) for p, group in enumerate(completions) for i in range(len(group))]
    for p, i in (flat[j] for j in rng.permutation(len(flat))):
        y = completions[p][i]
        if start + len(y.train) > LENGTH:
            row, start, number = row + 1, 0, 0
        at, number = (row, slice(start, start + len(y.train))), number + 1
        rows["logp_train"][at], rows["logp_gen"][at] = y.train, y.gen
        rows["advantages"][at], rows["weights"][at] = ahat[p, i], weight[p, i] * np.array(y.sampled)
        rows["segment_ids"][at] = number
        places[p, i] = (row, start)
        start += len(y.train)
    return rows, places


def gradient_of(completions, recipe, seed):
    objective, aggregation, normalization, filtered = recipe
    arrays = Arrays.of(completions)
    ahat, survives = advantages(
        arrays.rewards, arrays.right, arrays.counted, normalization=normalization, filter_zero_variance=filtered
    )
    weight = token_weights(arrays.loss_tokens, arrays.counted, survives, aggregation)
    rows, places = laid_out(completions, ahat, weight, seed)
    loss, gradient = loss_and_gradient(rows, objective)
    gradient = np.asarray(gradient)
    found = [
        [gradient[row, start : start + len(y.train)] for i, y in enumerate(group) for row, start in [places[p, i]]]
        for p, group in enumerate(completions)
    ]
    assert np.abs(gradient).sum() == pytest.approx(sum(np.abs(g).sum() for group in found for g in group), rel=1e-5)
    return float(loss), found


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_loss_and_its_gradient_are_the_published_ones(recipe, seed):
    objective, aggregation, normalization, filtered = recipe
    completions = batch(seed, objective)
    loss, gradient = gradient_of(completions, recipe, seed)
    expected_loss, expected = reference.batch_loss(
        completions, objective, aggregation=aggregation, normalization=normalization, filtered=filtered
    )
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
    for p, group in enumerate(completions):
        for i, y in enumerate(group):
            np.testing.assert_allclose(gradient[p][i], expected[p][i], rtol=1e-4, atol=1e-7)
            if y.excluded or not reference.counted(group, filtered=filtered):
                assert not np.any(gradient[p][i])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_batch_of_one_answer_has_no_gradient(recipe):
    """All right: P = 0 with the filter, and advantages of 0 without it."""
    completions = [[y for group in batch(3, recipe[0]) for y in group if y.right and not y.excluded][:4]]
    assert len(completions[0]) == 4
    loss, gradient = gradient_of(completions, recipe, 0)
    assert loss == 0 and not any(np.any(g) for g in gradient[0])


def test_leaving_out_an_excluded_completion_is_the_same_as_never_having_sampled_it():
    recipe = RECIPES["ScaleRL"]
    completions = batch(1, recipe[0])
    assert any(y.excluded for group in completions for y in group)
    loss, gradient = gradient_of(completions, recipe, 0)
    # Without them the groups are of different sizes, which the reference does not mind.
    without = [[y for y in group if not y.excluded] for group in completions]
    expected_loss, expected = reference.batch_loss(without, recipe[0], aggregation="prompt", normalization="batch")
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for p, group in enumerate(completions):
        kept = [g for g, y in zip(gradient[p], group, strict=True) if not y.excluded]
        for got, wanted in zip(kept, expected[p], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-7)

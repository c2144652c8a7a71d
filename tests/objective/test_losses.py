"""Every objective and mask against the formulas as float64 loops: loss, gradient and sums."""

import dataclasses
import functools
import typing

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.objective import LOSSES, policy_loss
from scalerl_jax.objective.losses import form_of, numbers_of
from tests.objective import reference
from tests.objective.batches import LENGTH, NAMES, ROWS, rows

OBJECTIVES = {
    "cispo": ObjectiveConfig(),
    "cispo, low cap": ObjectiveConfig(max_ratio=1.1),
    "cispo, cap under 1": ObjectiveConfig(max_ratio=0.9),
    "cispo, floor": ObjectiveConfig(min_ratio=0.8, max_ratio=1.3),
    "clip, GRPO": ObjectiveConfig(loss="clip", clip_low=0.2, clip_high=0.2),
    "clip, DAPO": ObjectiveConfig(loss="clip", clip_low=0.2, clip_high=0.26),
    "gspo": ObjectiveConfig(loss="gspo", clip_low=0.1, clip_high=0.15),
    "cross entropy": ObjectiveConfig(loss="cross_entropy"),
    "clip, truncated": ObjectiveConfig(loss="clip", tis_cap=1.4),
    "clip, truncated below its clip": ObjectiveConfig(loss="clip", tis_cap=1.1),
    "gspo, truncated": ObjectiveConfig(loss="gspo", tis_cap=1.1),
    "cispo, IcePop": ObjectiveConfig(icepop_low=0.8, icepop_high=1.4),
    "clip, IcePop": ObjectiveConfig(loss="clip", icepop_low=0.0, icepop_high=1.3),
    "gspo, IcePop": ObjectiveConfig(loss="gspo", icepop_low=0.8, icepop_high=1.4),
    "cispo, total variation": ObjectiveConfig(dppo_tv_threshold=0.03),
    "clip, total variation": ObjectiveConfig(loss="clip", dppo_tv_threshold=0.03),
    "gspo, total variation": ObjectiveConfig(loss="gspo", dppo_tv_threshold=0.03),
    "all masks": ObjectiveConfig(icepop_low=0.6, icepop_high=1.8, dppo_tv_threshold=0.05),
    "clip, everything": ObjectiveConfig(
        loss="clip", tis_cap=1.5, icepop_low=0.6, icepop_high=1.8, dppo_tv_threshold=0.05
    ),
    "reinforce": ObjectiveConfig(loss="reinforce"),
    "reinforce, truncated": ObjectiveConfig(loss="reinforce", tis_cap=1.2),
    "dro": ObjectiveConfig(loss="dro", dro_beta=0.7),
    "dro, IcePop": ObjectiveConfig(loss="dro", icepop_low=0.8, icepop_high=1.4),
    "cispo, prefix budget": ObjectiveConfig(cppo_threshold=0.1, cppo_least_weight=0.5, cppo_budget=0.02),
    "gspo, prefix budget": ObjectiveConfig(loss="gspo", cppo_threshold=0.08, cppo_budget=0.03),
    "reinforce, prefix budget by completion": ObjectiveConfig(
        loss="reinforce", cppo_threshold=0.06, cppo_budget=0.01, cppo_budget_by_completion=True
    ),
    "cispo, KL": ObjectiveConfig(reference_kl=0.3),
    "clip, KL and entropy": ObjectiveConfig(loss="clip", reference_kl=0.1, entropy_bonus=0.2),
    "all masks, KL": ObjectiveConfig(icepop_low=0.6, icepop_high=1.8, cppo_threshold=0.1, reference_kl=0.1),
}
seeds = st.integers(0, 2**32 - 1)
every = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def evaluated(arrays, objective):
    """(loss, d loss / d logp_train, sums)"""

    def loss(logp_train):
        return policy_loss(**(arrays | {"logp_train": logp_train}), objective=objective)

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(arrays["logp_train"])
    return value, gradient, sums


@functools.cache
def compiled(fields):
    objective = ObjectiveConfig(*fields)
    return jax.jit(lambda arrays: evaluated(arrays, objective))


@functools.cache
def compiled_form(form):
    return jax.jit(lambda arrays, numbers: evaluated(arrays, form.objective(numbers)))


def ours(arrays, objective):
    """As `evaluated`, compiled."""
    return compiled(dataclasses.astuple(objective))(arrays)


def tokens(*, train, gen, advantage, weight=1.0, segment=1, objective):
    """(loss, gradient [tokens]) of one row of loss tokens; numbers are the same for all of them. The reference policy
    is the generator."""
    columns = [np.atleast_2d(x) for x in np.broadcast_arrays(train, gen, advantage, weight, segment)]
    kinds = (*[np.float32] * 4, np.int32)
    arrays = {name: x.astype(kind) for name, x, kind in zip(NAMES, columns, kinds, strict=True)}
    arrays |= {"reference": arrays["logp_gen"]} if objective.reference_kl else {}
    arrays |= {"entropy": -arrays["logp_train"]} if objective.entropy_bonus else {}
    value, gradient, _ = ours(arrays, objective)
    return float(value), np.asarray(gradient)[0]


# ---- Against the loops ---------------------------------------------------------------------------------------------


@every
@settings(max_examples=12)
@given(seed=seeds)
def test_equal_the_formulas(objective, seed):
    arrays = rows(seed, objective)
    loss, gradient, sums = ours(arrays, objective)
    expected_loss, expected_gradient, expected_sums = reference.rows_loss(arrays, objective)
    size = np.abs(arrays["weights"] * arrays["advantages"]).sum()  # of the terms, which may cancel
    np.testing.assert_allclose(loss, expected_loss, atol=1e-5 * size)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-5, atol=1e-6)
    assert sums.keys() == expected_sums.keys()
    for name in sums:
        value = expected_sums[name]
        exact = name in ("tokens", "clipped", "masked")
        np.testing.assert_allclose(sums[name], value, rtol=0 if exact else 1e-5, err_msg=name)


@every
@given(seed=seeds)
@settings(max_examples=5)
def test_a_program_that_takes_the_numbers_as_arguments(objective, seed):
    """1 - clip_low is rounded twice then, and nothing else changes. Another number compiles nothing."""
    arrays = rows(seed, objective)
    run, numbers = compiled_form(form_of(objective)), numbers_of(objective)
    value, gradient, sums = run(arrays, numbers)
    wanted, wanted_gradient, wanted_sums = ours(arrays, objective)
    np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-6, atol=1e-7)
    assert sums.keys() == wanted_sums.keys()
    before = run._cache_size()
    run(arrays, {name: 0.9 * number for name, number in numbers.items()})
    assert run._cache_size() == before


def test_the_random_rows_reach_every_branch():
    """Else the equality above would prove little."""
    for name, objective in OBJECTIVES.items():
        sums = [reference.rows_loss(rows(seed, objective), objective)[2] for seed in range(20)]
        total = {key: sum(s[key] for s in sums) for key in ("tokens", "clipped", "masked")}
        expects_masks = max(objective.icepop_high, objective.dppo_tv_threshold, objective.cppo_threshold) > 0
        assert (total["masked"] > 20) == expects_masks and total["masked"] < total["tokens"] / 2, name
        if objective.loss != "cross_entropy" and objective.max_ratio < 5:
            assert 20 < total["clipped"] < 0.7 * total["tokens"], name


@every
@given(seed=seeds)
@settings(max_examples=3)
def test_a_position_without_loss_has_no_part(objective, seed):
    """Prompt, forced phrase, padding: whatever stands there, loss, gradient and sums are the same to the bit."""
    wanted = ours(rows(seed, objective), objective)
    for extremes in (1e4, 3e38, np.inf, np.nan):
        arrays = rows(seed, objective, extremes=extremes)
        assert (np.abs(arrays["logp_train"]) != np.abs(rows(seed, objective)["logp_train"])).any()
        got = ours(arrays, objective)
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
        assert not np.asarray(got[1])[arrays["weights"] == 0].any()


@every
def test_no_loss_token_at_all(objective):
    arrays = {name: np.zeros((ROWS, LENGTH), np.float32) for name in rows(0, objective)}
    arrays["segment_ids"] = arrays["segment_ids"].astype(np.int32)
    value, gradient, sums = ours(arrays, objective)
    assert value == 0 and not np.asarray(gradient).any()
    assert all(total == 0 for total in sums.values())


@every
@given(seed=seeds)
@settings(max_examples=5)
def test_rows_add_up_and_their_order_does_not_matter(objective, seed):
    """What lets micro-batches and shards be summed: of the sums too, where max_* is a maximum."""
    arrays = rows(seed, objective)
    value, gradient, sums = ours(arrays, objective)
    parts = [ours({name: x[r : r + 1] for name, x in arrays.items()}, objective) for r in (2, 0, 1)]
    np.testing.assert_allclose(value, sum(part[0] for part in parts), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(gradient, np.concatenate([parts[i][1] for i in (1, 2, 0)]))
    for name, total in sums.items():
        combine = max if name.startswith("max_") else sum
        np.testing.assert_allclose(total, combine([float(part[2][name]) for part in parts]), rtol=1e-5)


# ---- What each one is, by itself -----------------------------------------------------------------------------------


@given(seed=seeds)
@settings(max_examples=10)
def test_the_gradient_of_cispo_is_the_capped_ratio_under_a_stop_gradient(seed):
    """d loss / d logp = - w min(rho, cap) A: no derivative of the ratio, and the capped tokens keep theirs."""
    objective = ObjectiveConfig(max_ratio=1.1)
    arrays = rows(seed, objective)
    rho = np.exp(arrays["logp_train"] - arrays["logp_gen"])
    expected = -arrays["weights"] * np.minimum(rho, 1.1) * arrays["advantages"]
    np.testing.assert_allclose(ours(arrays, objective)[1], expected, rtol=1e-5)
    capped = (rho > 1.1) & (arrays["weights"] > 0)
    assert capped.any() and (expected[capped] != 0).all()


@pytest.mark.parametrize("floor", [0.0, 0.6])
def test_the_cap_is_on_the_ratio_itself_and_there_is_no_floor_by_default(floor):
    ratio = np.array([1e-4, 0.5, 1.0, 4.9, 5.1, 5.9, 400.0])
    objective = ObjectiveConfig(min_ratio=floor) if floor else ObjectiveConfig()
    for advantage in (1.5, -1.5):
        loss, gradient = tokens(train=-1.0, gen=-1.0 - np.log(ratio), advantage=advantage, objective=objective)
        np.testing.assert_allclose(gradient, -np.clip(ratio, floor, 5.0) * advantage, rtol=1e-5)
        assert loss == pytest.approx(np.clip(ratio, floor, 5.0).sum() * advantage, rel=1e-5)  # logp = -1


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.26)])
@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_the_gradient_is_zero_where_clipped_and_only_there(loss, low, high):
    """Positive advantage: above 1 + high. Negative: below 1 - low. The other two sides pass through unclipped."""
    ratio = np.array([0.1, 0.79, 0.81, 1.0, 1.19, 1.21, 1.25, 1.27, 10.0])
    objective = ObjectiveConfig(loss=loss, clip_low=low, clip_high=high)
    segment = np.arange(1, len(ratio) + 1)
    for advantage, clipped in ((2.0, ratio > 1 + high), (-2.0, ratio < 1 - low)):
        _, gradient = tokens(
            train=-1.0, gen=-1.0 - np.log(ratio), advantage=advantage, segment=segment, objective=objective
        )  # fmt: skip
        np.testing.assert_allclose(gradient, np.where(clipped, 0, -ratio * advantage), rtol=1e-5)
        assert 0 < clipped.sum() < len(ratio)


def test_gspo_takes_the_geometric_mean_over_a_completion():
    """Two segments, one of them with a forced token in the middle: each has a ratio of its own."""
    train = np.array([-1.0, -2.0, -3.0, -1.0, -2.0])
    difference = np.array([0.1, 0.0, -0.06, 0.3, 0.1])
    weight = np.array([1.0, 0.0, 1.0, 0.5, 0.5])
    objective = ObjectiveConfig(loss="gspo", clip_low=0.2, clip_high=0.26)
    loss, gradient = tokens(
        train=train, gen=train - difference, advantage=1.0, weight=weight, segment=[1, 1, 1, 2, 2], objective=objective
    )
    first, second = np.exp(0.02), np.exp(0.2)
    assert loss == pytest.approx(-2 * first - second, rel=1e-6)
    # d s / d logp_t = s / |y|, and both tokens of a segment have that s.
    np.testing.assert_allclose(gradient, [-first, 0, -first, -second / 2, -second / 2], rtol=1e-5)


def test_gspo_knows_as_many_segments_as_a_row_can_hold():
    """One position each: the most there can be."""
    ratio = np.linspace(0.85, 1.2, LENGTH)
    objective = ObjectiveConfig(loss="gspo", clip_low=0.2, clip_high=0.26)
    _, gradient = tokens(
        train=-1.0, gen=-1.0 - np.log(ratio), advantage=1.0, segment=np.arange(1, LENGTH + 1), objective=objective
    )
    np.testing.assert_allclose(gradient, -ratio, rtol=1e-5)


@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_truncated_importance_sampling_caps_the_one_ratio_there_is(loss):
    """The coefficient of grad log pi is min(rho, C) A: at rho = 1.5 it is 1.5, or the cap, and never 2.25."""
    ratio = np.array([0.5, 1.0, 1.4, 1.5, 3.0])
    wide = {"loss": loss, "clip_low": 1.0, "clip_high": 9.0}
    for advantage in (1.5, -1.5):
        options = {"train": -1.0, "gen": -1.0 - np.log(ratio), "advantage": advantage, "segment": np.arange(1, 6)}
        for cap in (1.2, 2.0):
            value, gradient = tokens(**options, objective=ObjectiveConfig(**wide, tis_cap=cap))
            np.testing.assert_allclose(gradient, -np.minimum(ratio, cap) * advantage, rtol=1e-5)
            assert value == pytest.approx(-(np.minimum(ratio, cap) * advantage).sum(), rel=1e-5)
    # What the clip leaves unbounded, a large ratio of a bad token, is bounded.
    grpo = {"loss": loss, "clip_low": 0.2, "clip_high": 0.2, "tis_cap": 2.0}
    assert tokens(train=-1.0, gen=-1.0 - np.log(50), advantage=-1.0, objective=ObjectiveConfig(**grpo))[
        1
    ] == pytest.approx(2)


def test_truncated_importance_sampling_is_refused_where_it_has_no_place():
    for loss in ("cispo", "dro"):
        with pytest.raises(ValueError, match=f"tis_cap does not go with {loss}"):
            tokens(train=-1.0, gen=-1.0, advantage=1.0, objective=ObjectiveConfig(loss=loss, tis_cap=1.2))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_masked_token_has_no_gradient_and_leaves_that_of_the_others(loss):
    """Also in gspo, where all tokens of a completion share a ratio."""
    ratio = np.array([0.95, 3.0, 1.02, 1.0])
    options = {"train": -1.0, "gen": -1.0 - np.log(ratio), "advantage": 1.0, "weight": 0.25}
    wide = {"loss": loss, "clip_low": 1.0, "clip_high": 9.0}
    _, whole = tokens(**options, objective=ObjectiveConfig(**wide))
    _, masked = tokens(**options, objective=ObjectiveConfig(**wide, icepop_low=0.5, icepop_high=2.0))
    np.testing.assert_allclose(masked, np.where(ratio > 2, 0, whole), rtol=1e-6)
    assert whole.all()


def test_the_gradient_of_gspo_is_that_of_its_sequence_ratio():
    """Equal weights and advantages, as a completion has them: by differences of the loss as the paper writes it."""
    train, gen = np.array([-1.0, -2.0, -0.5]), np.array([-1.1, -1.9, -0.6])

    def loss(train):
        return -np.exp(np.mean(train - gen)) * 2.0 * 3 * 0.25

    _, gradient = tokens(train=train, gen=gen, advantage=2.0, weight=0.25, objective=ObjectiveConfig(loss="gspo"))
    step = 1e-6 * np.eye(3)
    differences = [(loss(train + up) - loss(train - up)) / 2e-6 for up in step]
    np.testing.assert_allclose(gradient, differences, rtol=1e-5)


def test_icepop_drops_what_is_outside_its_band_on_either_side():
    ratio = np.array([0.3, 0.49, 0.51, 1.0, 1.9, 2.1, 9.0])
    objective = ObjectiveConfig(icepop_low=0.5, icepop_high=2.0)
    for advantage in (1.0, -1.0):
        _, gradient = tokens(train=-1.0, gen=-1.0 - np.log(ratio), advantage=advantage, objective=objective)
        inside = (ratio > 0.5) & (ratio < 2)
        np.testing.assert_allclose(gradient, np.where(inside, -ratio * advantage, 0), rtol=1e-5)


def test_total_variation_drops_what_moved_far_and_is_pushed_further():
    """By the difference of the probabilities, so a rare token may change by any factor."""
    train = np.log([0.9, 0.65, 0.1, 0.45, 1e-3])
    gen = np.log([0.5, 0.5, 0.5, 0.5, 1e-7])
    objective = ObjectiveConfig(dppo_tv_threshold=0.2)
    ratio = np.minimum(np.exp(train - gen), 5)
    for advantage, dropped in ((1.0, [1, 0, 0, 0, 0]), (-1.0, [0, 0, 1, 0, 0])):
        _, gradient = tokens(train=train, gen=gen, advantage=advantage, objective=objective)
        np.testing.assert_allclose(gradient, np.where(dropped, 0, -ratio * advantage), rtol=1e-5)


@every
def test_a_broken_log_prob_stays_finite(objective):
    """A token that one side finds impossible: the ratio is beyond float32."""
    for gen in (-500.0, 500.0):
        loss, gradient = tokens(train=-1.0, gen=gen, advantage=1.0, objective=objective)
        assert np.isfinite(loss) and np.isfinite(gradient).all()
    masks = (objective.icepop_high, objective.dppo_tv_threshold, objective.cppo_threshold)
    if objective.loss == "cispo" and not any(masks) and not objective.reference_kl:
        _, gradient = tokens(train=-1.0, gen=-500.0, advantage=1.0, objective=objective)
        np.testing.assert_allclose(gradient, -objective.max_ratio)


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-3, 0.05, 0.1, 0.2, 3.0])
def test_the_mismatch_kl_is_exact_however_close_generator_and_trainer_are(size):
    """rho - 1 - log rho of a ratio near 1 is what is left of two numbers of the size of 1."""
    difference = np.float32(size * np.random.default_rng(0).standard_normal((1, 64)))
    arrays = dict(zip(NAMES, (difference, *np.zeros((2, 1, 64), np.float32), *np.ones((2, 1, 64))), strict=True))
    arrays = {name: x.astype(np.int32 if name == "segment_ids" else np.float32) for name, x in arrays.items()}
    *_, sums = ours(arrays, ObjectiveConfig())
    d = difference.astype(np.longdouble)
    np.testing.assert_allclose(float(sums["kl"]), float((np.expm1(d) - d).sum()), rtol=2e-5)


def test_a_prefix_that_moved_far_leaves_its_successors_less():
    """Each token alone is within the threshold; what those before have used up is missing at the next, also where they
    are masked themselves. Who is pushed back is never masked."""
    gen = np.full(6, 0.5)
    train = np.array([0.6, 0.6, 0.6, 0.5, 0.5, 0.6])
    objective = ObjectiveConfig(cppo_threshold=0.15, cppo_least_weight=1.0, cppo_budget=0.04)
    # c = .15, min(.15, .15 + .04 - .1) = .09, .03, -.03, .01, .05
    for advantage, kept in ((1.0, [1, 0, 0, 1, 1, 0]), (-1.0, [1] * 6)):
        _, gradient = tokens(train=np.log(train), gen=np.log(gen), advantage=advantage, objective=objective)
        np.testing.assert_array_equal(gradient != 0, np.array(kept, bool))
    generous = dataclasses.replace(objective, cppo_budget=0.1)
    _, gradient = tokens(train=np.log(train), gen=np.log(gen), advantage=1.0, objective=generous)
    assert gradient.all()
    # The next completion of the row begins with nothing used up.
    _, gradient = tokens(
        train=np.log(train), gen=np.log(gen), advantage=1.0, segment=[1, 1, 2, 2, 3, 3], objective=objective
    )
    np.testing.assert_array_equal(gradient != 0, [True, False, True, True, True, True])


@pytest.mark.parametrize("advantage", [1.0, -1.0, 1e-30])
def test_a_token_too_rare_for_float32_is_pushed_one_way_all_the_same(advantage):
    """exp(-120) is 0, and so is |pi - mu|: which way the token moved is in the log-ratio."""
    objective = ObjectiveConfig(cppo_threshold=0.15, cppo_least_weight=1.0, cppo_budget=0.0)
    gen = np.array([np.log(0.2), -120.0, -120.0, -95.0, np.log(0.5)])
    train = np.array([np.log(0.6), -118.0, -122.0, -95.5, np.log(0.5)])
    # The first has used up more than there is, so every later one that moves further is out.
    _, gradient = tokens(train=train, gen=gen, advantage=advantage, objective=objective)
    further = np.sign(train - gen) * np.sign(advantage) > 0
    np.testing.assert_array_equal(gradient != 0, ~further)


def test_a_prefix_budget_counts_loss_tokens_alone():
    """A forced phrase in the middle, however far its log-probs are, takes no place and uses nothing up."""
    rng = np.random.default_rng(0)
    objective = ObjectiveConfig(cppo_threshold=0.1, cppo_budget=0.01, cppo_budget_by_completion=True)
    train = np.log(rng.uniform(0.2, 0.9, 20))
    gen = np.log(np.clip(np.exp(train) - rng.uniform(-0.02, 0.12, 20), 0.05, 0.99))
    _, alone = tokens(train=train, gen=gen, advantage=1.0, objective=objective)
    assert 3 < (alone == 0).sum() < 17
    at = np.sort(rng.permutation(30)[:20])
    wide = {"train": np.full(30, -9.0), "gen": np.full(30, -0.01), "weight": np.zeros(30)}
    for name, values in (("train", train), ("gen", gen), ("weight", 1.0)):
        wide[name][at] = values
    _, gradient = tokens(**wide, advantage=1.0, objective=objective)
    np.testing.assert_allclose(gradient[at], alone, rtol=1e-6)


def test_reinforce_weighs_by_no_ratio():
    ratio = np.array([1e-3, 0.5, 1.0, 2.0, 1e3])
    for advantage in (1.5, -1.5):
        _, gradient = tokens(
            train=-1.0, gen=-1.0 - np.log(ratio), advantage=advantage, objective=ObjectiveConfig(loss="reinforce")
        )
        np.testing.assert_array_equal(gradient, np.full(5, -advantage, np.float32))


def test_the_square_of_dro_pulls_back():
    """A token that nothing is said of moves towards its generator; at 0 it is reinforce."""
    for train, pull in ((-1.0, 0.2), (-0.5, -0.05), (-0.6, 0.0)):
        _, gradient = tokens(train=train, gen=-0.6, advantage=0.0, objective=ObjectiveConfig(loss="dro", dro_beta=0.5))
        assert gradient[0] == pytest.approx(-pull, abs=1e-6)
    for beta, loss in ((0.0, "dro"), (0.05, "reinforce")):
        objective = ObjectiveConfig(loss=loss, dro_beta=beta)
        assert tokens(train=-1.0, gen=-2.0, advantage=3.0, objective=objective) == (3.0, -3.0)


@given(seed=seeds)
@settings(max_examples=5)
def test_reinforce_with_a_truncated_ratio_is_cispo(seed):
    arrays = rows(seed, ObjectiveConfig(max_ratio=1.3))
    one = ours(arrays, ObjectiveConfig(max_ratio=1.3))
    jax.tree.map(np.testing.assert_array_equal, one, ours(arrays, ObjectiveConfig(loss="reinforce", tis_cap=1.3)))


def test_the_kl_pulls_towards_the_reference_policy_only():
    """Its gradient is 0 at the reference, and no masked or clipped token is free of it."""
    reference = np.log([[0.3, 0.3, 0.3, 0.3]]).astype(np.float32)
    train = np.log([[0.2, 0.3, 0.4, 0.9]]).astype(np.float32)
    arrays = dict(zip(NAMES, (train, train - 5, *np.ones((2, 1, 4), np.float32), np.ones((1, 4), np.int32))))
    arrays["reference"] = reference
    masked = {"icepop_low": 0.5, "icepop_high": 2.0}
    _, gradient, sums = ours(arrays, ObjectiveConfig(**masked, reference_kl=0.5))
    assert sums["masked"] == 4
    np.testing.assert_allclose(gradient, -0.5 * np.expm1(reference - train), rtol=1e-5)
    assert gradient[0, 0] < 0 == gradient[0, 1] < gradient[0, 2] < gradient[0, 3]


def frozen(train, arrays, objective, at):
    """The loss in float64 with what stands under a stop-gradient taken at `at`, which is where `train` begins."""
    gen, advantage, weight = (np.asarray(arrays[n], np.float64) for n in ("logp_gen", "advantages", "weights"))
    total = 0.0
    for r, ids in enumerate(arrays["segment_ids"]):
        for segment in set(ids.tolist()) - {0}:
            t = [i for i in range(len(ids)) if ids[i] == segment and weight[r, i] > 0]
            terms = reference.terms(at[r, t].tolist(), gen[r, t].tolist(), advantage[r, t].tolist(), objective)
            sequence = np.exp(np.mean(at[r, t] - gen[r, t])) if t else 1.0
            for i, term in zip(t, terms, strict=True):
                rho, a = np.exp(train[r, i] - gen[r, i]), advantage[r, i]
                capped = np.exp(at[r, i] - gen[r, i])
                value = 0.0
                if objective.loss == "cispo":
                    value = min(max(capped, objective.min_ratio), objective.max_ratio) * a * train[r, i]
                elif objective.loss == "reinforce":
                    value = (min(capped, objective.tis_cap) if objective.tis_cap else 1.0) * a * train[r, i]
                elif objective.loss == "dro":
                    value = a * train[r, i] - objective.dro_beta / 2 * np.log(rho) ** 2
                elif objective.loss in ("clip", "gspo"):
                    if objective.loss == "gspo":
                        rho, capped = sequence * np.exp(train[r, i] - at[r, i]), sequence
                    if objective.tis_cap and capped > objective.tis_cap:
                        rho *= objective.tis_cap / capped
                    value = min(rho * a, np.clip(rho, 1 - objective.clip_low, 1 + objective.clip_high) * a)
                total -= weight[r, i] * value * (not term.masked)
                if objective.reference_kl:
                    away = float(arrays["reference"][r, i]) - train[r, i]
                    total += objective.reference_kl * weight[r, i] * (np.expm1(away) - away)
    return total


@pytest.mark.parametrize("objective", [o for o in OBJECTIVES.values() if o.loss != "cross_entropy"])
def test_the_gradient_by_differences_of_the_loss(objective):
    """Central differences in float64, what is under a stop-gradient held: nothing else has a gradient."""
    arrays = rows(11, objective)
    at = arrays["logp_train"].astype(np.float64)
    gradient = np.asarray(ours(arrays, objective)[1])
    for r, t in zip(*np.nonzero(arrays["weights"])):
        up, down = at.copy(), at.copy()
        up[r, t], down[r, t] = at[r, t] + 1e-6, at[r, t] - 1e-6
        slope = (frozen(up, arrays, objective, at) - frozen(down, arrays, objective, at)) / 2e-6
        assert gradient[r, t] == pytest.approx(slope, rel=1e-4, abs=1e-6), (r, t)


@every
def test_what_has_no_gradient(objective):
    """Generators' log-probs, advantages, weights and the reference policy are numbers, not functions of parameters:
    ratios, masks and truncation change the loss by them, and the policy's own log-prob is all that is differentiated.
    """
    if objective.loss in ("clip", "gspo", "dro"):
        pytest.skip("its ratio is differentiated")
    arrays = rows(5, objective)

    def loss(logp_gen, reference):
        beside = {"reference": reference} if "reference" in arrays else {}
        return policy_loss(**(arrays | {"logp_gen": logp_gen} | beside), objective=objective)[0]

    gradients = jax.grad(loss, (0, 1))(arrays["logp_gen"], arrays.get("reference", arrays["logp_gen"]))
    assert not any(np.asarray(g).any() for g in gradients)


def test_an_unknown_loss_is_named():
    with pytest.raises(ValueError, match="'ppo' is not one of cispo, clip, gspo, reinforce, dro"):
        tokens(train=-1.0, gen=-1.0, advantage=1.0, objective=ObjectiveConfig(loss="ppo"))


def test_the_config_offers_every_loss():
    assert typing.get_args(typing.get_type_hints(ObjectiveConfig)["loss"]) == tuple(LOSSES)

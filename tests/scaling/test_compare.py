"""The comparison: the published leave-one-out table, differences with the coverage they claim, slopes."""

import itertools

import numpy as np
import pytest
import scipy.optimize

from scalerl_jax.scaling import compare as compare_module
from scalerl_jax.scaling import fit_sigmoid
from scalerl_jax.scaling.compare import compare, difference
from scalerl_jax.scaling.fit import Run
from scalerl_jax.scaling.points import check_points
from tests.scaling.simulated import LEAVE_ONE_OUT, TABLE_1, curve, sampled_passes, sigmoid_intervals

# B with A fixed at 0.605, as the paper prints it beside its leave-one-out curves.
PUBLISHED_SLOPES = {
    "ScaleRL": 2.01, "plan": 1.82, "lp": 1.75, "batch": 1.69, "8op": 1.89, "fp32": 1.97, "savg": 1.84, "npr": 1.62,
    "dapo": 1.83,
}  # fmt: skip
COMPUTE = np.concatenate([[0.0], np.arange(256, 16_001, 256.0)])
WINDOW = {"burn_in": 1500, "fit_until": 8000}


def make_run(name, compute, reward, **window):
    return Run(name, compute, reward, fit_sigmoid(compute, reward, **window))


@pytest.fixture(scope="module")
def left_out():
    triples = {"ScaleRL": TABLE_1["ScaleRL"], **LEAVE_ONE_OUT}
    return [make_run(name, COMPUTE, curve(COMPUTE, *triple), **WINDOW) for name, triple in triples.items()]


def test_published_slopes_with_one_asymptote(left_out):
    """From the published free triples, evaluated without noise up to 8k, B at A = 0.605 is the published column.

    The published column was fitted to noisy evaluations that are not known, so it can agree only as far as the triple
    stands for them: 0.07 at most, 0.02 in the median, and the order wherever two published B's are 0.08 apart.
    """
    found = compare(left_out, common_asymptote=0.605)
    ours = {row.run.name: row.slope.exponent for row in found.table}
    assert [row.verdict for row in found.table] == [""] + ["none"] * 8
    errors = np.array([ours[name] - published for name, published in PUBLISHED_SLOPES.items()])
    assert np.abs(errors).max() < 0.07
    assert np.median(np.abs(errors)) < 0.02
    ordered = 0
    for a, b in itertools.combinations(PUBLISHED_SLOPES, 2):
        apart = PUBLISHED_SLOPES[a] - PUBLISHED_SLOPES[b]
        if abs(apart) >= 0.08:
            assert (ours[a] - ours[b]) * apart > 0, (a, b)
            ordered += 1
    assert ordered > 20
    assert max(ours, key=ours.get) == "ScaleRL"
    # Runs whose own A is 0.605 keep their B and C_mid exactly.
    for name in ("8op", "npr"):
        (row,) = [row for row in found.table if row.run.name == name]
        assert row.slope.exponent == pytest.approx(LEAVE_ONE_OUT[name][1], rel=1e-6)
        assert row.slope.midpoint == pytest.approx(LEAVE_ONE_OUT[name][0], rel=1e-6)


def test_the_common_asymptote_is_the_mean_and_every_pair_has_a_sentence(left_out):
    found = compare(left_out)
    assert found.common_asymptote == pytest.approx(np.mean([0.61, 0.59, 0.61, 0.595, 0.605, 0.61, 0.60, 0.605, 0.61]))
    assert len(found.pairs) == 36
    for pair in found.pairs:
        assert pair.verdict == "none"
        assert pair.first.fit.asymptote >= pair.second.fit.asymptote
        assert f"between {pair.first.name} and {pair.second.name}" in pair.sentence
        assert "\n" not in pair.sentence
        assert pair.slopes[0].asymptote == found.common_asymptote


def test_refit_is_the_least_squares_of_scipy():
    rng = np.random.default_rng(0)
    compute = COMPUTE[6:32]
    reward = curve(compute, *TABLE_1["bs512"]) + 0.003 * rng.standard_normal(len(compute))
    points = check_points(compute, reward, initial_reward=0.4)
    found = compare_module.refit(points, 0.62)

    def law(c, exponent, log_midpoint):
        return 0.4 + 0.22 / (1 + np.exp(exponent * (log_midpoint - np.log(c))))

    (exponent, log_midpoint), _ = scipy.optimize.curve_fit(law, compute, reward, p0=(2.0, np.log(2500)))
    assert found.exponent == pytest.approx(exponent, rel=1e-5)
    assert found.midpoint == pytest.approx(np.exp(log_midpoint), rel=1e-5)
    low, high = found.exponent_95
    narrow_low, narrow_high = found.exponent_90
    assert low < narrow_low < found.exponent < narrow_high < high


def test_paper_grid_refits_in_its_cells(left_out):
    found = compare_module.refit(left_out[0].points, 0.61, grid="paper")
    steps = np.linspace(100, 40_000, 100)
    assert np.abs(steps - found.midpoint).min() < 1e-9
    assert found.ssr >= compare_module.refit(left_out[0].points, 0.61).ssr


def test_the_straightened_form_is_a_line_through_the_origin(left_out):
    run = left_out[0]
    slope = compare_module.refit(run.points, run.fit.asymptote)
    log_compute, log_straight = compare_module.straightened(COMPUTE, curve(COMPUTE, *TABLE_1["ScaleRL"]), slope)
    np.testing.assert_allclose(log_straight, slope.exponent * log_compute, rtol=1e-5)
    assert len(log_compute) == len(COMPUTE) - 1
    # A score at or above A has no place on it.
    assert len(compare_module.straightened(COMPUTE[-1:], np.array([0.7]), slope)[0]) == 0


def test_verdicts():
    apart = difference(0.65, ((0.64, 0.66), (0.642, 0.658)), 0.60, ((0.59, 0.61), (0.592, 0.608)))
    assert apart.value == pytest.approx(0.05)
    assert apart.interval_95 == pytest.approx((0.05 - 0.01 * 2**0.5, 0.05 + 0.01 * 2**0.5))
    assert compare_module.verdict(apart, 0.02) == "first"
    wide = difference(0.65, ((0.5, 1.0), (0.55, 0.9)), 0.60, ((0.59, 0.61), (0.592, 0.608)))
    assert compare_module.verdict(wide, 0.02) == "open"
    assert compare_module.verdict(apart, 0.06) == "none"
    lower = difference(0.60, ((0.59, 0.61), (0.592, 0.608)), 0.65, ((0.64, 0.66), (0.642, 0.658)))
    assert compare_module.verdict(lower, 0.02) == "second"
    assert lower.interval_95 == pytest.approx([-end for end in apart.interval_95[::-1]])
    unbounded = difference(2.0, ((1.0, np.inf), (1.2, 9.0)), 1.5, ((1.4, 1.6), (1.42, 1.58)))
    assert unbounded.interval_95[1] == np.inf and not unbounded.excludes_zero


def test_runs_that_differ_in_A_get_no_common_one():
    triples = {"ScaleRL": TABLE_1["ScaleRL"], "DAPO": (2866, 1.85, 0.515, 0.395), "fp32": LEAVE_ONE_OUT["fp32"]}
    runs = [make_run(name, COMPUTE, curve(COMPUTE, *triple), **WINDOW) for name, triple in triples.items()]
    found = compare(runs)
    by_name = {row.run.name: row for row in found.table}
    assert by_name["DAPO"].verdict == "second"
    assert by_name["DAPO"].slope is None and by_name["DAPO"].exponent is None
    assert found.common_asymptote == pytest.approx(0.61, abs=1e-4)
    sentences = {(pair.first.name, pair.second.name): pair.sentence for pair in found.pairs}
    assert sentences["ScaleRL", "DAPO"].startswith("ScaleRL ends higher than DAPO: A 0.610 against 0.515")
    other = compare(runs, baseline=1)
    assert other.common_asymptote is None
    assert [row.verdict for row in other.table] == ["first", "", "first"]
    # The pair that does not differ is still compared, with the mean of its own two.
    (pair,) = [pair for pair in other.pairs if pair.slopes is not None]
    assert {pair.first.name, pair.second.name} == {"ScaleRL", "fp32"}
    assert pair.slopes[0].asymptote == pytest.approx(0.61, abs=1e-4)


def test_runs_whose_end_is_not_told_are_not_compared_further():
    rng = np.random.default_rng(1)
    compute = COMPUTE[COMPUTE <= 5000]
    runs = []
    for name in ("ScaleRL", "bs2048"):
        passes = sampled_passes(rng, curve(compute, *TABLE_1[name]), runs=1, prompts=300)[0]
        runs.append(make_run(name, compute, passes.mean(axis=1) / 16, counts=(passes, 16)))
    found = compare(runs)
    (pair,) = found.pairs
    assert pair.verdict == "open" and pair.slopes is None and found.common_asymptote is None
    assert pair.sentence.startswith("these points do not decide which of")
    assert pair.sentence.endswith("is not identified yet") and "bs2048" in pair.sentence.split(";")[-1]


@pytest.mark.slow
def test_the_interval_of_a_difference_holds_the_true_one():
    """95 % and 90 % in 60 simulated pairs: at least 51 and 47 hold it, which a fair interval misses once in 1,000."""
    rng = np.random.default_rng(3)
    compute = np.concatenate([[0.0], np.linspace(500, 12_000, 24)])
    first, second = TABLE_1["ScaleRL"], LEAVE_ONE_OUT["batch"]
    samples = [sampled_passes(rng, curve(compute, *triple), runs=60, prompts=200) for triple in (first, second)]
    held_95 = held_90 = 0
    for passes in zip(*samples):
        runs = [make_run(name, compute, p.mean(axis=1) / 16, counts=(p, 16)) for name, p in zip(("a", "b"), passes)]
        own = [compare_module.asymptote_intervals(run) for run in runs]
        found = difference(runs[0].fit.asymptote, own[0], runs[1].fit.asymptote, own[1])
        true = first[2] - second[2]
        held_95 += found.interval_95[0] <= true <= found.interval_95[1]
        held_90 += found.interval_90[0] <= true <= found.interval_90[1]
    assert held_95 >= 51
    assert 47 <= held_90 <= held_95


@pytest.mark.slow
def test_seeds_widen_the_interval():
    rng = np.random.default_rng(0)
    compute = np.concatenate([[0.0], np.linspace(1500, 16_000, 60)])
    rewards = [curve(compute, 2542, 1.92, a, 0.4) + 0.001 * rng.standard_normal(61) for a in (0.57, 0.61, 0.65)]
    label = np.repeat(["a", "b", "c"], 61)
    seeded = make_run("seeded", np.tile(compute, 3), np.concatenate(rewards), run=label)
    assert seeded.seeds == 3
    (low, high), _ = compare_module.asymptote_intervals(seeded)
    profile_low, profile_high = seeded.fit.intervals["asymptote"]
    of_sigmoid = np.diff(sigmoid_intervals(seeded.fit)["asymptote"])[0]
    assert high - low > 1.5 * of_sigmoid
    assert low < profile_low and high >= profile_high

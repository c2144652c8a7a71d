"""The bootstrap: reproducible, as wide as the profile where both hold, and wider for what it draws besides."""

import numpy as np
import pytest

from scalerl_jax.scaling import fit as fit_module
from scalerl_jax.scaling import fit_sigmoid, least_squares, resample
from scalerl_jax.scaling.points import check_points, read_counts
from tests.scaling.simulated import TABLE_1, curve, sampled_passes, sigmoid_intervals

COMPUTE = np.concatenate([[0.0], np.linspace(1500, 16_000, 15)])


def width(fit, name="asymptote"):
    low, high = fit.bootstrap_interval(name)
    return high - low


@pytest.fixture(scope="module")
def passes():
    return sampled_passes(np.random.default_rng(5), curve(COMPUTE, *TABLE_1["ScaleRL"]), runs=1)[0]


def test_agrees_with_the_profile(passes):
    reward = passes.mean(axis=1) / 16
    fit = fit_sigmoid(COMPUTE, reward, counts=(passes, 16), bootstrap=400)
    assert fit.samples.shape == (400, 4)
    of_sigmoid = sigmoid_intervals(fit)
    for name in ("asymptote", "exponent", "midpoint"):
        low, high = fit.bootstrap_interval(name)
        assert low < getattr(fit, name) < high
        assert width(fit, name) == pytest.approx(np.diff(of_sigmoid[name])[0], rel=0.25)
    again = fit_sigmoid(COMPUTE, reward, counts=(passes, 16), bootstrap=400)
    np.testing.assert_array_equal(again.samples, fit.samples)
    other = fit_sigmoid(COMPUTE, reward, counts=(passes, 16), bootstrap=400, seed=1)
    assert not np.array_equal(other.samples, fit.samples)


def test_each_resample_is_a_fit_of_its_own(passes):
    reward = passes.mean(axis=1) / 16
    fit = fit_sigmoid(COMPUTE, reward, counts=(passes, 16), bootstrap=5)
    points = check_points(COMPUTE, reward, counts=(passes, 16))
    estimate = (fit.asymptote, fit.exponent, fit.midpoint, fit.initial_reward)
    rewards, initials = resample.draw_scores(points, estimate, np.random.default_rng(0), 5, False)
    for sample, drawn, initial in zip(fit.samples, rewards, initials):
        alone = fit_sigmoid(COMPUTE[1:], drawn, initial_reward=initial)
        np.testing.assert_allclose(sample, [alone.asymptote, alone.exponent, alone.midpoint, initial], rtol=1e-5)


def test_without_counts_the_residuals_speak():
    rng = np.random.default_rng(0)
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    quiet = fit_sigmoid(COMPUTE, scores + 0.002 * rng.standard_normal(16), bootstrap=300)
    loud = fit_sigmoid(COMPUTE, scores + 0.008 * rng.standard_normal(16), bootstrap=300)
    assert 2 < width(loud) / width(quiet) < 8
    assert width(quiet) == pytest.approx(np.diff(sigmoid_intervals(quiet)["asymptote"])[0], rel=0.4)
    with pytest.raises(ValueError, match="bootstrap=0"):
        fit_sigmoid(COMPUTE, scores).bootstrap_interval("asymptote")


def test_population_interval_moves_all_evaluations_together(passes):
    """Which prompts were drawn shifts a whole curve: R0 and A move together, and far more than by sampling."""
    reward = passes.mean(axis=1) / 16
    points = check_points(COMPUTE, reward, counts=(passes, 16))
    data = fit_module.squares_data(points)
    cells = least_squares.search_cells(data.log_compute)
    estimate = (0.61, 1.92, 2542.0, 0.4)
    fixed, population = (
        resample.bootstrap(points, data, cells, estimate, count=300, seed=0, population=flag) for flag in (False, True)
    )
    assert population[:, 0].std() > 3 * fixed[:, 0].std()
    assert np.corrcoef(population[:, 0], population[:, 3])[0, 1] > 0.5
    # Drawn once for all evaluations, prompts cancel in the gain: it varies less than independent draws would have it.
    apart = np.hypot(population[:, 0].std(), population[:, 3].std())
    assert (population[:, 0] - population[:, 3]).std() < 0.8 * apart
    totals = check_points(COMPUTE, reward, counts=(passes.sum(axis=1), np.full(16, 16_000)))
    with pytest.raises(ValueError, match="passes of every prompt"):
        resample.bootstrap(totals, data, cells, estimate, count=3, seed=0, population=True)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [20, pytest.param(200, marks=pytest.mark.long)])
def test_population_intervals_hold_the_populations_a(runs):
    """Where every run draws prompts of its own, only intervals that draw them too hold the population's A."""
    rng = np.random.default_rng(11)
    passes = sampled_passes(rng, curve(COMPUTE, *TABLE_1["ScaleRL"]), runs=runs, prompts=400, redrawn=True)
    held = {}
    for population in (False, True):
        inside = 0
        for one in passes:
            fit = fit_sigmoid(
                COMPUTE, one.mean(axis=1) / 16, counts=(one, 16), bootstrap=200, population=population, seed=1
            )
            low, high = fit.bootstrap_interval("asymptote", level=0.90)
            inside += low <= 0.61 <= high
        held[population] = inside / runs
    print(f"of {runs} runs hold the population's A: {held[True]:.3f}, with the prompts held fixed {held[False]:.3f}")
    assert 0.90 - 3 * np.sqrt(0.09 / runs) <= held[True] <= min(1.0, 0.90 + 3 * np.sqrt(0.09 / runs))
    assert held[False] < 0.7


def test_seeds_are_drawn_as_wholes():
    rng = np.random.default_rng(0)
    asymptotes = 0.61 + 0.02 * rng.standard_normal(6)
    compute = np.tile(COMPUTE, 6)
    label = np.repeat(list("abcdef"), len(COMPUTE))
    reward = np.concatenate([curve(COMPUTE, 2542, 1.92, a, 0.4) for a in asymptotes])
    reward += 0.002 * rng.standard_normal(len(reward))
    together = fit_sigmoid(compute, reward, bootstrap=300)
    apart = fit_sigmoid(compute, reward, run=label, bootstrap=300)
    assert apart.asymptote == together.asymptote
    low, high = apart.bootstrap_interval("asymptote", level=0.68)
    # The spread of the mean of six seeds.
    assert (high - low) / 2 == pytest.approx(asymptotes.std(ddof=1) / np.sqrt(6), rel=0.4)
    assert width(apart) > 1.5 * width(together)


def test_variance_of_counts():
    rng = np.random.default_rng(0)
    passes = sampled_passes(rng, np.array([0.3, 0.5, 0.7]), runs=400, prompts=100, samples=8)
    scatter = passes.mean(axis=2).std(axis=0) / 8
    by_prompt = np.sqrt(np.mean([read_counts((p, 8), 3).variance() for p in passes], axis=0))
    np.testing.assert_allclose(by_prompt, scatter, rtol=0.1)
    totals = read_counts((passes[0].sum(axis=1), np.full(3, 800)), 3)
    assert not totals.per_prompt
    assert np.all(totals.variance() > by_prompt**2)  # an upper bound: prompts differ
    full = read_counts((np.full((1, 100), 8), 8), 1)
    assert full.variance()[0] > 0


def test_cells_share_their_sums():
    """The matrix products over cells give what each residual gives alone."""
    rng = np.random.default_rng(0)
    reward = curve(COMPUTE[1:], *TABLE_1["ScaleRL"]) + 0.01 * rng.standard_normal(15)
    data = least_squares.make_data(COMPUTE[1:], reward, rng.uniform(0.5, 2, 15), initial=0.4, initial_weight=3.0)
    cells = least_squares.search_cells(data.log_compute, coarse=True)
    with fit_module.double_precision():
        for constraint in (least_squares.free(), least_squares.free(0.55, 0.6)):
            costs = np.asarray(least_squares.cell_costs(cells, data, constraint))
            for k in range(0, len(costs), 37):
                residual = np.asarray(least_squares.residuals(cells.shape[k], data, constraint))
                assert costs[k] == pytest.approx(residual @ residual, rel=1e-8, abs=1e-10)

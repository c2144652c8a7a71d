"""Profile intervals and bands against what SciPy and plain sampling say of the same likelihood."""

import numpy as np
import pytest
import scipy.stats
from scipy.optimize import least_squares

from scalerl_jax.scaling import fit_sigmoid
from scalerl_jax.scaling.points import read_counts
from tests.scaling.simulated import TABLE_1, curve, sampled_passes, sigmoid_intervals

COMPUTE = np.concatenate([[0.0], np.linspace(1500, 16_000, 15)])


@pytest.fixture(scope="module")
def run():
    """One evaluation run with the passes of 200 prompts x 16, its fit, and Q as the module states it."""
    passes = sampled_passes(np.random.default_rng(5), curve(COMPUTE, *TABLE_1["ScaleRL"]), runs=1, prompts=200)[0]
    reward = passes.mean(axis=1) / 16
    fit = fit_sigmoid(COMPUTE, reward, counts=(passes, 16))
    variance = read_counts((passes, 16), len(COMPUTE)).variance()

    def q(asymptote, log_exponent, log_midpoint, initial):
        score = curve(COMPUTE, np.exp(log_midpoint), np.exp(log_exponent), asymptote, initial)
        return (reward - score) / np.sqrt(variance)

    return fit, q


def lowest(q, *, held=None, value=0.0):
    """Q minimised by SciPy, with one of (A, ln B, ln C_mid, R0) held."""
    best = np.inf
    for start in ([0.6, 0.6, 7.8, 0.4], [0.65, 0.3, 8.2, 0.4], [0.58, 0.9, 7.7, 0.4]):
        free = [i for i in range(4) if i != held]

        def residuals(x, free=free):
            p = np.empty(4)
            p[free] = x
            if held is not None:
                p[held] = value
            return q(*p)

        best = min(best, 2 * least_squares(residuals, np.array(start)[free], xtol=1e-13, ftol=1e-13).cost)
    return best


def test_the_ends_are_where_q_has_risen_by_the_threshold(run):
    fit, q = run
    intervals = sigmoid_intervals(fit)
    minimum = lowest(q)
    degrees = 10 + len(COMPUTE) - 4
    dispersion = (10 + minimum) / degrees
    assert fit.dispersion == pytest.approx(dispersion, rel=1e-6)
    rise = dispersion * scipy.stats.f.ppf(0.95, 1, degrees)
    for held, name in enumerate(("asymptote", "exponent", "midpoint")):
        for end in intervals[name]:
            assert 0 < end < np.inf
            value = end if held == 0 else np.log(end)
            assert lowest(q, held=held, value=value) - minimum == pytest.approx(rise, rel=1e-3)


def test_the_band_holds_every_curve_within_the_threshold(run):
    fit, q = run
    rng = np.random.default_rng(0)
    at = np.array([500.0, 2000, 6000, 20_000, 200_000])
    low, high = fit.band(at)
    minimum = lowest(q)
    rise = fit.dispersion * scipy.stats.f.ppf(0.95, 1, 10 + len(COMPUTE) - 4)
    # A walk through the region: proposals along its own shape, so that its far ends are reached.
    point = np.array([fit.asymptote, np.log(fit.exponent), np.log(fit.midpoint), fit.initial_reward])
    jacobian = np.stack([(q(*(point + h)) - q(*(point - h))) / 2e-5 for h in 1e-5 * np.eye(4)], axis=1)
    spread = np.linalg.cholesky(np.linalg.inv(jacobian.T @ jacobian) * rise)
    seen = []
    for _ in range(6000):
        direction = rng.standard_normal(4)
        tried = point + spread @ (direction / np.linalg.norm(direction)) * rng.uniform(0.8, 1.1)
        if np.sum(q(*tried) ** 2) - minimum <= rise:
            seen.append(curve(at, np.exp(tried[2]), np.exp(tried[1]), tried[0], tried[3]))
    seen = np.array(seen)
    assert len(seen) > 1000
    width = high - low
    assert np.all(seen.min(axis=0) >= low - 0.02 * width)
    assert np.all(seen.max(axis=0) <= high + 0.02 * width)
    assert np.all(seen.max(axis=0) - seen.min(axis=0) > 0.8 * width)


def test_levels_and_noise_widen(run):
    fit, _ = run
    at = np.array([3000.0, 30_000])
    narrow, wide, noisy = fit.band(at, level=0.5), fit.band(at), fit.band(at, evaluation_variance=1e-4)
    assert np.all(wide[0] < narrow[0]) and np.all(narrow[1] < wide[1])
    assert np.all(noisy[0] < wide[0]) and np.all(wide[1] < noisy[1])
    curve_there = fit.predict(at)
    assert np.all(narrow[0] <= curve_there) and np.all(curve_there <= narrow[1])


def test_far_out_the_band_is_the_interval_of_a(run):
    fit, _ = run
    low, high = fit.band([1e12])
    np.testing.assert_allclose([low[0], high[0]], sigmoid_intervals(fit)["asymptote"], atol=6e-4)


def test_more_trials_narrow_by_their_root():
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    widths = []
    for trials in (4000, 16_000):
        fit = fit_sigmoid(COMPUTE, scores, counts=(scores * trials, np.full(len(scores), trials)))
        widths.append(np.diff(sigmoid_intervals(fit)["asymptote"])[0])
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.05)

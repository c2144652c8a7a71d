"""Flat, falling and rising: said before a rising law is read off the points."""

import numpy as np
import pytest

from scalerl_jax.scaling import fit_sigmoid
from tests.scaling.simulated import TABLE_1, curve

COMPUTE = np.concatenate([[0.0], np.linspace(500, 16_000, 24)])


def noise(seed):
    return 0.01 * np.random.default_rng(seed).standard_normal(len(COMPUTE))


def test_flat_points_are_flat():
    trends = [fit_sigmoid(COMPUTE, 0.4 + noise(seed)).trend for seed in range(12)]
    assert trends.count("flat") >= 9  # one in ten has a hint of a rise
    fit = fit_sigmoid(COMPUTE, np.full(len(COMPUTE), 0.25))
    assert fit.trend == "flat" and not fit.identified
    assert fit.verdict.startswith("flat: the reward stays near 0.250 (0.250 to 0.250), no rise")


def test_rising_points_rise_however_few_or_early_they_are():
    for seed in range(6):
        assert fit_sigmoid(COMPUTE, curve(COMPUTE, *TABLE_1["ScaleRL"]) + noise(seed)).trend == "rising"
    early = np.array([0.0, 300, 600, 900, 1200])
    assert fit_sigmoid(early, [0.40, 0.402, 0.411, 0.424, 0.437]).trend == "rising"
    assert fit_sigmoid(early[:4], [0.40, 0.41, 0.42, 0.44]).trend == "rising"


def test_few_points_that_plainly_rise_are_not_flat():
    compute = 10 * 2.0 ** np.arange(5)
    fit = fit_sigmoid(compute, [0.10, 0.14, 0.15, 0.19, 0.18], initial_reward="fit")
    assert fit.trend == "rising" and not fit.identified and "A is not identified yet" in fit.verdict
    line = np.linspace(0.1, 0.25, 5)
    noises = [0.02 * np.random.default_rng(seed).standard_normal(5) for seed in range(20)]
    rising = [fit_sigmoid(compute, line + noise, initial_reward="fit").trend for noise in noises]
    assert rising.count("flat") <= 1
    flat = [fit_sigmoid(compute, 0.4 + noise, initial_reward="fit").trend for noise in noises]
    assert flat.count("flat") >= 16


@pytest.mark.parametrize("r0", [None, "fit", 0.6])
def test_falling_points_fall(r0):
    scores = 0.6 - 0.3 * COMPUTE / COMPUTE.max()
    fit = fit_sigmoid(COMPUTE, scores + noise(0), initial_reward=r0)
    assert fit.trend == "falling" and not fit.identified
    assert fit.verdict.startswith("the reward falls from 0.") and fit.verdict.endswith(": no rising sigmoid fits")


@pytest.mark.parametrize(
    ("initial", "said"),
    [
        (0.30, "the reward falls from 0.300 to 0.27"),  # the last points lie below R0
        (0.27, "the fitted curve does not rise above R0"),  # they do not, but most do
    ],
)
def test_a_curve_that_ends_below_r0_falls(initial, said):
    """R0 is held; were it fitted, the others would rise."""
    compute = np.arange(25.0)
    scores = 0.2 + 0.1 * compute / (compute + 8) + 0.003 * np.random.default_rng(0).standard_normal(25)
    scores[0] = initial
    fit = fit_sigmoid(compute, scores)
    assert fit.asymptote <= fit.initial_reward and not fit.rises and not fit.identified and fit.laws is None
    assert fit.verdict.startswith(said) and fit.verdict.endswith(": no rising sigmoid fits")
    assert fit_sigmoid(compute, scores, initial_reward="fit").rises


def test_a_collapse_after_a_rise_is_a_fall():
    scores = np.interp(COMPUTE, [0, 8000, 10_000, 16_000], [0.4, 0.6, 0.35, 0.1]) + noise(1)
    fit = fit_sigmoid(COMPUTE, scores)
    assert fit.trend == "falling"
    first, last = (float(word.strip(":")) for word in fit.verdict.split() if word[0] == "0")
    assert first == pytest.approx(0.57, abs=0.04) and last == pytest.approx(0.16, abs=0.04)
    # A step back of a few points is none.
    bump = curve(COMPUTE, *TABLE_1["ScaleRL"]) + noise(1) - 0.03 * (COMPUTE > 14_000)
    assert fit_sigmoid(COMPUTE, bump).trend == "rising"


def test_the_papers_grid_is_no_other():
    fit = fit_sigmoid(COMPUTE, 0.6 - 0.3 * COMPUTE / COMPUTE.max(), grid="paper")
    assert fit.trend == "falling" and "no rising sigmoid fits" in fit.verdict

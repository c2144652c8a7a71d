"""When no law describes the points, and how seldom that is said where one does."""

import itertools

import numpy as np
import pytest
import scipy.stats

from scalerl_jax.scaling import fit_sigmoid
from scalerl_jax.scaling.family import runs_probability
from tests.scaling import many
from tests.scaling.simulated import TABLE_1, curve, sampled_passes

COMPUTE = np.linspace(0, 16_000, 33)


@pytest.mark.parametrize(("above", "below"), [(3, 4), (5, 2), (1, 6), (4, 4)])
def test_the_chance_of_few_runs_is_that_of_all_orders(above, below):
    orders = set(itertools.permutations([True] * above + [False] * below))
    counts = np.array([1 + sum(a != b for a, b in itertools.pairwise(order)) for order in orders])
    for most in range(2, above + below + 1):
        assert runs_probability(above, below, most) == pytest.approx(np.mean(counts <= most))


def test_the_chance_of_few_runs_of_a_million_points_is_the_normal_laws():
    """Wald and Wolfowitz: mean 1 + 2ab/n, variance (mean - 1) (mean - 2) / (n - 1)."""
    above, below = 500_000, 499_000
    mean = 1 + 2 * above * below / (above + below)
    deviation = np.sqrt((mean - 1) * (mean - 2) / (above + below - 1))
    for away in (-3.0, -1.0, 0.0, 2.0):
        most = int(mean + away * deviation)
        expected = scipy.stats.norm.cdf((most + 0.5 - mean) / deviation)
        assert runs_probability(above, below, most) == pytest.approx(expected, rel=1e-3)


def fitted(scores, *, counted=True, seed=0):
    passes = sampled_passes(np.random.default_rng(seed), scores, runs=1)[0]
    return fit_sigmoid(COMPUTE, passes.mean(axis=1) / 16, counts=(passes, 16) if counted else None)


@pytest.mark.parametrize("counted", [True, False])
def test_a_late_fall_is_no_part_of_a_sigmoid(counted):
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    assert fitted(scores, counted=counted).identified
    scores[-6:] -= 0.02
    fit = fitted(scores, counted=counted)
    assert not fit.identified and fit.compute_to_identify == np.inf
    assert "standard errors below the curve" in fit.misfit
    assert fit.verdict.startswith("A is not identified: no law describes these points, the last 6 points")


def test_a_slow_wave_is_seen_by_its_signs():
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    fit = fitted(scores + 0.008 * np.sin(np.arange(len(COMPUTE)) * 2 * np.pi / 16))
    assert "on one side of the curve for long stretches" in fit.misfit or "standard errors" in fit.misfit
    assert not fit.identified


def test_the_papers_procedure_tests_nothing():
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    scores[-6:] -= 0.02
    assert fit_sigmoid(COMPUTE, scores, grid="paper").misfit == ""


@pytest.mark.slow
@pytest.mark.parametrize("told", ["prompts", "none"])
def test_hardly_ever_said_of_a_sigmoid(told):
    """At 1 % each, and less because a fit follows its points: at most 3 of 100."""
    found = []
    for name in ("ScaleRL", "Scout"):
        compute = many.schedule(name, None)
        runs = many.simulate(np.random.default_rng(5), TABLE_1[name], compute, 50, told=told)
        for i, passes in enumerate(runs.passes):
            counts = (passes, many.SAMPLES) if told == "prompts" else None
            at, reward = np.append(0, compute), np.append(runs.initial[i], runs.reward[i])
            found.append(fit_sigmoid(at, reward, counts=counts).misfit)
    assert sum(map(bool, found)) <= 3, [one for one in found if one]

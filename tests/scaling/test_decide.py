"""The plan for the next experiment: curves drawn as they should be, chances that are chances, compute that is saved."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.scaling import decide, fit_sigmoid
from scalerl_jax.scaling.decide import plan
from scalerl_jax.scaling.law import draw_sigmoids
from scalerl_jax.scaling.points import check_points
from tests.scaling.simulated import FIGURE_2, TABLE_1, curve, sampled_passes, sigmoid_intervals

SPACING = 512.0
CURVES = 4000
COMPUTE = np.concatenate([[0.0], np.arange(SPACING, 16_001, SPACING)])


def window(passes, until):
    seen = until >= COMPUTE
    return (COMPUTE[seen], passes[seen].mean(axis=1) / 16), {"counts": (passes[seen], 16)}


def contender(name, passes, until, seed=0):
    given, rest = window(passes, until)
    return decide.contender(name, check_points(*given, **rest), count=CURVES, seed=seed)


def columns(curves):
    """A, B, C_mid and R0 of each."""
    return curves.asymptote, *np.exp(curves.shape.T), curves.initial_reward


@pytest.fixture(scope="module")
def passes():
    triples = {**TABLE_1, "GRPO": FIGURE_2["GRPO"]}
    names = ("ScaleRL", "bs2048", "8gen", "GRPO")
    return {
        name: sampled_passes(np.random.default_rng(seed), curve(COMPUTE, *triples[name]), runs=1)[0]
        for seed, name in enumerate(names)
    }


@pytest.mark.slow
def test_drawn_curves_agree_with_the_profile(passes):
    """Where the points tell the curve, the prior says nothing: quantiles are the ends of the intervals."""
    given, rest = window(passes["ScaleRL"], 16_000)
    fit = fit_sigmoid(*given, **rest)
    curves = draw_sigmoids(check_points(*given, **rest), count=CURVES, seed=0)
    for name, column in zip(("asymptote", "exponent", "midpoint"), columns(curves)):
        low, high = sigmoid_intervals(fit)[name]
        drawn = np.percentile(column, [2.5, 97.5])
        assert np.abs(drawn - [low, high]).max() < 0.12 * (high - low), name
    compute = np.array([700.0, 3000.0, 40_000.0])
    low, high = fit.band(compute)
    drawn = np.percentile(curves.at(compute), [2.5, 97.5], axis=0)
    assert np.abs(drawn - [low, high]).max() < 0.15 * (high - low).max()
    again = draw_sigmoids(check_points(*given, **rest), count=CURVES, seed=0)
    np.testing.assert_array_equal(again.asymptote, curves.asymptote)


@pytest.mark.slow
def test_drawn_curves_are_the_posterior_of_a_long_chain(passes):
    """Where little is told, too: against Metropolis on the density as the module's docstring writes it."""
    given, rest = window(passes["bs2048"], 4096)
    points = check_points(*given, **rest)
    curves = draw_sigmoids(points, count=CURVES, seed=1)
    variance, initial_variance = points.variance, points.initial_variance
    degrees = points.degrees + points.belief
    log_range = np.log(points.compute.min()) - 3, np.log(points.compute.max()) + 4
    least = fit_sigmoid(*given, **rest).state.found.best.cost
    dispersion = (points.belief + float(least)) / degrees

    def log_density(a, b, m, r, phi):
        rise = 1 / (1 + np.exp(np.exp(b) * (m - np.log(points.compute)[:, None])))
        off = points.reward[:, None] - (r * (1 - rise) + a * rise)
        cost = (off**2 / variance[:, None]).sum(axis=0) + (points.initial - r) ** 2 / initial_variance
        prior = -0.5 * ((b - np.log(2.0)) / 0.5) ** 2
        inside = (a >= 0) & (a <= 1) & (m >= log_range[0]) & (m <= log_range[1])
        # phi: scaled inverse chi-square; given phi, the curve's density is that of the least squares around it.
        return np.where(inside, prior - 0.5 * cost / phi, -np.inf)

    rng = np.random.default_rng(0)
    chains, steps = 400, 2000
    phi = dispersion * degrees / rng.chisquare(degrees, chains)
    start = rng.integers(0, CURVES, chains)
    state = np.stack([curves.asymptote, *curves.shape.T, curves.initial_reward])[:, start]
    state[0] = np.clip(state[0] + 0.1 * rng.standard_normal(chains), 0.3, 0.99)  # not where the draws say
    # Moves along the ridge: with the curve's value at the last point kept, A and C_mid trade places.
    spread = np.cov(np.stack([curves.asymptote, *curves.shape.T]))
    root = np.linalg.cholesky(spread + 1e-9 * np.eye(3))
    density = log_density(*state, phi)
    kept = []
    for step in range(steps):
        scale = rng.choice([0.02, 0.1, 0.4])
        move = np.zeros_like(state)
        move[:3] = scale * root @ rng.standard_normal((3, chains))
        move[3] = scale * 0.004 * rng.standard_normal(chains)
        proposed = log_density(*(state + move), phi)
        taken = np.log(rng.uniform(size=chains)) < proposed - density
        state, density = np.where(taken, state + move, state), np.where(taken, proposed, density)
        if step > steps // 2 and step % 50 == 0:
            kept.append(state.copy())
    chain = np.concatenate(kept, axis=1)
    for drawn, reference in zip((curves.asymptote, *curves.shape.T), chain[:3]):
        ours, theirs = (np.percentile(x, [10, 50, 90]) for x in (drawn, reference))
        assert np.abs(ours - theirs).max() < 0.15 * (theirs[2] - theirs[0])


def test_three_points_without_counts_leave_much_possible():
    compute = COMPUTE[1:4]
    points = check_points(compute, curve(compute, *TABLE_1["8gen"]), initial_reward=0.4)
    found = decide.contender("8gen", points, count=CURVES, seed=0)
    low, high = np.percentile(found.curves.asymptote, [5, 95])
    assert 0.45 < low < 0.7 < 0.85 < high <= 1 and found.evaluation_variance > 0


def test_seeds_that_are_not_evaluated_at_the_same_compute_have_the_spacing_of_one():
    compute = np.concatenate([COMPUTE[1:], 1.001 * COMPUTE[1:]])
    scores = curve(compute, *TABLE_1["ScaleRL"]) + 0.004 * np.random.default_rng(0).standard_normal(len(compute))
    points = check_points(compute, scores, initial_reward=0.4, run=[0] * 31 + [1] * 31)
    found = decide.contender("ScaleRL", points, count=CURVES, seed=0)
    assert found.seeds == 2
    assert found.spacing == pytest.approx(SPACING, rel=0.01)


def test_a_choice_that_is_safe_needs_no_experiment(passes):
    runs = [contender("ScaleRL", passes["ScaleRL"], 8192), contender("GRPO", passes["GRPO"], 8192, seed=1)]
    found = plan(runs, 8000, at=16_000)
    assert found.recommended is None
    assert found.best == "ScaleRL"
    assert found.wrong < 0.01
    assert found.reason.startswith("decide now for ScaleRL")
    assert found.chances["ScaleRL"] > 0.99


def test_the_run_that_is_not_known_is_the_one_to_extend(passes):
    """ScaleRL ended at 0.61, bs2048 is still climbing: only more of bs2048 tells which ends higher."""
    runs = [contender("ScaleRL", passes["ScaleRL"], 16_000), contender("bs2048", passes["bs2048"], 4096, seed=1)]
    found = plan(runs, 12_000)
    assert found.wrong > decide.DECIDED
    assert list(found.recommended.extra) == ["bs2048"]
    alone = {tuple(one.extra): one for one in found.extensions if one.cost == 12_000}
    assert alone["bs2048",].wrong < 0.5 * alone["ScaleRL",].wrong
    assert alone["ScaleRL",].wrong == pytest.approx(found.wrong, abs=0.02)
    # More of it tells more, and no extension makes the choice worse.
    by_cost = [one.wrong for one in found.extensions if tuple(one.extra) == ("bs2048",)]
    assert by_cost == sorted(by_cost, reverse=True)
    assert max(one.wrong for one in found.extensions) < found.wrong + 0.01
    assert all(one.regret >= -1e-9 for one in found.extensions)
    again = plan(runs, 12_000)
    assert again == found


def test_chances_are_those_of_the_drawn_curves(passes):
    runs = [contender("ScaleRL", passes["ScaleRL"], 3072), contender("8gen", passes["8gen"], 3072, seed=1)]
    found = plan(runs, 4000, at=16_000, margin=0.01)
    first, second = (run.curves.at([16_000.0])[:, 0] for run in runs)
    other = np.subtract.outer(second, first)
    wrong = min((other > 0.01).mean(), (other < -0.01).mean())
    assert found.wrong == pytest.approx(wrong, abs=0.02)
    shortfall = np.maximum(other, 0).mean() if found.best == "ScaleRL" else np.maximum(-other, 0).mean()
    assert found.regret == pytest.approx(shortfall, abs=0.002)
    # Seeds share the budget, and their evaluations count together.
    seeded = [dataclasses.replace(runs[0], seeds=2), runs[1]]
    by_seeds = plan(seeded, 4000, at=16_000, margin=0.01)
    assert by_seeds.wrong == found.wrong


@pytest.mark.slow
def test_the_simulated_chance_is_what_comes(passes):
    """What the plan expects of an extension, averaged over curves that could be true, is what extending them gives."""
    rng = np.random.default_rng(0)
    known = contender("ScaleRL", passes["ScaleRL"], 16_000)
    early = contender("bs2048", passes["bs2048"], 3072, seed=1)
    found = plan([known, early], 5120)
    (expected,) = [one for one in found.extensions if one.cost == 5120 and list(one.extra) == ["bs2048"]]
    compute = np.concatenate([[0.0], np.arange(SPACING, 8193, SPACING)])
    wrong = []
    for index in range(20):
        a, b, m, r = (float(column[index]) for column in columns(early.curves))
        sampled = sampled_passes(rng, curve(compute, m, b, a, r), runs=1)[0]
        # The points so far as they are; those to come as this curve has them.
        sampled[compute <= 3072] = passes["bs2048"][: (compute <= 3072).sum()]
        points = check_points(compute, sampled.mean(axis=1) / 16, counts=(sampled, 16))
        extended = decide.contender("bs2048", points, count=CURVES, seed=index)
        after = plan([known, extended], 1.0)
        wrong.append(after.wrong)
    error = np.std(wrong) / np.sqrt(len(wrong))
    assert expected.wrong == pytest.approx(np.mean(wrong), abs=3 * error + 0.01)


def test_mistakes_are_refused(passes):
    run = contender("ScaleRL", passes["ScaleRL"], 3072)
    with pytest.raises(ValueError, match="two runs"):
        plan([run], 1000)
    with pytest.raises(ValueError, match="above 0"):
        plan([run, run], 0.0)
    with pytest.raises(ValueError, match="above 0"):
        plan([run, run], 10.0, at=-1.0)


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.long])])
def test_planning_finds_the_better_recipe_with_less_compute(passes, times):
    """Simulated pairs: a choice by the plan is right, for less than half of the compute of both to the end."""
    rng = np.random.default_rng(7)
    pairs = [("ScaleRL", "GRPO"), ("8gen", "bs2048"), ("32gen", "GRPO"), ("ScaleRL", "bs2048")]
    triples = {**TABLE_1, "GRPO": FIGURE_2["GRPO"]}
    right, spent = [], []
    for pair in pairs * times:
        runs = [sampled_passes(rng, curve(COMPUTE, *triples[name]), runs=1)[0] for name in pair]
        true = [float(curve(16_000.0, *triples[name])) for name in pair]
        reached = [2048.0, 2048.0]
        while True:
            given = [contender(name, p, until, seed=k) for k, (name, p, until) in enumerate(zip(pair, runs, reached))]
            found = plan(given, 32_000 - sum(reached), at=16_000)
            if found.recommended is None:
                break
            for k, name in enumerate(pair):
                extra = min(found.recommended.extra.get(name, 0.0), 2048)
                reached[k] = min(16_000.0, reached[k] + SPACING * np.ceil(extra / SPACING))
        right.append(true[pair.index(found.best)] == max(true))
        spent.append(sum(reached) / 32_000)
    assert sum(not one for one in right) <= 1
    assert np.median(spent) < 0.5

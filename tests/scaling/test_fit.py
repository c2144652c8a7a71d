"""fit_sigmoid: published curves recovered, never behind the paper's grid or SciPy, invariant where it must be."""

import subprocess
import sys

import numpy as np
import pytest
from scipy.optimize import least_squares

from scalerl_jax.scaling import fit_sigmoid, paper_grid
from tests.scaling.simulated import FIGURE_2, LEAVE_ONE_OUT, TABLE_1, curve

PUBLISHED = {
    **{f"Table 1 {name}": row for name, row in TABLE_1.items()},
    **{f"leave one out {name}": row for name, row in LEAVE_ONE_OUT.items()},
    **{f"Figure 2 {name}": row for name, row in FIGURE_2.items()},
}


def noisy_run(seed=0, noise=0.003, row="ScaleRL", end=16_000, points=40):
    rng = np.random.default_rng(seed)
    compute = np.concatenate([[0.0], np.linspace(1500, end, points - 1)])
    return compute, np.clip(curve(compute, *TABLE_1[row]) + noise * rng.standard_normal(points), 0, 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_triples_come_back(name):
    row = PUBLISHED[name]
    compute = np.concatenate([[0.0], np.linspace(1500, 16_000, 40)])
    fit = fit_sigmoid(compute, curve(compute, *row))
    midpoint, exponent, asymptote, initial = row
    assert fit.asymptote == pytest.approx(asymptote, abs=1e-6)
    assert fit.exponent == pytest.approx(exponent, abs=1e-5)
    assert fit.midpoint == pytest.approx(midpoint, rel=1e-5)
    assert fit.initial_reward == initial
    assert fit.ssr < 1e-12
    np.testing.assert_allclose(fit.predict([0, 5e3, 1e5]), curve([0, 5e3, 1e5], *row), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_triples_come_back_on_the_papers_grid(name):
    """The published midpoints of 8B runs are those of linspace(100, 4000, 100), cut to whole GPU-hours."""
    midpoint, exponent, asymptote, initial = PUBLISHED[name]
    grid = np.linspace(100, 4000, 100)
    column = np.argmin(np.abs(np.floor(grid) - midpoint))
    if int(grid[column]) != midpoint:  # the three of larger budgets, and those read off a figure
        grid, column = midpoint * np.arange(1, 101) / 50, 49
    compute = np.linspace(1500, 16_000, 40)
    scores = curve(compute, grid[column], exponent, asymptote, initial)
    fit = fit_sigmoid(compute, scores, initial_reward=initial, grid="paper", midpoint_grid=grid)
    assert round(fit.asymptote, 3) == asymptote
    assert round(fit.exponent, 2) == exponent
    assert int(fit.midpoint) == midpoint


SHAPES = [(2542, 1.92, 0.61, 0.4), (9000, 3.0, 0.75, 0.45), (300, 1.0, 0.2, 0.4), (60_000, 1.2, 0.9, 0.1)]


@pytest.mark.parametrize(
    ("points", "seeds", "every"),
    [
        (12, 12, 8), *(pytest.param(n, 12, 8, marks=pytest.mark.slow) for n in (4, 27)),
        *(pytest.param(n, 24, 1, marks=[pytest.mark.slow, pytest.mark.long]) for n in (4, 12, 27)),
    ],
)  # fmt: skip
def test_never_worse_than_the_papers_grid(points, seeds, every):
    """R0 given, measured and fitted; scores from on the law to far off it, some of them falling.

    every: the grid is thinned to each so manieth A and C_mid.
    """
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        row = list(TABLE_1.values())[seed // 2 % len(TABLE_1)] if seed % 2 else SHAPES[seed // 2 % len(SHAPES)]
        noise = (0.0, 0.003, 0.02, 0.1)[seed % 4]
        compute = np.concatenate([[0.0], np.sort(rng.uniform(300, 16_000, points))])
        reward = np.clip(curve(compute, *row) + noise * rng.standard_normal(points + 1), 0, 1)
        midpoints = (paper_grid.MIDPOINTS if seed % 3 else np.linspace(100, 4000, 100))[::every]
        cells = {"asymptotes": paper_grid.ASYMPTOTES[::every], "midpoints": midpoints}
        for initial in (row[3], None, "fit"):
            auto = fit_sigmoid(compute, reward, initial_reward=initial)
            residual = reward - auto.predict(compute)
            counted = slice(1, None) if initial != "fit" else slice(None)  # the row at 0 is a point of a fitted R0
            assert auto.ssr == pytest.approx(residual[counted] @ residual[counted], abs=1e-10)
            # A fitted R0 is not behind the paper's grid at any R0: the measured one, and its own.
            for held in {row[3]: (row[3],), None: (reward[0],), "fit": (reward[0], auto.initial_reward)}[initial]:
                paper = paper_grid.fit_cells(compute[1:], reward[1:], initial_reward=held, **cells)
                cell = paper_grid.best_cell(paper)
                if cell is not None:  # scores that only fall have no cell with B > 0
                    extra = (reward[0] - held) ** 2 if initial == "fit" else 0.0
                    assert auto.ssr <= (paper.ssr[cell] + extra) * (1 + 1e-9) + 1e-12, (seed, initial)


@pytest.mark.parametrize("seed", range(4))
def test_the_minimum_that_scipy_finds(seed):
    compute, reward = noisy_run(seed, noise=0.01, points=14)
    fit = fit_sigmoid(compute, reward)

    def residuals(p):
        return reward[1:] - curve(compute[1:], np.exp(p[2]), np.exp(p[1]), p[0], reward[0])

    best = min(
        least_squares(
            residuals, [a, np.log(b), np.log(m)], bounds=([0, -6, 0], [1, 6, 25]), xtol=1e-14, ftol=1e-14, gtol=1e-14
        ).cost
        for a in (0.55, 0.7)
        for b in (1.0, 3.0)
        for m in (1500, 4000)
    )
    assert fit.ssr <= 2 * best + 1e-10
    assert fit.ssr == pytest.approx(2 * best, rel=1e-5)


def test_paper_grid_is_the_papers():
    compute, reward = noisy_run()
    fit = fit_sigmoid(compute, reward, grid="paper")
    assert fit.asymptote in np.linspace(0.45, 0.80, 71)
    assert fit.midpoint in np.linspace(100, 40_000, 100)
    narrow = fit_sigmoid(
        compute, reward, grid="paper", asymptote_grid=[0.6, 0.61], midpoint_grid=np.linspace(2000, 3000, 11)
    )
    assert narrow.asymptote in (0.6, 0.61)
    assert narrow.midpoint in np.linspace(2000, 3000, 11)


def test_unit_of_compute_and_order_do_not_matter():
    compute, reward = noisy_run()
    order = np.random.default_rng(0).permutation(len(compute))
    a = fit_sigmoid(compute, reward)
    b = fit_sigmoid(compute[order] * 3.6e18, reward[order])
    assert b.asymptote == pytest.approx(a.asymptote, rel=1e-7)
    assert b.exponent == pytest.approx(a.exponent, rel=1e-6)
    assert b.midpoint == pytest.approx(a.midpoint * 3.6e18, rel=1e-6)
    assert b.ssr == pytest.approx(a.ssr, rel=1e-9)
    assert b.identified == a.identified
    np.testing.assert_allclose(b.intervals["asymptote"], a.intervals["asymptote"], rtol=1e-5)


def test_window():
    compute, reward = noisy_run()
    fit = fit_sigmoid(compute, reward, burn_in=3000, fit_until="half")
    inside = (compute >= 3000) & (compute <= compute.max() / 2)
    np.testing.assert_array_equal(fit.used, inside)
    assert fit.points == inside.sum()
    same = fit_sigmoid(compute[inside], reward[inside], initial_reward=reward[0])
    assert same.asymptote == pytest.approx(fit.asymptote, rel=1e-9)
    assert fit_sigmoid(compute, reward, burn_in=3000, fit_until=compute.max() / 2).ssr == fit.ssr


def test_initial_reward_given_measured_or_fitted():
    compute, reward = noisy_run()
    measured = fit_sigmoid(compute, reward)
    assert measured.initial_reward == reward[0]
    given_it = fit_sigmoid(compute, reward, initial_reward=reward[0])
    assert given_it.ssr == measured.ssr
    assert np.diff(given_it.intervals["exponent"]) <= np.diff(measured.intervals["exponent"]) * (1 + 1e-3)
    assert np.diff(given_it.intervals["asymptote"]) <= np.diff(measured.intervals["asymptote"]) * 1.05
    fitted = fit_sigmoid(compute, reward, initial_reward="fit")
    assert fitted.ssr <= measured.ssr * (1 + 1e-9)
    with pytest.raises(ValueError, match="no row at compute 0"):
        fit_sigmoid(compute[1:], reward[1:])
    noiseless = curve(compute[1:], *TABLE_1["ScaleRL"])
    alone = fit_sigmoid(compute[1:], noiseless, initial_reward="fit")
    assert alone.initial_reward == pytest.approx(0.4, abs=1e-4)
    assert alone.asymptote == pytest.approx(0.61, abs=1e-4)


def test_trials_weigh():
    compute, reward = noisy_run(points=12)
    trials = np.full(12, 1000)
    trials[5] = 3000
    weighted = fit_sigmoid(compute, reward, counts=(np.round(reward * trials), trials))
    repeated = fit_sigmoid(np.append(compute, [compute[5]] * 2), np.append(reward, [reward[5]] * 2))
    assert weighted.asymptote == pytest.approx(repeated.asymptote, rel=1e-7)
    equal = fit_sigmoid(compute, reward, counts=np.stack([np.round(reward * 1000), np.full(12, 1000)], axis=1))
    assert equal.ssr == fit_sigmoid(compute, reward).ssr


def test_identified_only_once_the_bend_is_behind():
    early = fit_sigmoid(*noisy_run(row="bs2048", end=8000))
    assert not early.identified
    assert early.verdict.startswith("A is not identified yet: ")
    assert "would identify it" in early.verdict or "at least twice" in early.verdict
    low, high = early.intervals["asymptote"]
    assert low < 0.645 < high
    late = fit_sigmoid(*noisy_run(row="bs2048", end=60_000))
    assert late.identified
    assert late.intervals["asymptote"][1] - late.intervals["asymptote"][0] < 0.04
    assert late.asymptote == pytest.approx(0.645, abs=0.02)


def test_three_points_tell_nothing():
    fit = fit_sigmoid([0, 1, 2, 3], [0.2, 0.3, 0.45, 0.5])
    assert not fit.identified
    assert fit.intervals["asymptote"][1] == 1.0
    assert fit.intervals["midpoint"][1] == np.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": [0.2, 0.3, 1.2, 0.5]}, "reward: row 2: 1.2 is outside"),
        ({"reward": [0.2, np.nan, 0.4, 0.5]}, "reward: row 1"),
        ({"compute": [0, 1, -2, 3]}, "compute: row 2: -2.0 is negative"),
        ({"compute": [0, 1, 2]}, "one length"),
        ({"burn_in": 2.5}, "1 points of different compute"),
        ({"fit_until": "third"}, "fit_until='third'"),
        ({"grid": "fine"}, "grid='fine'"),
        ({"initial_reward": 1.5}, "initial_reward=1.5"),
        ({"initial_reward": "guess"}, "initial_reward='guess'"),
        ({"initial_reward": "fit", "grid": "paper"}, "holds R0 fixed"),
        ({"counts": ([1, 2, 3, 9], 4)}, "counts: row 3"),
        ({"counts": ([1, 2], [4, 4])}, "counts: passes have shape"),
        ({"counts": ([2, 3, 8, 5], [10, 10, 10, 10])}, "counts: row 2: passes / trials is 0.8000, the reward 0.4000"),
        ({"run": ["a", "b"]}, "run: expected 4 labels"),
        ({"midpoint_grid": [0.0]}, "midpoint_grid"),
    ],
)
def test_mistakes_are_named(change, message):
    arguments = {"compute": [0, 1, 2, 3], "reward": [0.2, 0.3, 0.4, 0.5], **change}
    with pytest.raises(ValueError, match=message):
        fit_sigmoid(arguments.pop("compute"), arguments.pop("reward"), **arguments)


def test_leaves_the_callers_precision_alone():
    code = """
import sys
import numpy as np
import jax.numpy as jnp
from scalerl_jax.scaling import fit_sigmoid, paper_grid
fit_sigmoid([0, 1, 2, 3, 4, 5], [.2, .25, .4, .5, .55, .56])
assert jnp.ones(1).dtype == jnp.float32
loaded = {name.split(".")[0] for name in sys.modules}
print(sorted(loaded & {"flax", "transformers", "grpc", "torch", "orbax", "optax", "tensorboard", "pandas"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "[]"

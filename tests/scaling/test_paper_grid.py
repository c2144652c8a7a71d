"""The paper's fit against the loop it describes, written with scipy.optimize.curve_fit."""

import warnings

import numpy as np
import pytest
from scipy.optimize import OptimizeWarning, curve_fit

from scalerl_jax.scaling import paper_grid
from tests.scaling.simulated import curve


def cell_law(initial_reward, asymptote, midpoint):
    """Of compute and B alone: curve_fit fits every parameter that a function has."""
    return lambda c, b: initial_reward + (asymptote - initial_reward) / (1 + (midpoint / c) ** b)


def scipy_cells(compute, reward, initial_reward, asymptotes, midpoints, weight=None):
    """B and the sum of squares in each cell, NaN where curve_fit gives up."""
    exponent = np.full((len(asymptotes), len(midpoints)), np.nan)
    ssr = exponent.copy()
    sigma = None if weight is None else weight**-0.5
    weight = 1.0 if weight is None else weight
    for i, asymptote in enumerate(asymptotes):
        for j, midpoint in enumerate(midpoints):
            law = cell_law(initial_reward, asymptote, midpoint)
            with warnings.catch_warnings(), np.errstate(over="ignore"):
                warnings.simplefilter("ignore", OptimizeWarning)
                try:
                    (exponent[i, j],), _ = curve_fit(law, compute, reward, sigma=sigma)
                except RuntimeError:
                    continue
                ssr[i, j] = np.sum(weight * (reward - law(compute, exponent[i, j])) ** 2)
    return exponent, ssr


RUNS = {
    "long": (np.linspace(1500, 100_000, 75), (10909, 1.70, 0.645, 0.4), 0.003),
    "short": (np.linspace(1500, 8000, 26), (2542, 1.92, 0.610, 0.4), 0.003),
    "early": (np.linspace(146, 4000, 26), (1733, 1.17, 0.490, 0.4), 0.003),
    "noisy": (np.linspace(300, 16_000, 12), (3093, 1.77, 0.610, 0.4), 0.03),
    "falling": (np.linspace(300, 16_000, 12), (3093, 1.77, 0.300, 0.4), 0.01),
}


def scores(name, seed):
    compute, (midpoint, exponent, asymptote, initial), noise = RUNS[name]
    rng = np.random.default_rng(seed)
    reward = curve(compute, midpoint, exponent, asymptote, initial) + noise * rng.standard_normal(len(compute))
    return compute, reward, initial


def check_cells(compute, reward, initial, asymptotes, midpoints, weight=None):
    """Every cell against curve_fit; our cells."""
    theirs, theirs_ssr = scipy_cells(compute, reward, initial, asymptotes, midpoints, weight)
    ours = paper_grid.fit_cells(
        compute, reward, initial_reward=initial, weight=weight, asymptotes=asymptotes, midpoints=midpoints
    )
    positive = theirs > 0
    assert positive.sum() > 20
    np.testing.assert_allclose(ours.ssr[positive], theirs_ssr[positive], rtol=0, atol=1e-6)
    elsewhere = np.isfinite(theirs_ssr) & ~positive
    assert np.all(ours.ssr[elsewhere] <= theirs_ssr[elsewhere] + 1e-6)
    np.testing.assert_array_equal(np.isnan(ours.ssr), np.isnan(theirs_ssr))
    row, column = paper_grid.best_cell(ours)
    assert ours.exponent[row, column] > 0
    winner = np.unravel_index(np.nanargmin(np.where(positive, theirs_ssr, np.nan)), theirs.shape)
    assert ours.ssr[row, column] == pytest.approx(theirs_ssr[winner], abs=1e-9)
    return ours


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RUNS)
def test_every_cell_as_curve_fit(name, seed):
    # Every fifth A and C_mid of the paper's grid, and midpoints far below the data, where a cell has a plateau.
    midpoints = np.union1d(paper_grid.MIDPOINTS[::5], np.linspace(100, 4000, 8))
    check_cells(*scores(name, seed), paper_grid.ASYMPTOTES[::5], midpoints)


@pytest.mark.slow
@pytest.mark.parametrize("midpoints", [paper_grid.MIDPOINTS, np.linspace(100, 4000, 100)], ids=["stated", "used"])
def test_the_whole_grid_as_curve_fit(midpoints):
    """71 x 100 cells; on the second of the two midpoint grids the paper's published values lie."""
    check_cells(*scores("long", 4), paper_grid.ASYMPTOTES, midpoints)


def test_plateaus_are_walked_by_minpack(monkeypatch):
    """Cells whose walk hangs on the last bits are not ours: without MINPACK some of them would end elsewhere."""
    walked = []
    minpack = paper_grid._minpack

    def count(*cell):
        walked.append(cell[-2:])
        return minpack(*cell)

    monkeypatch.setattr(paper_grid, "_minpack", count)
    ours = check_cells(*scores("long", 4), paper_grid.ASYMPTOTES, np.linspace(100, 4000, 25))
    assert 0 < len(walked) < 0.05 * ours.ssr.size
    # Where the midpoint is far below the data, the curve at B = 1 is on its way to the plateau.
    assert all(midpoint < 1500 for _, midpoint in walked)


def test_weights_as_curve_fit_has_them():
    compute, reward, initial = scores("long", 1)
    weight = np.random.default_rng(1).uniform(0.5, 2.0, len(compute))
    midpoints = np.union1d(paper_grid.MIDPOINTS[::20], np.linspace(100, 4000, 12))
    check_cells(compute, reward, initial, paper_grid.ASYMPTOTES[::8], midpoints, weight)


def test_a_cell_without_rise_never_wins():
    # Scores that fall while A is above R0: every cell wants B <= 0 or has nothing to gain.
    compute = np.linspace(1000, 8000, 10)
    reward = np.linspace(0.6, 0.45, 10)
    grid = paper_grid.fit_cells(
        compute, reward, initial_reward=0.4, asymptotes=np.array([0.7]), midpoints=np.array([3000.0])
    )
    assert grid.exponent[0, 0] < 0
    assert paper_grid.best_cell(grid) is None


def test_weights_are_repetitions():
    rng = np.random.default_rng(0)
    compute = np.linspace(1500, 16_000, 9)
    reward = curve(compute, 2542, 1.92, 0.61, 0.4) + 0.003 * rng.standard_normal(9)
    times = rng.integers(1, 4, 9)
    cells = {"initial_reward": 0.4, "asymptotes": np.array([0.6, 0.62]), "midpoints": np.array([2000.0, 3000.0])}
    weighted = paper_grid.fit_cells(compute, reward, weight=times, **cells)
    repeated = paper_grid.fit_cells(np.repeat(compute, times), np.repeat(reward, times), **cells)
    np.testing.assert_allclose(weighted.ssr, repeated.ssr, rtol=1e-9)
    np.testing.assert_allclose(weighted.exponent, repeated.exponent, rtol=1e-6)

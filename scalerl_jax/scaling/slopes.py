"""Runs that end at the same A, compared by how fast they get there: the paper's leave-one-out procedure.

A is fixed at one number for all of them (the mean of their A's), B and C_mid are fitted anew, and the straightened form

    F(R) = C_mid^B / ((A - R0) / (R - R0) - 1) = C^B

turns each run into a line through the origin of (ln C, ln F) whose slope is its B.
"""

import dataclasses

import jax
import numpy as np

from scalerl_jax.scaling import fit as fit_module
from scalerl_jax.scaling import law, least_squares, paper_grid, profile
from scalerl_jax.scaling.points import Points
from scalerl_jax.scaling.precision import double_precision

_ROWS = 40  # bands of ln B that a search starts from, as many as search_cells lays
_search = jax.jit(least_squares.search_from_rows, static_argnums=3)


@dataclasses.dataclass(frozen=True)
class Slope:
    """A run refitted with A fixed. Intervals are profile likelihood; 0 or infinity where open."""

    asymptote: float  # fixed
    exponent: float
    midpoint: float
    initial_reward: float
    ssr: float
    exponent_95: tuple[float, float]
    exponent_90: tuple[float, float]

    @property
    def parameters(self) -> dict[str, float]:
        """As law.py takes them."""
        names = ("asymptote", "exponent", "midpoint", "initial_reward")
        return {name: getattr(self, name) for name in names}


def refit(points: Points, asymptote: float, *, grid: str = "auto") -> Slope:
    """B and C_mid of least squares with A held at `asymptote`; grid as of fit_sigmoid.

    Raises ValueError where the scores do not rise (grid="paper": no cell with B > 0).
    """
    data = fit_module.squares_data(points)
    cells = fit_module.search_cells(data.log_compute)
    constraint = least_squares.free(asymptote, asymptote)
    if grid == "paper":
        found = paper_grid.fit_cells(
            points.compute,
            points.reward,
            initial_reward=points.initial,
            weight=points.trials_weight,
            asymptotes=np.array([asymptote]),
            midpoints=paper_grid.MIDPOINTS,
        )
        cell = paper_grid.best_cell(found)
        if cell is None:
            raise ValueError("grid='paper': no cell has an exponent above 0; these scores do not rise")
        exponent, midpoint = float(found.exponent[cell]), float(paper_grid.MIDPOINTS[cell[1]])
        initial, ssr = points.initial, float(found.ssr[cell])
    else:
        with double_precision():
            solution = jax.device_get(_search(cells, data, constraint, _ROWS))
        _, exponent, midpoint, initial = fit_module.estimate_of(solution)
        ssr = float(solution.cost)
    intervals = [_exponent_interval(points, constraint, level) for level in (0.95, 0.90)]
    wide, narrow = [(min(low, exponent), max(high, exponent)) for low, high in intervals]
    return Slope(asymptote, exponent, midpoint, initial, ssr + points.scatter, wide, narrow)


def _exponent_interval(points: Points, constraint, level: float) -> tuple[float, float]:
    data = fit_module.likelihood_data(points)
    degrees = points.degrees + points.belief + 1  # A is not fitted
    with double_precision():
        best = _search(fit_module.search_cells(data.log_compute), data, constraint, _ROWS)
        dispersion = (points.belief + float(best.cost) + points.inner_squares) / degrees
        rise = min(profile.threshold(level, dispersion, degrees), 1e12)
        margin = profile.LOG_COMPUTE_RANGE
        log_range = np.array([data.log_compute.min() - margin, data.log_compute.max() + margin])
        starts = fit_module.search_cells(data.log_compute, coarse=True)
        found = jax.device_get(profile.profile(best, starts, data, constraint, rise, log_range))
    low = 0.0 if found.open_low[1] else float(np.exp(found.low[1]))
    high = np.inf if found.open_high[1] else float(np.exp(found.high[1]))
    return low, high


def straightened(compute: np.ndarray, reward: np.ndarray, slope: Slope) -> tuple[np.ndarray, np.ndarray]:
    """ln C and ln F, [M <= N], of the evaluations that lie strictly between R0 and A, where F is defined."""
    above = np.asarray(compute) > 0
    with double_precision():
        straight = np.asarray(law.straighten(np.asarray(reward)[above], **slope.parameters))
    defined = np.isfinite(straight)
    return np.log(np.asarray(compute)[above][defined]), np.log(straight[defined])

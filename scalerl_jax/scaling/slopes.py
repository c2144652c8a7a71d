"""Runs that end at the same A, compared by how fast they get there: the paper's leave-one-out procedure.

A is fixed at one number for all of them (the mean of their A's), B and C_mid are fitted anew, and the straightened form

    F(R) = C_mid^B / ((A - R0) / (R - R0) - 1) = C^B

turns each run into a line through the origin of (ln C, ln F) whose slope is its B.
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling import fit as fit_module
from scalerl_jax.scaling import law, least_squares, profile
from scalerl_jax.scaling.points import Points
from scalerl_jax.scaling.precision import double_precision


@dataclasses.dataclass(frozen=True)
class Slope(law.Sigmoid):
    """A run refitted with A fixed. Intervals are profile likelihood; 0 or infinity where open."""

    ssr: float
    exponent_95: tuple[float, float]
    exponent_90: tuple[float, float]


def refit(points: Points, asymptote: float, *, grid: str = "auto") -> Slope:
    """B and C_mid of least squares with A held at `asymptote`; grid as of fit_sigmoid.

    Raises ValueError where the scores do not rise (grid="paper": no cell with B > 0).
    """
    data = fit_module.squares_data(points)
    cells = least_squares.search_cells(data.log_compute)
    constraint = least_squares.free(asymptote, asymptote)
    if grid == "paper":
        estimate, ssr = fit_module.paper_estimate(points, [asymptote], None, "these scores do not rise")
    else:
        estimate, ssr = fit_module.least_squares_estimate(data, cells, constraint)
    state = profile.likelihood(points, cells, constraint, held=1)
    wide, narrow = (state.intervals(level, estimate)["exponent"] for level in (0.95, 0.90))
    return Slope(*estimate, ssr + points.scatter, wide, narrow)


def straightened(compute: np.ndarray, reward: np.ndarray, slope: Slope) -> tuple[np.ndarray, np.ndarray]:
    """ln C and ln F, [M <= N], of the evaluations that lie strictly between R0 and A, where F is defined."""
    above = np.asarray(compute) > 0
    with double_precision():
        straight = np.asarray(law.straighten(np.asarray(reward)[above], **slope.parameters))
    defined = np.isfinite(straight)
    return np.log(np.asarray(compute)[above][defined]), np.log(straight[defined])

"""Profile likelihood: for each value of one parameter, the best fit over the others.

With Q the weighted sum of squares (weights 1 / variance) and phi the dispersion (points.py), the interval of A is

    { A : min over the others of Q - min Q  <=  phi * F(level; 1, nu_0 + degrees of freedom) }

and likewise for B and C_mid. A measured step-0 score is a datum like the others: R0 varies with the rest. Unlike a
standard error, the interval is asymmetric if the data are, reaches 1 if they do not bound A, and is open (0 or
infinity) if they do not bound B or C_mid. The band is the same set seen on the curve: at each compute, the lowest and
the highest score over all curves whose Q is within the threshold.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from scalerl_jax.scaling import least_squares
from scalerl_jax.scaling.law import double_precision
from scalerl_jax.scaling.least_squares import Cells, Constraint, Data, Solution
from scalerl_jax.scaling.points import Points

LEVEL = 0.95  # of a fit's default intervals
PARAMETERS = ("asymptote", "exponent", "midpoint")
LOG_EXPONENT_RANGE = (np.log(0.02), np.log(200.0))  # an interval of B that reaches an end is open there
LOG_COMPUTE_RANGE = 7.0  # an interval of C_mid that reaches so far beyond the data is open, in ln C
_UNLIMITED = 1e12  # a practically unlimited rise of Q; infinity would give NaN
_BISECTIONS = 16
_STEPS = 15  # of the search at each value; the next value starts from its result
_BAND_CELLS = 64  # per axis
_BAND_BATCH = 256  # of these cells at a time


class Profile(NamedTuple):
    best: Solution
    low: jax.Array  # [3] of A, ln B, ln C_mid
    high: jax.Array  # [3]
    open_low: jax.Array  # [3] bool: the range ended first
    open_high: jax.Array  # [3]


def threshold(level: float, dispersion: float, degrees: float) -> float:
    """The allowed rise of Q; practically unlimited without degrees of freedom."""
    if degrees <= 0:
        return _UNLIMITED
    return min(dispersion * float(scipy.special.fdtri(1, degrees, level)), _UNLIMITED)


def around(value: float, *intervals: tuple[float, float]) -> tuple[float, float]:
    """The union of intervals and a value: from the lowest end to the highest."""
    lows, highs = zip(*intervals)
    return min(value, *lows), max(value, *highs)


def _pinned(which, value, start, cells: Cells, data: Data, free: Constraint) -> Solution:
    """The best with parameter `which` held at `value`, from the better of `start` and the cells."""
    constraint = free._replace(
        low=jnp.where(which == 0, value, free.low),
        high=jnp.where(which == 0, value, free.high),
        exponent_fixed=which == 1,
        midpoint_fixed=which == 2,
    )

    def hold(shape):
        first = jnp.where(which == 1, value, shape[..., 0])
        return jnp.stack([first, jnp.where(which == 2, value, shape[..., 1])], axis=-1)

    # Cells away from the held value are of little use: only the nearest row or column is used.
    costs = least_squares.cell_costs(cells, data, constraint)
    column = jnp.where(which == 2, 1, 0)
    distance = jnp.abs(cells.shape[:, column] - value)
    near = (which == 0) | (distance <= jnp.min(distance) + 1e-9)
    candidates = jnp.stack([hold(start), hold(cells.shape[jnp.argmin(jnp.where(near, costs, jnp.inf))])])
    squares = jax.vmap(lambda b: jnp.sum(least_squares.residuals(b, data, constraint) ** 2))(candidates)
    start = candidates[jnp.argmin(squares)]
    return least_squares.polish(start, data, constraint, steps=_STEPS, tolerance=1e-9)


def _endpoint(which, side, best: Solution, rise, cells: Cells, data: Data, free: Constraint, limit):
    """One end of one interval, and whether the range ended first. Root of sqrt(Q - min) - sqrt(rise), near linear."""
    inside = jnp.where(which == 0, best.asymptote, best.shape[jnp.maximum(which - 1, 0)])
    root = jnp.sqrt(rise)

    def excess(value, start):
        solution = _pinned(which, value, start, cells, data, free)
        return jnp.sqrt(jnp.maximum(solution.cost - best.cost, 0.0)) - root, solution.shape

    limit = jnp.where(side > 0, jnp.maximum(limit, inside), jnp.minimum(limit, inside))

    def halve(i, state):
        within, beyond, excess_within, excess_beyond, shape = state
        share = jnp.clip(excess_within / (excess_within - excess_beyond), 0.05, 0.95)
        share = jnp.where(i % 3 == 2, 0.5, share)  # false position, with a bisection every third step
        value = jnp.where(i == 0, limit, within + share * (beyond - within))
        found, shape_there = excess(value, shape)
        holds = found <= 0
        return (
            jnp.where(holds, value, within),
            jnp.where(holds, beyond, value),
            jnp.where(holds, jnp.minimum(found, -1e-12), excess_within),
            jnp.where(holds, excess_beyond, jnp.maximum(found, 1e-12)),
            jnp.where(holds, shape_there, shape),
        )

    state = (inside, limit, -root - 1e-12, jnp.ones_like(root), best.shape)
    within, *_ = jax.lax.fori_loop(0, _BISECTIONS, halve, state)
    return within, within == limit


@jax.jit
def profile(best: Solution, cells: Cells, data: Data, constraint: Constraint, rise, log_range) -> Profile:
    """Intervals of one data set around its best. rise: [] threshold; log_range: [2] of ln C_mid."""
    which = jnp.array([0, 1, 2, 0, 1, 2])
    side = jnp.array([-1, -1, -1, 1, 1, 1])
    lows = jnp.stack([constraint.low, jnp.asarray(LOG_EXPONENT_RANGE[0]), log_range[0]])
    highs = jnp.stack([constraint.high, jnp.asarray(LOG_EXPONENT_RANGE[1]), log_range[1]])
    end = functools.partial(_endpoint, best=best, rise=rise, cells=cells, data=data, free=constraint)
    ends, opened = jax.vmap(lambda w, s, l: end(w, s, limit=l))(which, side, jnp.concatenate([lows, highs]))
    return Profile(best, ends[:3], ends[3:], opened[:3], opened[3:])


@jax.jit
def band(log_compute, shapes, data: Data, constraint: Constraint, best: Solution, rise):
    """Lowest and highest score at each compute [M] over the curves within the threshold, of shapes [K, 2]."""

    def of_shape(shape):
        t = jax.nn.sigmoid(jnp.exp(shape[0]) * (log_compute - shape[1]))  # [M]
        # The quadratic of (R0, A) at this shape: its minimum, and the range of a prediction for the remaining rise.
        q = least_squares.quadratic(shape, data)
        left = rise + best.cost - q.squares - q.pull
        moves = jnp.where(q.exact, 0.0, (1 - t) ** 2 * q.h11 - 2 * t * (1 - t) * q.h01) + t * t * q.h00
        reach = jnp.sqrt(jnp.maximum(left, 0.0) * moves / q.determinant)
        centre = q.initial * (1 - t) + q.asymptote * t
        floor, ceiling = (q.initial * (1 - t) + bound * t for bound in (constraint.low, constraint.high))
        low = jnp.where(left >= 0, jnp.clip(centre - reach, floor, ceiling), jnp.inf)
        high = jnp.where(left >= 0, jnp.clip(centre + reach, floor, ceiling), -jnp.inf)
        return low, high

    # A few shapes at a time: all shapes with all points would need gigabytes.
    low, high = jax.lax.map(of_shape, shapes, batch_size=_BAND_BATCH)
    t = jax.nn.sigmoid(jnp.exp(best.shape[0]) * (log_compute - best.shape[1]))
    curve = best.initial_reward * (1 - t) + best.asymptote * t
    return jnp.minimum(jnp.min(low, axis=0), curve), jnp.maximum(jnp.max(high, axis=0), curve)


def band_shapes(found: Profile) -> np.ndarray:
    """Shapes [K, 2] that fill the box of the intervals of ln B and ln C_mid."""
    axes = [np.linspace(float(found.low[i]), float(found.high[i]), _BAND_CELLS) for i in (1, 2)]
    return np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=-1)


@dataclasses.dataclass(frozen=True)
class FitState:
    """The data for intervals and bands."""

    points: Points
    data: Data  # weights 1 / variance
    constraint: Constraint
    found: Profile  # at LEVEL
    degrees: float  # of freedom of the intervals' Student's t, the counts' included
    dispersion: float

    def rise(self, level: float) -> float:
        """The allowed rise of Q within an interval of this level."""
        return threshold(level, self.dispersion, self.degrees)

    def intervals(self, level: float, estimate) -> dict[str, tuple[float, float]]:
        """The interval of each parameter except R0. estimate: A, B, C_mid, which the intervals contain."""
        best, rise = self.found.best, self.rise(level)
        found = self.found if level == LEVEL else _profile(best, self.data, self.constraint, rise)
        return read_intervals(found, estimate)


def likelihood_data(points: Points) -> Data:
    """Data with weights 1 / variance, and R0 free but weighted by its own evaluation."""
    variance = points.initial_variance
    return least_squares.make_data(
        points.compute,
        points.reward,
        1 / points.variance,
        initial=points.initial,
        initial_weight=np.inf if variance == 0 else 1 / variance,
    )


def likelihood(points: Points, cells, constraint: Constraint | None = None, *, held: int = 0) -> FitState:
    """Profile intervals, and the dispersion of the noise. held: number of parameters fixed by the constraint."""
    data = likelihood_data(points)
    constraint = constraint or least_squares.free()
    degrees = points.degrees + points.belief + held
    with double_precision():
        best = least_squares.search_from_rows(cells, data, constraint)
        squares = points.belief + float(best.cost) + points.inner_squares
        dispersion = squares / degrees if degrees > 0 else np.inf
    found = _profile(best, data, constraint, threshold(LEVEL, dispersion, degrees))
    return FitState(points, data, constraint, found, degrees, dispersion)


def _profile(best: Solution, data: Data, constraint, rise: float) -> Profile:
    margin = LOG_COMPUTE_RANGE
    log_range = np.array([data.log_compute.min() - margin, data.log_compute.max() + margin])
    starts = least_squares.search_cells(data.log_compute, coarse=True)
    with double_precision():
        return jax.device_get(profile(best, starts, data, constraint, rise, log_range))


def read_intervals(found: Profile, estimate) -> dict[str, tuple[float, float]]:
    """Intervals in the parameters' own units, 0 or infinity where open; they contain the estimate."""
    low = np.array([found.low[0], *np.where(found.open_low[1:], 0.0, np.exp(found.low[1:]))])
    high = np.array([found.high[0], *np.where(found.open_high[1:], np.inf, np.exp(found.high[1:]))])
    return {
        name: (float(min(low[i], estimate[i])), float(max(high[i], estimate[i]))) for i, name in enumerate(PARAMETERS)
    }

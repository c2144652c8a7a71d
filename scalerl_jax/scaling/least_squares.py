"""Least-squares fit of the sigmoid, with the linear parameters solved for in closed form.

For a given shape b = (ln B, ln C_mid) the curve R0 (1 - s) + A s is linear in R0 and A, so these are eliminated and
only the two numbers of the shape are searched:

    Q(b) = min over A in [low, high], R0 of   sum_i w_i (y_i - R0 (1 - s_i(b)) - A s_i(b))^2 + w_0 (y_0 - R0)^2

First on cells over the whole plane of shapes (sums over the points are matrix products that many data sets share), then
by Levenberg-Marquardt from chosen cells, with the exact derivative of the eliminated problem. Everything is written for
one data set and vmapped over resamples, simulated runs, or constraints.

Legend: N points (padded with weight 0), K cells.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LOG_EXPONENT_BOX = (math.log(1e-4), math.log(1e4))  # bounds of the search
LOG_COMPUTE_MARGIN = 30.0  # bound of the midpoint beyond the data, in ln C
CELL_ROWS = 40  # of ln B
_CELL_COLUMNS = 64  # of ln C_mid
_CELL_EXPONENTS = (0.05, 60.0)
_STEPS = 80  # most steps of a search
_LEAST_POINTS = 64
_TINY = 1e-300


class Data(NamedTuple):
    """One data set; some functions vmap over a leading axis."""

    log_compute: jax.Array  # [N]
    reward: jax.Array  # [N]
    weight: jax.Array  # [N]; 0 for padding
    initial: jax.Array  # [] y_0, the measured or given R0
    initial_weight: jax.Array  # [] w_0; infinite: R0 is exactly y_0; 0: R0 is known from the points only


class Constraint(NamedTuple):
    """Constraints of the search. Every field is a scalar array."""

    low: jax.Array  # of A
    high: jax.Array
    exponent_fixed: jax.Array  # bool: ln B stays at the start's
    midpoint_fixed: jax.Array  # bool: ln C_mid stays at the start's


class Solution(NamedTuple):
    shape: jax.Array  # [2] ln B, ln C_mid
    initial_reward: jax.Array
    asymptote: jax.Array
    cost: jax.Array  # Q


class Cells(NamedTuple):
    """Starting shapes, and their curves at the points of one compute axis."""

    shape: jax.Array  # [K, 2]
    rise: jax.Array  # [K, N] s of the law


def padded(count: int, *, least: int = _LEAST_POINTS) -> int:
    """A number of points rounded up to the next of least, 2 least, 4 least, ...

    The fit is compiled for every new size: three seconds, and some 35 MiB of programs that stay in memory. A trainer
    fits its own curve for as long as it runs; with these sizes most runs compile it once, and a run of a thousand
    evaluations five times.
    """
    size = least
    while size < count:
        size *= 2
    return size


def make_data(
    compute: np.ndarray, reward: np.ndarray, weight: np.ndarray, *, initial: float, initial_weight: float
) -> Data:
    """Pads the points. compute, reward, weight: [N]; a reward may have leading axes of data sets."""
    count = len(compute)
    pad = padded(count) - count
    widen = [(0, 0)] * (np.ndim(reward) - 1) + [(0, pad)]
    return Data(
        log_compute=np.pad(np.log(compute), (0, pad), mode="edge"),
        reward=np.pad(np.asarray(reward, np.float64), widen),
        weight=np.pad(np.asarray(weight, np.float64), [(0, 0)] * (np.ndim(weight) - 1) + [(0, pad)]),
        initial=np.float64(initial),
        initial_weight=np.float64(initial_weight),
    )


def free(low: float = 0.0, high: float = 1.0) -> Constraint:
    """Only the range of A is constrained."""
    return Constraint(np.float64(low), np.float64(high), np.False_, np.False_)


def search_cells(log_compute: np.ndarray, midpoint_grid: np.ndarray | None = None, *, coarse: bool = False) -> Cells:
    """The starting shapes: midpoints from a twentieth of the least compute to 50 times the most, and the grid's.

    log_compute: [N], padded or not.
    """
    rows, columns = (CELL_ROWS // 2, _CELL_COLUMNS // 2) if coarse else (CELL_ROWS, _CELL_COLUMNS)
    log_exponents = np.linspace(*np.log(_CELL_EXPONENTS), rows)
    log_midpoints = np.linspace(log_compute.min() - 3.0, log_compute.max() + 4.0, columns)
    if midpoint_grid is not None:
        log_midpoints = np.union1d(log_midpoints, np.log(midpoint_grid))
    log_b, log_m = np.meshgrid(log_exponents, log_midpoints, indexing="ij")
    shape = np.stack([log_b.ravel(), log_m.ravel()], axis=-1)
    with np.errstate(over="ignore"):
        rise = 1 / (1 + np.exp(-np.exp(shape[:, :1]) * (log_compute - shape[:, 1:])))
    return Cells(shape, rise)


def _linear_part(uu, us, ss, uy, sy, y0, w0, low, high):
    """R0 and A that minimise a quadratic with the given sums (u = 1 - s), A clipped to [low, high], R0 to [0, 1]."""
    exact = jnp.isinf(w0)
    known = jnp.where(exact, 0.0, w0)
    top = uu + known
    right = uy + known * y0
    determinant = top * ss - us * us
    # A free R0 and A cannot be distinguished if s is constant over the points: A then follows R0's datum only.
    identifiable = determinant > 1e-13 * top * ss
    both = (top * sy - us * right) / jnp.where(identifiable, determinant, 1.0)
    alone = (sy - y0 * us) / jnp.maximum(ss, _TINY)
    asymptote = jnp.clip(jnp.where(exact | ~identifiable, alone, both), low, high)
    initial = jnp.clip((right - asymptote * us) / jnp.maximum(top, _TINY), 0.0, 1.0)
    initial = jnp.where(exact, y0, initial)
    asymptote = jnp.clip((sy - initial * us) / jnp.maximum(ss, _TINY), low, high)
    return initial, asymptote


def eliminate(shape, data: Data, low, high):
    """The best R0 and A at a shape."""
    s = jax.nn.sigmoid(jnp.exp(shape[0]) * (data.log_compute - shape[1]))
    u = 1 - s
    w, y = data.weight, data.reward
    return _linear_part(
        jnp.sum(w * u * u), jnp.sum(w * u * s), jnp.sum(w * s * s), jnp.sum(w * u * y), jnp.sum(w * s * y),
        data.initial, data.initial_weight, low, high,
    )  # fmt: skip


class Quadratic(NamedTuple):
    """Q at one shape as a function of (R0, A), without their ranges; every field is a scalar array."""

    initial: jax.Array  # R0 and A at the minimum
    asymptote: jax.Array
    squares: jax.Array  # the least Q: of the points, and of R0 to what was measured
    pull: jax.Array
    h00: jax.Array  # the matrix, and its determinant; h00 = 1 and h01 = 0 if R0 is exact
    h01: jax.Array
    h11: jax.Array
    determinant: jax.Array
    exact: jax.Array  # bool: R0 is exact


def quadratic(shape, data: Data) -> Quadratic:
    w, y = data.weight, data.reward
    s = jax.nn.sigmoid(jnp.exp(shape[0]) * (data.log_compute - shape[1]))
    u = 1 - s
    exact = jnp.isinf(data.initial_weight)
    known = jnp.where(exact, 0.0, data.initial_weight)
    h00, h01 = jnp.where(exact, 1.0, jnp.sum(w * u * u) + known), jnp.where(exact, 0.0, jnp.sum(w * u * s))
    h11 = jnp.maximum(jnp.sum(w * s * s), _TINY)
    b0 = jnp.where(exact, data.initial, jnp.sum(w * u * y) + known * data.initial)
    b1 = jnp.sum(w * s * (y - jnp.where(exact, data.initial, 0.0) * u))
    determinant = jnp.maximum(h00 * h11 - h01 * h01, 1e-13 * h00 * h11)
    initial, asymptote = (h11 * b0 - h01 * b1) / determinant, (h00 * b1 - h01 * b0) / determinant
    r = y - initial * u - asymptote * s
    pull = known * (data.initial - initial) ** 2
    return Quadratic(initial, asymptote, jnp.sum(w * r * r), pull, h00, h01, h11, determinant, exact)


def residuals(shape, data: Data, constraint: Constraint):
    """[N + 1] whose sum of squares is Q: the points, and the row of R0."""
    initial, asymptote = eliminate(shape, data, constraint.low, constraint.high)
    s = jax.nn.sigmoid(jnp.exp(shape[0]) * (data.log_compute - shape[1]))
    points = jnp.sqrt(data.weight) * (data.reward - initial * (1 - s) - asymptote * s)
    known = jnp.where(jnp.isinf(data.initial_weight), 0.0, data.initial_weight)
    return jnp.append(points, jnp.sqrt(known) * (data.initial - initial))


def cell_costs(cells: Cells, data: Data, constraint: Constraint):
    """Q in every cell, [K]. Under vmap over data sets that share their compute the sums become matrix products."""
    w, y, rise = data.weight, data.reward, cells.rise
    total, total_y, total_yy = jnp.sum(w), jnp.sum(w * y), jnp.sum(w * y * y)
    s, ss, sy = rise @ w, (rise * rise) @ w, rise @ (w * y)
    uu, us, uy = total - 2 * s + ss, s - ss, total_y - sy
    y0, w0 = data.initial, data.initial_weight
    r, a = _linear_part(uu, us, ss, uy, sy, y0, w0, constraint.low, constraint.high)
    known = jnp.where(jnp.isinf(w0), 0.0, w0)
    return total_yy - 2 * (r * uy + a * sy) + r * r * uu + 2 * r * a * us + a * a * ss + known * (r - y0) ** 2


def polish(shape, data: Data, constraint: Constraint, *, steps: int = _STEPS, tolerance: float = 1e-15) -> Solution:
    """Levenberg-Marquardt from a shape [2] to the local minimum of Q.

    It ends after `steps` steps, or when a step lowers Q by less than a share `tolerance`.
    """
    weighted = data.weight > 0
    lowest = jnp.min(jnp.where(weighted, data.log_compute, jnp.inf)) - LOG_COMPUTE_MARGIN
    highest = jnp.max(jnp.where(weighted, data.log_compute, -jnp.inf)) + LOG_COMPUTE_MARGIN
    floor = jnp.stack([jnp.full_like(lowest, LOG_EXPONENT_BOX[0]), lowest])
    ceiling = jnp.stack([jnp.full_like(highest, LOG_EXPONENT_BOX[1]), highest])
    fixed = jnp.stack([constraint.exponent_fixed, constraint.midpoint_fixed])

    def step(state):
        shape, cost, slope, curvature, damping, count, _ = state
        against = ((shape <= floor) & (slope > 0)) | ((shape >= ceiling) & (slope < 0))
        held = fixed | against
        slope_free = jnp.where(held, 0.0, slope)
        a = jnp.where(held[0], 1.0, curvature[0, 0] * (1 + damping)) + _TINY
        c = jnp.where(held[1], 1.0, curvature[1, 1] * (1 + damping)) + _TINY
        b = jnp.where(held[0] | held[1], 0.0, curvature[0, 1])
        determinant = jnp.maximum(a * c - b * b, _TINY)
        move = -jnp.stack([c * slope_free[0] - b * slope_free[1], a * slope_free[1] - b * slope_free[0]]) / determinant
        move = jnp.clip(jnp.nan_to_num(move), -3.0, 3.0)  # a step changes B or C_mid by at most a factor of 20
        tried = jnp.clip(shape + move, floor, ceiling)
        r, push = jax.linearize(lambda b: residuals(b, data, constraint), tried)
        jacobian = jnp.stack([push(jnp.array([1.0, 0.0])), push(jnp.array([0.0, 1.0]))])
        new_cost = r @ r
        better = new_cost < cost
        small = jnp.max(jnp.abs(tried - shape)) <= 1e-11
        level = better & (cost - new_cost <= tolerance * cost) & (damping < 1e-2)
        new, old = (tried, new_cost, jacobian @ r, jacobian @ jacobian.T), (shape, cost, slope, curvature)
        kept = jax.tree.map(functools.partial(jnp.where, better), new, old)
        damping = jnp.where(better, damping * 0.1, jnp.maximum(damping * 8.0, 1e-6))
        done = (count > 0) & (small | level) | (damping > 1e15) | (count >= steps)
        return (*kept, damping, count + 1, done)

    # The first step does not move, and its cost is below infinity: it only evaluates the start.
    shape = jnp.where(fixed, shape, jnp.clip(shape, floor, ceiling))
    nothing = (jnp.asarray(jnp.inf), jnp.zeros(2), jnp.eye(2))
    start = (shape, *nothing, jnp.asarray(1e-2), jnp.asarray(0), jnp.asarray(False))
    shape, cost, *_ = jax.lax.while_loop(lambda state: ~state[-1], step, start)
    initial, asymptote = eliminate(shape, data, constraint.low, constraint.high)
    return Solution(shape, initial, asymptote, cost)


@functools.partial(jax.jit, static_argnames="rows")
def search_from_rows(cells: Cells, data: Data, constraint: Constraint, rows: int = CELL_ROWS) -> Solution:
    """The lowest of the minima reached from the best cell of each of `rows` bands of the cells (they are B-major)."""
    costs = cell_costs(cells, data, constraint).reshape(rows, -1)
    best = jnp.argmin(costs, axis=1) + jnp.arange(rows) * costs.shape[1]
    solutions = jax.vmap(polish, in_axes=(0, None, None))(cells.shape[best], data, constraint)
    winner = jnp.argmin(solutions.cost)
    return jax.tree.map(lambda field: field[winner], solutions)


def search_from_best(cells: Cells, data: Data, constraint: Constraint, also: jax.Array) -> Solution:
    """The minimum reached from the better of the best cell and the shape `also` [2]; cheap for many data sets."""
    costs = cell_costs(cells, data, constraint)
    best = jnp.argmin(costs)
    r = residuals(also, data, constraint)
    start = jnp.where(r @ r < costs[best], also, cells.shape[best])
    return polish(start, data, constraint)

"""The paper's fit: a grid over the asymptote and the midpoint, the exponent by least squares in every cell.

In each cell (A, C_mid), B starts at 1 and is changed by the method that `scipy.optimize.curve_fit` uses without bounds:
MINPACK's Levenberg-Marquardt with its trust region and its stopping rules. A cell can have several local minima, so to
agree with SciPy in every cell the same path is followed; with one parameter the method's inner problem has a closed
form, and all cells are computed at once.

    x_i = ln C_i - ln C_mid              s_i = sigmoid(B x_i)
    r_i = y_i - R0 - (A - R0) s_i        j_i = (A - R0) x_i s_i (1 - s_i)

MINPACK computes j from differences of the curve. If the curve is constant to the last bits of a float64, on the plateau
of a midpoint far from the data, these bits decide whether it stops there or turns back. No other program can reproduce
such a path, so cells with one (about 1 in 100) are handed to MINPACK itself.

Legend: N points, K cells.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.scaling.law import double_precision

ASYMPTOTES = np.linspace(0.45, 0.80, 71)
MIDPOINTS = np.linspace(100.0, 40000.0, 100)  # GPU-hours

_TOLERANCE = 1.49012e-8  # ftol and xtol of scipy.optimize.leastsq
_TRUST = 100.0  # its `factor`: the first trust region, in units of the start
_EVALUATIONS = 400  # curve_fit's limit for one parameter
_EPSILON = float(np.finfo(np.float64).eps)
_DOUBT = 1e-2  # relative error of MINPACK's j above which its path is not reproduced
_TINY = float(np.finfo(np.float64).tiny)
_FIRST_ROUND = 8  # steps that all cells take together; most have ended by then
_POCKET = 1024  # the remaining cells are gathered into pockets of this many


class _WalkState(NamedTuple):
    """The state of the walk in each cell; every field is [K]."""

    log_midpoint: jax.Array
    gain: jax.Array  # A - R0
    exponent: jax.Array
    ssr: jax.Array
    curvature: jax.Array  # sum of j^2 at the exponent
    slope: jax.Array  # sum of j r
    scale: jax.Array  # the largest norm of j so far: MINPACK's diag
    trust: jax.Array  # radius of the trust region, in units of 1 / scale
    damping: jax.Array  # Levenberg-Marquardt parameter
    evaluations: jax.Array
    first: jax.Array  # no step taken yet
    ended: jax.Array
    handed_over: jax.Array  # ended here, to be computed by MINPACK


def _sums(exponent, log_midpoint, gain, log_compute, reward, weight, initial_reward):
    """Sums of r^2, j^2 and j r, each [K], in one pass over the points so that nothing of size [K, N] is stored."""

    def add(sums, point):
        log_c, y, w = point
        x = log_c - log_midpoint
        s = 1 / (1 + jnp.exp(-exponent * x))
        r = y - initial_reward - gain * s
        j = gain * x * s * (1 - s)
        return (sums[0] + w * r * r, sums[1] + w * j * j, sums[2] + w * j * r), None

    zero = jnp.zeros_like(exponent)
    return jax.lax.scan(add, (zero, zero, zero), (log_compute, reward, weight))[0]


def _doubtful(exponent, curvature, gain, points):
    """Where differences give j no better than to _DOUBT: scores below 1 have steps of eps, and h is sqrt(eps) |B|."""
    error = _EPSILON * jnp.sum(points[2]) / jnp.where(exponent == 0, 1.0, exponent) ** 2  # sum of w (eps / h)^2
    return (curvature * _DOUBT**2 <= error) & (gain != 0)


def _step(cells: _WalkState, points) -> _WalkState:
    """One step of MINPACK's lmdif in every cell that has not ended."""
    norm = jnp.sqrt(cells.ssr)
    curvature = cells.curvature
    scale = jnp.maximum(cells.scale, jnp.sqrt(curvature))
    length = jnp.abs(scale * cells.exponent)
    trust = cells.trust

    # lmpar in one dimension: the whole Gauss-Newton step if it is within 1.1 of the trust region, else the damping that
    # makes the step as long as the region is; the damping of the step before is kept if it comes within a tenth of it.
    pull = scale * jnp.abs(cells.slope)
    whole = pull / curvature
    exact = jnp.maximum(pull / trust - curvature, 0.0) / scale**2
    kept = jnp.clip(cells.damping, exact, pull / scale**2 / trust)
    kept_close = jnp.abs(pull / (curvature + kept * scale**2) - trust) <= 0.1 * trust
    damping = jnp.where(whole - trust <= 0.1 * trust, 0.0, jnp.where(kept_close, kept, exact))
    move = cells.slope / (curvature + damping * scale**2)
    moved = jnp.abs(scale * move)
    trust = jnp.where(cells.first, jnp.minimum(trust, moved), trust)

    exponent = cells.exponent + move
    ssr, new_curvature, new_slope = _sums(exponent, cells.log_midpoint, cells.gain, *points)
    new_norm = jnp.sqrt(ssr)
    safe_norm = jnp.maximum(norm, _TINY)
    actual = jnp.where(0.1 * new_norm < norm, 1 - (new_norm / safe_norm) ** 2, -1.0)
    linear = curvature * (move / safe_norm) ** 2
    damped = damping * (moved / safe_norm) ** 2
    predicted = linear + 2 * damped
    descent = -(linear + damped)
    ratio = jnp.where(predicted == 0, 0.0, actual / jnp.where(predicted == 0, 1.0, predicted))

    worse = actual < 0
    shrink = jnp.where(worse, 0.5 * descent / jnp.where(worse, descent + 0.5 * actual, 1.0), 0.5)
    shrink = jnp.where((0.1 * new_norm >= norm) | (shrink < 0.1), 0.1, shrink)
    poor = ratio <= 0.25
    good = ~poor & ((damping == 0) | (ratio >= 0.75))
    trust = jnp.where(poor, shrink * jnp.minimum(trust, moved / 0.1), jnp.where(good, moved / 0.5, trust))
    damping = jnp.where(poor, damping / shrink, jnp.where(good, 0.5 * damping, damping))

    taken = ratio >= 1e-4
    length = jnp.where(taken, jnp.abs(scale * exponent), length)
    settled = (jnp.abs(actual) <= _TOLERANCE) & (predicted <= _TOLERANCE) & (0.5 * ratio <= 1)
    settled |= trust <= _TOLERANCE * length
    settled |= (cells.slope == 0) | (norm == 0)
    doubtful = taken & _doubtful(exponent, new_curvature, cells.gain, points)
    evaluations = cells.evaluations + 1 + taken  # MINPACK spends one more on the differences after each step taken
    exhausted = evaluations >= _EVALUATIONS
    exhausted |= (jnp.abs(actual) <= _EPSILON) & (predicted <= _EPSILON) & (0.5 * ratio <= 1)
    exhausted |= trust <= _EPSILON * length

    stepped = cells._replace(
        exponent=jnp.where(taken, exponent, cells.exponent),
        ssr=jnp.where(taken, ssr, cells.ssr),
        curvature=jnp.where(taken, new_curvature, cells.curvature),
        slope=jnp.where(taken, new_slope, cells.slope),
        scale=scale,
        trust=trust,
        damping=damping,
        evaluations=evaluations,
        first=cells.first & ~taken,
        ended=settled | exhausted | doubtful,
        handed_over=(exhausted & ~settled) | doubtful,
    )
    return jax.tree.map(lambda old, new: jnp.where(cells.ended, old, new), cells, stepped)


@functools.partial(jax.jit, static_argnames=("pocket",))
def _walk(points, log_midpoint, gain, pocket):
    """The end of the path from B = 1 in every cell: exponent, ssr and handed_over, each [K]."""
    start = jnp.ones_like(gain)
    ssr, curvature, slope = _sums(start, log_midpoint, gain, *points)
    scale = jnp.where(curvature == 0, 1.0, jnp.sqrt(curvature))
    doubtful = _doubtful(start, curvature, gain, points)
    cells = _WalkState(
        log_midpoint=log_midpoint,
        gain=gain,
        exponent=start,
        ssr=ssr,
        curvature=curvature,
        slope=slope,
        scale=scale,
        trust=_TRUST * scale * start,
        damping=jnp.zeros_like(gain),
        evaluations=jnp.full(gain.shape, 2),
        first=jnp.ones(gain.shape, bool),
        ended=(slope == 0) | (ssr == 0) | doubtful,
        handed_over=doubtful,
    )
    step = functools.partial(_step, points=points)
    cells = jax.lax.fori_loop(0, _FIRST_ROUND, lambda _, c: step(c), cells)

    def finish_pocket(cells):
        (chosen,) = jnp.nonzero(~cells.ended, size=pocket, fill_value=gain.size)
        few = jax.tree.map(lambda field: field.at[chosen].get(mode="fill", fill_value=1), cells)
        few = jax.lax.while_loop(lambda c: ~jnp.all(c.ended), step, few)
        return jax.tree.map(lambda field, new: field.at[chosen].set(new, mode="drop"), cells, few)

    cells = jax.lax.while_loop(lambda c: ~jnp.all(c.ended), finish_pocket, cells)
    return cells.exponent, cells.ssr, cells.handed_over


def _minpack(compute, reward, root_weight, initial_reward: float, asymptote: float, midpoint: float):
    """Exponent and ssr of one cell, as by curve_fit(law, compute, reward, sigma=1 / root_weight)."""
    from scipy.optimize import leastsq  # a third of a second to import, and only for this grid

    def residuals(exponent):
        law = initial_reward + (asymptote - initial_reward) / (1 + (midpoint / compute) ** exponent)
        return root_weight * (law - reward)

    with np.errstate(all="ignore"):  # a step may make the power infinite
        (exponent,), _, found, _, why = leastsq(residuals, 1.0, full_output=True)
    # curve_fit raises if the limit of evaluations or of precision ended the path.
    return (exponent, found["fvec"] @ found["fvec"]) if why in (1, 2, 3, 4) else (np.nan, np.nan)


class PaperGrid(NamedTuple):
    exponent: np.ndarray  # [asymptotes, midpoints]; NaN where the method failed
    ssr: np.ndarray  # [asymptotes, midpoints]; NaN where the method failed


def fit_cells(
    compute: np.ndarray,
    reward: np.ndarray,
    *,
    initial_reward: float,
    weight: np.ndarray | None = None,
    asymptotes: np.ndarray = ASYMPTOTES,
    midpoints: np.ndarray = MIDPOINTS,
) -> PaperGrid:
    """Fits the exponent in every cell. compute (above 0), reward, weight: [N]; the grids are one-dimensional."""
    compute, reward, asymptotes, midpoints = (
        np.asarray(a, np.float64) for a in (compute, reward, asymptotes, midpoints)
    )
    weight = np.ones(len(compute)) if weight is None else np.asarray(weight, np.float64)
    gain, log_midpoint = np.meshgrid(asymptotes - initial_reward, np.log(midpoints), indexing="ij")
    with double_precision():
        ended = _walk(
            (np.log(compute), reward, weight, float(initial_reward)),
            log_midpoint.ravel(),
            gain.ravel(),
            pocket=min(_POCKET, gain.size),
        )
        exponent, ssr, handed_over = (np.array(a).reshape(gain.shape) for a in ended)
    for row, column in np.argwhere(handed_over):
        exponent[row, column], ssr[row, column] = _minpack(
            compute, reward, np.sqrt(weight), initial_reward, asymptotes[row], midpoints[column]
        )
    return PaperGrid(exponent, ssr)


def best_cell(grid: PaperGrid) -> tuple[int, int] | None:
    """The cell with the lowest sum of squares among those with B > 0; None if there is none."""
    ssr = np.where(grid.exponent > 0, grid.ssr, np.inf)
    row, column = np.unravel_index(np.argmin(ssr), ssr.shape)
    return (int(row), int(column)) if np.isfinite(ssr[row, column]) else None

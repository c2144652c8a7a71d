"""Curves drawn from what the points and a weak prior leave possible: for decisions, which need averages over curves.

    p(A, B, C_mid, R0 | points)  ~  exp(-Q / 2 phi) * prior          Q as in profile.py, phi the dispersion (noise.py)
    prior: A uniform on [0, 1]; ln C_mid uniform from a twentieth of the least compute to 50 times the most;
           ln B normal around ln 2 with standard deviation 0.5 (B from 0.75 to 5.3; published fits lie in 1.1 to 5.2)
    phi:   scaled inverse chi-square with the degrees of freedom that intervals use

Drawn from a grid, without a chain: for each C_mid the best B and the width around it are found, a grid of B is laid
there (so that a curved ridge is followed), and at each shape (R0, A) is normal, A cut to [0, 1]. Intervals and bands
that are printed come from the profile, which needs no prior; an average over likely curves is a poor point forecast
where the points do not bound A, so point forecasts stay with the fit.

Left out: that runs of other seeds differ; seeds given together only widen the noise.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.scipy.special import log_ndtr, ndtr, ndtri

from scalerl_jax.scaling import least_squares
from scalerl_jax.scaling.least_squares import Constraint, Data
from scalerl_jax.scaling.points import LEAST_VARIANCE, Points
from scalerl_jax.scaling.precision import double_precision
from scalerl_jax.scaling.profile import likelihood_data

EXPONENT_PRIOR = (float(np.log(2.0)), 0.5)  # of ln B
_INITIAL_SPREAD = 0.3  # standard deviation of an R0 of which nothing was measured
_COLUMNS = 64  # of ln C_mid
_ROWS = 57  # of ln B around the best of each column
_ROW_REACH = 7.0  # standard deviations
_REFINEMENTS = 4  # of the range of the columns
_KEPT = 40.0  # columns whose deviance is this far above the best are left out
_STARTS = (0.0, 0.7, 1.6)  # of ln B in each column
_DISPERSIONS = 16  # values of phi that the draws are shared among


class Curves(NamedTuple):
    """S curves, and what an evaluation of them would be off by."""

    asymptote: np.ndarray  # [S]
    exponent: np.ndarray  # [S]
    midpoint: np.ndarray  # [S]
    initial_reward: np.ndarray  # [S]
    evaluation_variance: float  # of one more evaluation like those given

    def at(self, compute) -> np.ndarray:
        """Scores [S, M] at compute [M] above 0."""
        exponent, midpoint = self.exponent[:, None], self.midpoint[:, None]
        with np.errstate(over="ignore"):
            rise = 1 / (1 + (midpoint / np.asarray(compute, np.float64)) ** exponent)
        return self.initial_reward[:, None] + (self.asymptote - self.initial_reward)[:, None] * rise


def draw_curves(points: Points, *, count: int, seed: int) -> Curves:
    """`count` curves, in random order. Raises ValueError where no noise can be told from the points."""
    data = likelihood_data(points)
    degrees = points.degrees + points.belief
    if degrees <= 0:
        raise ValueError(f"{len(points.compute)} points leave nothing to tell the noise by; one more, or counts, would")
    variance = float(np.median(points.variance))
    log_range = np.array([data.log_compute.min() - 3.0, data.log_compute.max() + 4.0])
    levels = (np.arange(_DISPERSIONS) + 0.5) / _DISPERSIONS
    factors = degrees / (2 * scipy.special.gammaincinv(degrees / 2, levels))
    heard = points.belief + points.inner_squares
    noise = _Noise(np.float64(heard), np.float64(degrees), np.float64(LEAST_VARIANCE / variance), factors)
    with double_precision():
        each = -(-count // _DISPERSIONS)
        drawn = jax.device_get(_draw(data, noise, log_range, jax.random.key(seed), each))
    columns = [np.asarray(column)[:count] for column in drawn[:4]]
    return Curves(*columns, evaluation_variance=variance * float(drawn[4]))


class _Noise(NamedTuple):
    """What the dispersion is made of."""

    belief: jax.Array  # nu_0, and the squares of rows around the means that are fitted
    degrees: jax.Array  # nu_0 + those of the residuals
    least: jax.Array
    factors: jax.Array  # [phi] its values over their scale


def _column_fits(log_midpoints, data: Data, constraint: Constraint) -> least_squares.Solution:
    """The best B at each C_mid: fields lead by [K]."""
    held = constraint._replace(midpoint_fixed=jnp.asarray(True))

    def one(log_midpoint):
        starts = jnp.stack([jnp.asarray(_STARTS), jnp.full(len(_STARTS), log_midpoint)], axis=-1)
        fits = jax.vmap(lambda b: least_squares.polish(b, data, held, steps=25, tolerance=1e-9))(starts)
        return jax.tree.map(lambda field: field[jnp.argmin(fits.cost)], fits)

    return jax.vmap(one)(log_midpoints)


def _log_mass(mean, spread):
    """Logarithm of the share of a normal that lies in [0, 1]."""
    high, low = (1 - mean) / spread, -mean / spread
    flip = low > 0  # the same share, seen from the tail where differences are exact
    high, low = jnp.where(flip, -low, high), jnp.where(flip, -high, low)
    return log_ndtr(high) + jnp.log1p(-jnp.minimum(jnp.exp(log_ndtr(low) - log_ndtr(high)), 1 - 1e-15))


@functools.partial(jax.jit, static_argnames="each")
def _draw(data: Data, noise: _Noise, log_range, key, each: int):
    """A, B, C_mid, R0, [phi * each] each, in random order, and the dispersion."""

    def given(dispersion):
        """Data and prior on the scale of Q."""
        known = jnp.maximum(data.initial_weight, dispersion / _INITIAL_SPREAD**2)
        constraint = least_squares.free()._replace(
            prior_mean=jnp.asarray(EXPONENT_PRIOR[0]), prior_precision=dispersion / EXPONENT_PRIOR[1] ** 2
        )
        return data._replace(initial_weight=known), constraint

    # ------------------------------------------------------------------ the dispersion, and where the columns go
    def narrow(_, state):
        low, high, dispersion = state
        columns = jnp.linspace(low, high, _COLUMNS)
        known, constraint = given(jnp.where(jnp.isinf(dispersion), 0.0, dispersion))  # at first without the prior
        fits = _column_fits(columns, known, constraint)
        off = constraint.prior_precision * (fits.shape[:, 0] - constraint.prior_mean) ** 2
        found = jnp.maximum((noise.belief + jnp.min(fits.cost - off)) / noise.degrees, noise.least)
        dispersion = jnp.minimum(dispersion, found)
        kept = fits.cost - jnp.min(fits.cost) <= _KEPT * dispersion
        first, last = jnp.argmax(kept), _COLUMNS - 1 - jnp.argmax(kept[::-1])
        return columns[jnp.maximum(first - 1, 0)], columns[jnp.minimum(last + 1, _COLUMNS - 1)], dispersion

    start = (log_range[0], log_range[1], jnp.asarray(jnp.inf))
    low, high, dispersion = jax.lax.fori_loop(0, _REFINEMENTS, narrow, start)
    data, prior = given(dispersion)
    columns = jnp.linspace(low, high, _COLUMNS)
    fits = _column_fits(columns, data, prior)

    # ------------------------------------------------------------------ how wide each is in ln B, and the cells
    def squares(log_exponent, log_midpoint):
        return jnp.sum(least_squares.residuals(jnp.stack([log_exponent, log_midpoint]), data, prior) ** 2)

    ridge = fits.shape[:, 0]
    step = 0.02
    curvature = jax.vmap(lambda b, m: squares(b + step, m) + squares(b - step, m) - 2 * squares(b, m))(ridge, columns)
    curvature = jnp.maximum(curvature / step**2, 2 * prior.prior_precision)
    width = jnp.sqrt(2 * dispersion / curvature)
    offsets = jnp.linspace(-_ROW_REACH, _ROW_REACH, _ROWS)
    cells = jnp.stack(
        [ridge[:, None] + width[:, None] * offsets, jnp.broadcast_to(columns[:, None], (_COLUMNS, _ROWS))], axis=-1
    ).reshape(-1, 2)

    def weigh(shape):
        q = least_squares.quadratic(shape, data)
        off = prior.prior_precision / dispersion * (shape[0] - prior.prior_mean) ** 2
        return q.asymptote, q.h00 / q.determinant, q.determinant, q.squares + q.pull, off

    asymptote, variance, determinant, cost, off = jax.vmap(weigh)(cells)
    size = jnp.repeat(jnp.log(width), _ROWS)

    # ------------------------------------------------------------------ draws, at each of the dispersions
    def at_dispersion(phi, key):
        mass = _log_mass(asymptote, jnp.sqrt(phi * variance))
        log_weight = -0.5 * cost / phi - 0.5 * off - 0.5 * jnp.log(determinant) + mass + size
        keys = jax.random.split(key, 5)
        cumulative = jnp.cumsum(jax.nn.softmax(log_weight))
        shares = (jnp.arange(each) + jax.random.uniform(keys[0], (each,))) / each * cumulative[-1]
        cell = jnp.minimum(jnp.searchsorted(cumulative, shares), len(cells) - 1)
        # Within the cell, along the ridge: between two columns the best B and its width change evenly.
        column = cell // _ROWS + jax.random.uniform(keys[1], (each,), minval=-0.5, maxval=0.5)
        row = offsets[cell % _ROWS] + (offsets[1] - offsets[0]) * jax.random.uniform(
            keys[2], (each,), minval=-0.5, maxval=0.5
        )
        place = jnp.arange(_COLUMNS)
        log_midpoint = jnp.interp(column, place, columns)
        log_exponent = jnp.interp(column, place, ridge) + row * jnp.interp(column, place, width)
        shapes = jnp.stack([log_exponent, log_midpoint], axis=-1)

        def rest(shape, u, z):
            q = least_squares.quadratic(shape, data)
            mean, spread = q.asymptote, jnp.sqrt(phi * q.h00 / q.determinant)
            below, above = ndtr(-mean / spread), ndtr((1 - mean) / spread)
            a = jnp.clip(mean + spread * ndtri(jnp.clip(below + u * (above - below), 1e-300, 1 - 1e-16)), 0.0, 1.0)
            given = q.initial - q.h01 / q.h00 * (a - mean) + jnp.sqrt(phi / q.h00) * z
            return a, jnp.where(q.exact, data.initial, jnp.clip(given, 0.0, 1.0))

        a, r = jax.vmap(rest)(shapes, jax.random.uniform(keys[3], (each,)), jax.random.normal(keys[4], (each,)))
        return a, jnp.exp(log_exponent), jnp.exp(log_midpoint), r

    keys = jax.random.split(key, len(noise.factors) + 1)
    drawn = jax.vmap(at_dispersion)(dispersion * noise.factors, keys[1:])
    order = jax.random.permutation(keys[0], len(noise.factors) * each)
    return (*[column.reshape(-1)[order] for column in drawn], dispersion)

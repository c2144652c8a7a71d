"""Posterior draws of curves, given the points and a weak prior, for laws that are linear in R0 and A:

    R(C) = R0 + (A - R0) s(C; shape)

A law gives s and a box of shapes with a prior (law.py). The posterior, with a uniform A in [0, 1] (or A = 1), R0 as
measured, and the noise's dispersion phi integrated out (points.py; conjugate, so the likelihood is a Student's t):

    ln p(shape | points) = ln prior - ln det(H) / 2 - n / 2 ln(nu_0 + Q) + ln P(0 <= A <= 1) + const

Q: least squares of the points over (R0, A) at this shape, weights 1 / variance; H its matrix. A grid over the box is
narrowed to the region with the mass, cells are drawn by their weight and points within them uniformly, and the draws
are resampled by their own weights; then phi, A and R0 are drawn given the shape.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from scalerl_jax.scaling.points import LEAST_VARIANCE, Points

_REFINEMENTS = 3
_KEPT = 14.0  # nats below the best cell up to which a cell is kept
_OVERSAMPLED = 4  # draws before they are resampled
_INITIAL_SPREAD = 0.3  # standard deviation of an R0 that was not measured
_EXACT = 1e10  # weight of an exactly known R0, over that of all points
_UNSEEN = 1e-6  # largest s at the points below which a shape is excluded, since it only determines R0
_BATCH = 1 << 22  # cells times points at once


@dataclasses.dataclass(frozen=True)
class Axis:
    """One parameter of a shape."""

    low: float
    high: float
    cells: int  # of the grid
    mean: float = 0.0  # of a normal prior
    deviation: float = np.inf  # inf: uniform prior


# s [K, N] of shapes [K, P] at ln C [N].
Rise = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class DrawnCurves:
    """S drawn curves."""

    asymptote: np.ndarray  # [S]
    initial_reward: np.ndarray  # [S]
    shape: np.ndarray  # [S, P]
    dispersion: np.ndarray  # [S] noise variance over that of the counts
    rise: Rise = dataclasses.field(repr=False)

    def at(self, compute: np.ndarray) -> np.ndarray:
        """Scores [S, M] at compute [M] above 0."""
        s = self.rise(self.shape, np.log(np.asarray(compute, np.float64)))
        return self.initial_reward[:, None] + (self.asymptote - self.initial_reward)[:, None] * s


@dataclasses.dataclass(frozen=True)
class _ShapePosterior:
    """The posterior given each shape: [K] each."""

    asymptote: np.ndarray
    initial: np.ndarray
    h00: np.ndarray  # of the matrix of (R0, A)
    h01: np.ndarray
    h11: np.ndarray
    squares: np.ndarray  # Q
    log_weight: np.ndarray


def draw_curves(
    points: Points, axes: Sequence[Axis], rise: Rise, *, count: int, seed: int, asymptote: float | None = None
) -> DrawnCurves:
    """Draws `count` curves. asymptote: A if the law fixes it. Raises ValueError if the noise cannot be estimated."""
    posterior = _Posterior(points, axes, rise, asymptote)
    rng = np.random.default_rng(seed)
    lows, highs = (np.array([getattr(axis, end) for axis in axes]) for end in ("low", "high"))
    counts = np.array([axis.cells for axis in axes])
    for _ in range(_REFINEMENTS):
        width = (highs - lows) / counts
        middles = [low + step * (np.arange(n) + 0.5) for low, step, n in zip(lows, width, counts)]
        cells = np.stack([grid.ravel() for grid in np.meshgrid(*middles, indexing="ij")], axis=-1)
        log_weight = posterior.given(cells).log_weight
        kept = cells[log_weight > log_weight.max() - _KEPT]
        lows, highs = np.maximum(kept.min(axis=0) - width, lows), np.minimum(kept.max(axis=0) + width, highs)
    share = np.exp(log_weight - log_weight.max())
    chosen = _stratified(share, _OVERSAMPLED * count, rng)
    shapes = cells[chosen] + width * rng.uniform(-0.5, 0.5, (len(chosen), len(axes)))
    weight = posterior.given(shapes).log_weight - log_weight[chosen]
    shapes = shapes[_stratified(np.exp(weight - weight.max()), count, rng)]
    return posterior.rest(rng.permutation(shapes), rng)


def _stratified(weight: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` indices drawn by weight, evenly spread."""
    cumulative = np.cumsum(weight)
    places = (np.arange(count) + rng.uniform(size=count)) / count * cumulative[-1]
    return np.minimum(np.searchsorted(cumulative, places), len(weight) - 1)


class _Posterior:
    def __init__(self, points: Points, axes: Sequence[Axis], rise: Rise, asymptote: float | None):
        self._axes, self._rise, self._fixed = axes, rise, asymptote
        self._log_compute, self._reward = np.log(points.compute), points.reward
        self._weight = 1 / points.variance
        variance = points.initial_variance
        if np.isinf(variance):
            variance = _INITIAL_SPREAD**2
        self._initial = points.initial
        self._known = 1 / variance if variance > 0 else _EXACT * float(self._weight.sum())
        self._heard = points.belief + points.inner_squares
        # R0's own evaluation is a point; R0 and, if free, A are parameters.
        self._degrees = points.belief + len(points.compute) + 1 - (1 if asymptote is not None else 2)
        if self._degrees <= 0:
            raise ValueError(
                f"{len(points.compute)} points leave nothing to tell the noise by; one more, or counts, would"
            )
        self._least = LEAST_VARIANCE / float(np.median(points.variance))

    def given(self, shapes: np.ndarray) -> _ShapePosterior:
        """shapes [K, P]."""
        batch = max(1, _BATCH // max(1, len(self._log_compute)))
        parts = [self._some(shapes[at : at + batch]) for at in range(0, len(shapes), batch)]
        return _ShapePosterior(
            *[np.concatenate([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(_ShapePosterior)]
        )

    def _some(self, shapes: np.ndarray) -> _ShapePosterior:
        s = self._rise(shapes, self._log_compute)
        u, w, y, known = 1 - s, self._weight, self._reward, self._known
        h00, h01, h11 = (u * u) @ w + known, (u * s) @ w, (s * s) @ w
        b0, b1 = u @ (w * y) + known * self._initial, s @ (w * y)
        if self._fixed is None:
            h11 = np.maximum(h11, 1e-30)
            determinant = np.maximum(h00 * h11 - h01 * h01, 1e-12 * h00 * h11)
            asymptote = (h00 * b1 - h01 * b0) / determinant
            initial = (b0 - h01 * asymptote) / h00
        else:
            asymptote, determinant = np.full(len(shapes), self._fixed), h00
            initial = (b0 - h01 * asymptote) / h00
        residual = y - initial[:, None] * u - asymptote[:, None] * s
        squares = (residual**2) @ w + known * (initial - self._initial) ** 2
        log_weight = -0.5 * np.log(determinant) - 0.5 * self._degrees * np.log(self._heard + squares + 1e-300)
        if self._fixed is None:
            spread = np.sqrt(self._dispersion(squares) * h00 / determinant)
            log_weight += _log_share(asymptote, spread)
        log_weight = np.where(s.max(axis=1) < _UNSEEN, -np.inf, log_weight)
        for axis, value in zip(self._axes, shapes.T):
            log_weight -= 0.5 * ((value - axis.mean) / axis.deviation) ** 2
        return _ShapePosterior(asymptote, initial, h00, h01, h11, squares, log_weight)

    def _dispersion(self, squares: np.ndarray) -> np.ndarray:
        return np.maximum((self._heard + squares) / self._degrees, self._least)

    def rest(self, shapes: np.ndarray, rng: np.random.Generator) -> DrawnCurves:
        given, count = self.given(shapes), len(shapes)
        phi = (self._heard + given.squares) / rng.chisquare(self._degrees, count)
        phi = np.maximum(phi, self._least)
        asymptote = given.asymptote
        if self._fixed is None:
            determinant = np.maximum(given.h00 * given.h11 - given.h01**2, 1e-12 * given.h00 * given.h11)
            spread = np.sqrt(phi * given.h00 / determinant)
            below, above = ndtr((0 - asymptote) / spread), ndtr((1 - asymptote) / spread)
            place = below + rng.uniform(size=count) * (above - below)
            asymptote = np.clip(asymptote + spread * ndtri(np.clip(place, 1e-300, 1 - 1e-16)), 0.0, 1.0)
        initial = given.initial - given.h01 / given.h00 * (asymptote - given.asymptote)
        initial = initial + np.sqrt(phi / given.h00) * rng.standard_normal(count)
        return DrawnCurves(asymptote, np.clip(initial, 0.0, 1.0), shapes, phi, self._rise)


def _log_share(mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Logarithm of the share of a normal that lies in [0, 1]."""
    high, low = (1 - mean) / spread, -mean / spread
    flip = low > 0  # the same share, computed in the tail where differences are accurate
    high, low = np.where(flip, -low, high), np.where(flip, -high, low)
    return log_ndtr(high) + np.log1p(-np.minimum(np.exp(log_ndtr(low) - log_ndtr(high)), 1 - 1e-15))

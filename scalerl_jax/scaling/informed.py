"""Richards' curve where complete runs say which shapes to expect: an informative prior, beside the weak one.

    p(ln B, ln nu, A) = 1/2 weak (laws.py)  +  1/2 mean over the shapes (ln B_k, ln nu_k, A_k) of complete runs of
                        [ ln B = ln B_k, ln nu = ln nu_k, A normal around A_k with DEVIATION, within [0, 1] ]

ln C_mid has the same uniform prior in both halves: other runs tell how a run bends and where it ends, not how fast it
goes. The marginal likelihood of the points under each half decides which one the curves are drawn from. A run that
bends as others did is foretold as sharply as they permit; of one that does not the weak half is left, as in richards.

The shapes are draws from what the evaluations of each complete run leave possible of Richards' curve (calibrate.py).
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import expit

from scalerl_jax.scaling.curve_draws import Axis, Cells, DrawnCurves, Expected, Posterior, Rise, together
from scalerl_jax.scaling.points import Points
from scalerl_jax.scaling.shape import Shape

DEVIATION = 0.02  # of A, where the dispersion is 1: what seeds make of it (identify.py)
_LEVELS = (48, 24, 24, 24)  # places along ln C_mid; each level beyond the first lies around the best of the one before
_AROUND = 2.0  # cells of the level before, to either side


def draw(
    points: Points, axes: Sequence[Axis], rise: Rise, shapes: Sequence[Shape], *, count: int, seed: int
) -> DrawnCurves:
    """`count` curves. axes: of ln B, ln C_mid, ln nu. Raises ValueError where nothing tells the noise."""
    posterior = Posterior(points, axes, rise)
    rng = np.random.default_rng(seed)
    weak = posterior.grid()
    if not shapes:
        return posterior.draw(weak, count, rng)
    informed = _cells(posterior, axes[1], np.asarray(shapes, np.float64))
    many = round(count * float(expit(informed.log_evidence - weak.log_evidence)))
    parts = [posterior.draw(cells, n, rng) for cells, n in ((informed, many), (weak, count - many)) if n]
    return together(parts, rng.permutation(count))


def _cells(posterior: Posterior, midpoint: Axis, shapes: np.ndarray) -> Cells:
    """Of shapes [K, 3], each with ln C_mid from coarse to fine around its best place."""
    many = len(shapes)
    low, high = np.full(many, midpoint.low), np.full(many, midpoint.high)
    places = np.empty((many, 0))
    for count in _LEVELS:
        step = (high - low) / count
        new = low[:, None] + step[:, None] * (np.arange(count) + 0.5)
        places = np.concatenate([places, new], axis=1)
        likely = posterior.log_weight(*_at(shapes, new)).reshape(new.shape).argmax(axis=1)
        best = new[np.arange(many), likely]
        low, high = np.maximum(best - _AROUND * step, midpoint.low), np.minimum(best + _AROUND * step, midpoint.high)
    places = np.sort(places, axis=1)
    ends = np.pad((places[:, 1:] + places[:, :-1]) / 2, ((0, 0), (1, 1)), constant_values=(midpoint.low, midpoint.high))
    cells, expected = _at(shapes, (ends[:, 1:] + ends[:, :-1]) / 2)
    width = np.zeros_like(cells)
    width[:, 1] = np.diff(ends).ravel()
    return Cells(cells, width, posterior.log_weight(cells, expected) - np.log(many), expected)


def _at(shapes: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, Expected]:
    """Each of shapes [K, 3] with each of its ln C_mid [K, M]."""
    exponent, skew, asymptote = np.repeat(shapes, places.shape[1], axis=0).T
    return np.stack([np.log(exponent), places.ravel(), np.log(skew)], axis=-1), Expected(asymptote, DEVIATION)

"""Tests whether the best law (family.py) describes the points; if none does, an interval of A has no meaning.

    runs   the residuals' signs change too seldom (Wald and Wolfowitz 1940; 1 %)
    end    the mean of the last fifth of the points, at least three, is more than 3 standard errors off the curve

A fit follows its points, so its residuals change their signs more often, and end nearer to 0, than those of the true
curve: if the law holds, both tests fail less often than their nominal levels. The noise is that of the counts; without
counts, half the mean square of the difference of neighbouring residuals, which a slow drift hardly changes.

Near 0 and 1 the counts of one evaluation understate the noise (all have passed), so the noise implied by the curve is
used if it is larger; and a score that can only be on one side of the curve has no sign.
"""

import numpy as np
import scipy.special

from scalerl_jax.scaling.points import Points

FEWEST = 8  # points; with fewer there is no test
_ALPHA = 0.01
_SURE = 3.0
_END = 5  # one point in so many belongs to the end
_FEW = 5.0  # expected completions of the rarer outcome below which the counts understate the noise


def find_misfit(points: Points, curve: np.ndarray) -> str:
    """Why no law describes the points, or "" without evidence. curve: [N] of the best law, at the points."""
    if len(points.compute) < FEWEST:
        return ""
    order = np.argsort(points.compute, kind="stable")
    curve = curve[order]
    residual = points.reward[order] - curve
    margin = np.minimum(curve, 1 - curve)  # distance to the nearer of 0 and 1
    if points.counts is not None:
        total = points.counts.total[order]
        expected = np.where(total * margin < _FEW, curve * (1 - curve) / total, 0.0)
        variance = np.maximum(points.variance[order], expected)
    else:
        variance = np.full(len(residual), np.mean(np.diff(residual) ** 2) / 2)
    if not np.all(variance > 0):
        return ""
    last = max(3, len(residual) // _END)
    end = float(residual[-last:].mean() / np.sqrt(np.sum(variance[-last:])) * last)
    if abs(end) > _SURE:
        side = "above" if end > 0 else "below"
        return f"the last {last} points lie {abs(end):.1f} standard errors {side} the curve"
    above = residual[margin >= np.sqrt(variance)] > 0
    changes = int(np.sum(above[1:] != above[:-1])) + 1
    if len(above) >= FEWEST and runs_probability(int(above.sum()), int((~above).sum()), changes) < _ALPHA:
        return f"its points lie on one side of the curve for long stretches ({changes} of them, in {len(above)} points)"
    return ""


def runs_probability(above: int, below: int, runs: int) -> float:
    """The probability of at most `runs` runs of equal sign in a random order of so many signs."""
    if above == 0 or below == 0:
        return 1.0 if above + below < FEWEST else 2.0 ** (1 - above - below)
    half = np.arange(1, runs // 2 + 1)  # runs of the sign that comes first, at an even and an odd number of them
    even = np.log(2.0) + _ways(above, half) + _ways(below, half)
    half = np.arange(1, (runs - 1) // 2 + 1)
    odd = np.logaddexp(_ways(above, half + 1) + _ways(below, half), _ways(above, half) + _ways(below, half + 1))
    return float(
        min(1.0, np.exp(scipy.special.logsumexp(np.concatenate([even, odd])) - _ways(above + below + 1, above + 1)))
    )


def _ways(signs: int, runs: np.ndarray | int) -> np.ndarray:
    """The logarithm of C(signs - 1, runs - 1), the ways to split equal signs into so many runs; -inf for none."""
    runs = np.asarray(runs)
    fits = runs <= signs
    runs = np.where(fits, runs, 1)
    return np.where(fits, -scipy.special.betaln(signs - runs + 1, runs) - np.log(signs), -np.inf)

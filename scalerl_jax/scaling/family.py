"""A's interval over a whole family of laws that contains the sigmoid, since the true shape is not known beforehand.

    R(C) = R0 + (A - R0) s(C),   s(C) = (1 - (1 + c (C / C_mid)^B)^-q)^p        c such that s(C_mid) = 1 / 2

It starts like C^(B p) and ends like C^-(B q): the exponentiated law of Burr 1942 (Mudholkar and Srivastava 1993 give
its limit of large q). It contains, or approximates:

    p = q = 1   the sigmoid                          q = 1       richards with nu = 1 / p (law.py), Dagum
    p = 1       Burr XII: at B = 1 power laws        q large     stretched exponentials, at B = 1 the exponential
    q = 1, p large   Gompertz in ln C                p small, q large   a power of C that stops at once

A's interval is profile likelihood as in profile.py, with p and q free besides B, C_mid and R0:

    { A : min over p, q, B, C_mid, R0 of Q - min Q  <=  phi F(level; 1, nu_0 + degrees of freedom) }

so it contains every A at which one of these laws fits as well. One search cannot cover the whole family, so searches
(Levenberg-Marquardt) start from the best curve of each of twelve shapes in parallel, and the interval extends from the
lowest end that any of them finds to the highest.

If not even the best law describes the points, an interval of A has no meaning. Two tests find that out:

    runs   the residuals' signs change too seldom (Wald and Wolfowitz 1940; 1 %)
    end    the mean of the last fifth of the points, at least three, is more than 3 standard errors off the curve

A fit follows its points, so its residuals change their signs more often, and end nearer to 0, than those of the true
curve: if the law holds, both tests fail less often than their nominal levels. The noise is that of the counts; without
counts, half the mean square of the difference of neighbouring residuals, which a slow drift hardly changes.

Near 0 and 1 the counts of one evaluation understate the noise (all have passed), so the noise implied by the curve is
used if it is larger; and a score that can only be on one side of the curve has no sign.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.special

from scalerl_jax.scaling.points import Points
from scalerl_jax.scaling.profile import LOG_COMPUTE_RANGE, LOG_EXPONENT_RANGE, FitState, threshold

_MORE = 2  # more parameters than the sigmoid
_LOG_P = (-4.0, 2.0)
_LOG_Q = (-1.5, 3.0)
SHAPE_RANGE = np.array([np.ptp(_LOG_P), np.ptp(_LOG_Q)]) / 2  # of ln p and ln q, in each direction
_STARTS = np.array([(p, q) for p in (-1.5, -0.7, 0.0, 1.0) for q in (-1.0, 0.0, 1.5)])  # of ln p, ln q
_STEPS, _STEPS_ON = 40, 12  # of a search, and of one that continues from the previous value of A
_WALK = 10  # values of A on the way to an end
_NEAR = 0.9  # share of the threshold: searches that end higher are not continued
_FINE = 2e-5  # resolution of A
_ENOUGH = 1e-4  # a search ends if a step lowers Q by a smaller share of it and of the square of one residual
_TINY = 1e-9
_DIFFERENCE = 1e-5
_ASYMPTOTE, _INITIAL, _EXPONENT, _MIDPOINT, _P, _Q = range(6)  # A, R0, ln B, ln C_mid, ln p, ln q
# Of the tests of the best law:
_FEWEST = 8  # points; with fewer there is no test
_ALPHA = 0.01  # level of the test of the signs
_SURE = 3.0  # standard errors of the end
_END = 5  # one point in so many belongs to the end
_FEW = 5.0  # expected completions of the rarer outcome below which the counts understate the noise


def _log_c(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    a = -np.log1p(-np.exp2(-np.exp(-log_p))) * np.exp(-log_q)
    return a + np.log(-np.expm1(-a))


def gain(shape: np.ndarray, log_compute: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """s [K, N] of shapes [K, 4] (ln B, ln C_mid, ln p, ln q), and its derivatives by these [K, 4, N]."""
    log_p, log_q = shape[:, 2], shape[:, 3]
    b, middle, p, q = (column[:, None] for column in (np.exp(shape[:, 0]), shape[:, 1], np.exp(log_p), np.exp(log_q)))
    h = _DIFFERENCE * np.array([[0.0], [1.0], [-1.0], [0.0], [0.0]])
    log_c, *near = _log_c(log_p + h, log_q + np.roll(h, 2))
    by_p, by_q = ((near[at] - near[at + 1]) / (2 * _DIFFERENCE) for at in (0, 2))
    away = log_compute - middle
    z = np.clip(b * away + log_c[:, None], -500.0, 500.0)
    log_one = np.logaddexp(0.0, z)
    left = np.exp(-q * log_one)
    come = np.maximum(-np.expm1(-q * log_one), 1e-300)
    s = np.exp(p * np.log(come))
    by_left = p * q * s / come * left
    by_z = by_left * np.exp(z - log_one)
    of_p = p * s * np.log(come) + by_z * by_p[:, None]
    return s, np.stack([by_z * b * away, -by_z * b, of_p, by_left * log_one + by_z * by_q[:, None]], axis=1)


@dataclasses.dataclass(frozen=True)
class Family:
    """K curves, the best of some shapes and of the searches from them. A curve is A, R0, ln B, ln C_mid, ln p, ln q."""

    points: Points
    curves: np.ndarray  # [K, 6]
    cost: np.ndarray  # [K] Q
    degrees: float  # of freedom, the counts' included
    dispersion: float

    @property
    def best(self) -> np.ndarray:
        return self.curves[np.argmin(self.cost)]

    @property
    def asymptote(self) -> float:
        """A of the best curve."""
        return float(self.best[_ASYMPTOTE])

    def predict(self, compute: np.ndarray) -> np.ndarray:
        """The best curve at compute [M] above 0."""
        s, _ = gain(self.best[None, _EXPONENT:], np.log(compute))
        return self.best[_INITIAL] + (self.best[_ASYMPTOTE] - self.best[_INITIAL]) * s[0]

    def interval(self, level: float) -> tuple[float, float]:
        """The interval of A."""
        highest = self.cost.min() + threshold(level, self.dispersion, self.degrees)
        near = self.cost <= self.cost.min() + _NEAR * (highest - self.cost.min())
        curves, cost = np.tile(self.curves[near], (2, 1)), np.tile(self.cost[near], 2)
        down = np.arange(len(cost)) < len(cost) // 2
        side, start = np.where(down, -1.0, 1.0), curves[:, _ASYMPTOTE].copy()
        limit = np.where(down, start, 1 - start)
        search, root = _Search(self.points, self.dispersion), np.sqrt(highest - cost)
        # From the start outwards: sqrt(Q - minimum) is nearly linear in A. The first step ignores that the other
        # parameters adapt, so it falls short of the end.
        _, _, curvature = search.squares(curves)
        away = np.minimum(root / np.sqrt(np.maximum(curvature[:, 0, 0], 1e-300)), limit)
        inside, outside = np.zeros(len(away)), np.full(len(away), np.inf)
        for _ in range(_WALK):
            ends = side * start + inside
            furthest = np.where(down, ends[down].max(), ends[~down].max())
            gap = np.minimum(outside, limit) - inside
            # Searches that may still get further than all others.
            (on,) = np.nonzero((ends + gap > furthest + _FINE) & (gap > _FINE + 0.02 * inside))
            if not len(on):
                break
            tried = curves[on]
            tried[:, _ASYMPTOTE] = start[on] + (side * away)[on]
            found, risen = search.lowest(tried, held=[_ASYMPTOTE], steps=_STEPS_ON)
            risen = np.sqrt(np.maximum(risen - cost[on], 0.0))
            holds = risen <= root[on]
            inside[on[holds]], curves[on[holds]] = away[on[holds]], found[holds]
            outside[on[~holds]] = away[on[~holds]]
            guess = 1.02 * away[on] * np.clip(root[on] / np.maximum(risen, 1e-300), 0.3, 4.0)
            least, most = inside[on], outside[on]
            known = np.isfinite(most)
            gap = np.where(known, most, 0.0) - least
            bad = (guess < least + 0.1 * gap) | (guess > least + 0.9 * gap)
            away[on] = np.where(known, np.where(bad, least + 0.5 * gap, guess), np.minimum(guess, limit[on]))
        ends = start + side * inside
        return float(ends.min()), float(ends.max())


def find_family(state: FitState) -> Family:
    """The best-fitting curves of the family, starting from the best sigmoid."""
    points, sigmoid = state.points, state.found.best
    search = _Search(points, state.dispersion)
    curves = np.empty((len(_STARTS), 6))
    curves[:, :_P] = (sigmoid.asymptote, sigmoid.initial_reward, *sigmoid.shape)
    curves[:, _P:] = _STARTS
    # As steep at the midpoint as the sigmoid, whose slope by ln C_mid is B / 4 there.
    _, slope = gain(np.concatenate([np.zeros((len(_STARTS), 2)), _STARTS], axis=1), np.zeros(1))
    curves[:, _EXPONENT] += np.log(0.25 / -slope[:, 1, 0])
    of_shapes, their_cost = search.lowest(np.clip(curves, search.low, search.high), held=[_P, _Q], steps=_STEPS)
    curves, cost = search.lowest(of_shapes, held=[], steps=_STEPS)
    curves, cost = np.concatenate([curves, of_shapes]), np.concatenate([cost, their_cost])
    degrees, dispersion = state.degrees - _MORE, state.dispersion
    if degrees > 0:
        dispersion = (points.belief + float(cost.min()) + points.inner_squares) / degrees
    else:  # so many parameters leave no residuals: the noise is estimated from the sigmoid's
        degrees = state.degrees
    return Family(points, curves, cost, degrees, dispersion)


def find_misfit(points: Points, curve: np.ndarray) -> str:
    """Why no law describes the points, or "" without evidence. curve: [N] of the best law, at the points."""
    if len(points.compute) < _FEWEST:
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
    if len(above) >= _FEWEST and runs_probability(int(above.sum()), int((~above).sum()), changes) < _ALPHA:
        return f"its points lie on one side of the curve for long stretches ({changes} of them, in {len(above)} points)"
    return ""


def runs_probability(above: int, below: int, runs: int) -> float:
    """The probability of at most `runs` runs of equal sign in a random order of so many signs."""
    if above == 0 or below == 0:
        return 1.0 if above + below < _FEWEST else 2.0 ** (1 - above - below)
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


class _Search:
    """Computes and minimises Q for many curves at once."""

    def __init__(self, points: Points, dispersion: float):
        self._enough = _ENOUGH * dispersion if np.isfinite(dispersion) else 0.0
        self._log_compute, self._reward = np.log(points.compute), points.reward
        self._weight = points.variance**-0.5
        self._exact = points.initial_variance == 0
        self._initial, self._known = points.initial, 0.0 if self._exact else points.initial_variance**-0.5
        beyond = self._log_compute.min() - LOG_COMPUTE_RANGE, self._log_compute.max() + LOG_COMPUTE_RANGE
        ranges = ((0.0, 1.0), (0.0, 1.0), LOG_EXPONENT_RANGE, beyond, _LOG_P, _LOG_Q)
        self.low, self.high = (np.array(ends) for ends in zip(*ranges))

    def squares(self, curves: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Q [K] of curves [K, 6], half its gradient [K, 6], and the matrix of Gauss and Newton [K, 6, 6]."""
        s, slopes = gain(curves[:, _EXPONENT:], self._log_compute)
        initial = curves[:, _INITIAL, None]
        rise = curves[:, _ASYMPTOTE, None] - initial
        jacobian = np.zeros((*curves.shape, len(self._reward) + 1))
        jacobian[:, _ASYMPTOTE, :-1], jacobian[:, _INITIAL, :-1] = self._weight * s, self._weight * (1 - s)
        jacobian[:, _INITIAL, -1] = self._known
        jacobian[:, _EXPONENT:, :-1] = (self._weight * rise)[:, None] * slopes
        of_points = self._weight * (initial + rise * s - self._reward)
        residual = np.concatenate([of_points, self._known * (initial - self._initial)], axis=1)
        return (
            np.sum(residual**2, axis=1),
            (jacobian @ residual[..., None])[..., 0],
            jacobian @ jacobian.transpose(0, 2, 1),
        )

    def lowest(self, curves: np.ndarray, *, held: Sequence[int], steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Minimises Q from each of curves [K, 6]: (curves, Q [K]). held: parameters that stay fixed."""
        curves = curves.copy()
        cost, slope, curvature = self.squares(curves)
        damping, active, each = np.full(len(curves), 1e-2), np.arange(len(curves)), np.arange(6)
        for _ in range(steps):
            here, down = curves[active], slope[active]
            still = ((here <= self.low) & (down > 0)) | ((here >= self.high) & (down < 0))
            still[:, held] = True
            still[:, _INITIAL] |= self._exact
            down = np.where(still, 0.0, down)
            matrix = np.where(still[:, :, None] | still[:, None, :], 0.0, curvature[active])
            scale = np.sqrt(matrix[:, each, each])  # so that the damping does not depend on units
            scale = np.where(scale > 0, scale, 1.0)
            matrix /= scale[:, :, None] * scale[:, None, :]
            matrix[:, each, each] += damping[active, None] + _TINY
            move = np.clip(-np.linalg.solve(matrix, (down / scale)[..., None])[..., 0] / scale, -1.0, 1.0)
            tried = np.clip(here + move, self.low, self.high)
            cost_there, *rest = self.squares(tried)
            better = cost_there < cost[active]
            done = better & (cost[active] - cost_there <= self._enough + _ENOUGH * cost[active]) & (damping[active] < 1)
            moved = active[better]
            curves[moved], cost[moved] = tried[better], cost_there[better]
            slope[moved], curvature[moved] = (new[better] for new in rest)
            damping[active] *= np.where(better, 0.2, 5.0)
            active = active[~done & (damping[active] < 1e6)]
            if not len(active):
                break
        return curves, cost

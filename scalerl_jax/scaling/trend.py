"""Tests whether a run rises at all, before a rising law is fitted.

    flat       the law explains no more than a constant (F test at 1 %), a line in ln C has no slope (t test at 1 %),
               and neither that line nor the order of the points (Kendall's tau) hints at a rise (10 %)
    falling    the trend is a fall: the fitted A lies below R0, or the last points lie far below the best before
    rising     everything else

A few rising points seldom prove a rise at 1 %. A curve wrongly called flat is lost, whereas one wrongly drawn still
reports that its A is not identified. Without degrees of freedom nothing is tested, and only points that are all equal
are flat.
"""

import numpy as np
import scipy.special

from scalerl_jax.scaling.points import PARAMETERS, Points
from scalerl_jax.scaling.profile import FitState

RISING, FLAT, FALLING = "rising", "flat", "falling"
_ALPHA = 0.01  # level of a reported fact
_HINT = 0.1  # level of a hint, which is enough not to call points flat
_GROUPS = 5  # groups of neighbours in compute, compared by their means
_SURE = 4.0  # standard errors that a fall from the best group to the last must exceed
_FALL = 0.5  # share of the gain so far; a smaller fall is a bump


def find_trend(state: FitState) -> str:
    """One of RISING, FLAT, FALLING."""
    points, best = state.points, state.found.best
    rise = float(best.asymptote - best.initial_reward)
    if np.ptp(points.reward) == 0 and (points.initial_mode == "free" or points.initial == points.reward[0]):
        return FLAT
    if has_fallen(points):
        return FALLING
    slope, probability = _line(points)
    if state.degrees > 0 and not _explains(state) and probability > _ALPHA:
        hint = (slope > 0 and probability <= _HINT) or _order_rises(points)
        return RISING if hint and rise > 0 else FLAT
    return FALLING if rise < 0 else RISING


def sentence(trend: str, points: Points) -> str:
    """The command's text on points that do not rise."""
    if trend == FLAT:
        low, high = points.reward.min(), points.reward.max()
        mean = np.average(points.reward, weights=points.rows)
        return (
            f"flat: the reward stays near {mean:.3f} ({low:.3f} to {high:.3f}), no rise shows above its scatter: "
            "no sigmoid is fitted"
        )
    means = [mean for _, mean in _groups(points)]
    start = [points.initial] if points.initial_mode != "free" or points.initial_rows else []
    highest = max([*start, *means[:-1]])
    if means[-1] >= highest:
        return "the fitted curve does not rise above R0: no rising sigmoid fits"
    return f"the reward falls from {highest:.3f} to {means[-1]:.3f}: no rising sigmoid fits"


def _explains(state: FitState) -> bool:
    """F test of the law against a constant for all points (R0 included, if it was measured)."""
    data, cost = state.data, float(state.found.best.cost) + state.points.inner_squares
    real = data.weight > 0
    weight, reward = data.weight[real], data.reward[real]
    w0, y0 = float(data.initial_weight), float(data.initial)
    exact = np.isinf(w0)
    known = 0.0 if exact else w0
    level = y0 if exact else (np.sum(weight * reward) + known * y0) / (np.sum(weight) + known)
    one = float(np.sum(weight * (reward - level) ** 2) + known * (y0 - level) ** 2)
    gained = max(0.0, one - cost) / PARAMETERS
    return gained > state.dispersion * float(scipy.special.fdtri(PARAMETERS, state.degrees, 1 - _ALPHA))


def _line(points: Points) -> tuple[float, float]:
    """Slope in ln C and its p (t test): few points may rise clearly even if the law leaves no residuals for noise."""
    weight, x, y = points.trials_weight, np.log(points.compute), points.reward
    freedom = len(x) - 2
    x, y = x - np.average(x, weights=weight), y - np.average(y, weights=weight)
    squares = float(np.sum(weight * x * x))
    if freedom < 1 or squares == 0:
        return 0.0, 1.0
    slope = float(np.sum(weight * x * y)) / squares
    noise = float(np.sum(weight * (y - slope * x) ** 2)) / freedom / squares
    if noise == 0:
        return slope, 0.0 if slope else 1.0
    return slope, 2 * float(scipy.special.stdtr(freedom, -abs(slope) / noise**0.5))


def _order_rises(points: Points) -> bool:
    """Whether reward increases with compute by rank (Kendall's tau); R0 is the first point if it is known."""
    from scipy.stats import kendalltau  # over a second to import, and needed for few curves only

    x, y = points.compute, points.reward
    if points.initial_mode != "free" or points.initial_rows:
        x, y = np.concatenate([[0.0], x]), np.concatenate([[points.initial], y])
    found = kendalltau(x, y)
    return bool(found.statistic > 0 and found.pvalue <= _HINT)


def _groups(points: Points) -> list[tuple[int, float]]:
    """Groups of neighbours in compute: number of points, and mean reward."""
    order = np.argsort(points.compute, kind="stable")
    weight = points.trials_weight
    parts = [part for part in np.array_split(order, min(_GROUPS, len(order))) if part.size]
    return [(len(part), float(np.average(points.reward[part], weights=weight[part]))) for part in parts]


def has_fallen(points: Points) -> bool:
    """Whether the run rose and then lost more than half of the gain, beyond the scatter of neighbours."""
    if len(points.compute) < 2 * _GROUPS:
        return False
    sizes, means = zip(*_groups(points))
    best = int(np.argmax(means))
    drop = means[best] - means[-1]
    order = np.argsort(points.compute, kind="stable")
    scatter = float(np.mean(np.diff(points.reward[order]) ** 2)) / 2
    error = np.sqrt(scatter * (1 / sizes[best] + 1 / sizes[-1]))
    gain = means[best] - min(points.initial, means[0])
    return drop > _SURE * error and drop > _FALL * gain

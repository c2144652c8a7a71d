"""Whether the points identify A, and if not, what compute would.

They identify A if its 95 % interval over all laws that fit (family.py) is narrower than 0.04 and lies inside (R0, 1),
and the data reach 1.5 times the upper end of C_mid's interval: only then is the bend behind them, and an apparent
asymptote is a real one. An interval that ends at 1 is cut off there, and may be narrow for that reason only, unless the
curve is within 0.04 of 1 already: no score is above 1, and none falls. If no law describes the points (family.py) they
do not identify A, whatever its interval.

If they do not, the run is assumed to continue along its fitted curve, evaluated as often and as finely as so far. The
result is the first compute at which the same three conditions hold for the intervals expected there:

    half width = sqrt(threshold * (J^T W J)^-1)
    J: derivatives of the curve in (A, ln B, ln C_mid, ln p, ln q, R0) of family.py; W: 1 / variance

C_mid's interval is the sigmoid's, without p and q.

Profile intervals are wider than these, the more so the less the points determine; the current ratio of the widths is
assumed to stay.

Left out: the true curve may differ from the fitted one. The less the points determine, the less certain is this number.
"""

import numpy as np
import scipy.special

from scalerl_jax.scaling.family import SHAPE_RANGE, Family, gain
from scalerl_jax.scaling.profile import LEVEL
from scalerl_jax.scaling.units import short_number

SEED_MARGIN = 0.02  # difference in A of runs that differ only in the seed, as the paper found
IDENTIFIED_WIDTH = 0.04  # widest 95 % interval of A that still identifies A
IDENTIFIED_REACH = 1.5  # the data must reach this many times the upper end of C_mid's interval
_HORIZON = 100.0  # times the compute so far: limit of the search
_WIDER = (1.25, 3.0)  # lower bound, from simulated runs; upper bound, for open intervals
_STEPS = 400  # number of steps up to the limit


def is_identified(low, high, highest_midpoint, initial, most, reached):
    """The three conditions, elementwise: bool. low, high: A's 95 % interval; most: the compute reached; reached: the
    curve's value there."""
    closed = (high < 1) | (reached > 1 - IDENTIFIED_WIDTH)
    narrow = (np.minimum(high, 1) - low < IDENTIFIED_WIDTH) & (low > initial)
    return closed & narrow & (most >= IDENTIFIED_REACH * highest_midpoint)


def compute_to_identify(
    laws: Family, estimate: tuple[float, float, float, float], intervals: dict[str, tuple[float, float]]
) -> float:
    """The compute up to which evaluations of the same kind are expected to identify A; inf if above 100 times the
    compute so far.

    estimate: A, B, C_mid, R0; intervals: of A over all laws, of C_mid the profile's.
    """
    asymptote, exponent, midpoint, initial = estimate
    points = laws.points
    log_compute, weight = np.log(points.compute), 1 / points.variance
    if not 0 < exponent < np.inf or not np.isfinite(laws.dispersion) or asymptote <= initial:
        return np.inf
    shape = np.array([[np.log(exponent), np.log(midpoint), 0.0, 0.0]])
    exact = points.initial_variance == 0

    def information(at: np.ndarray) -> np.ndarray:
        """J^T J of one evaluation of weight 1 at each ln C [M]: [M, 6, 6] by A, ln B, ln C_mid, R0, ln p, ln q."""
        (s,), (slopes,) = gain(shape, at)
        by_shape = (asymptote - initial) * slopes
        by_initial = np.zeros(len(at)) if exact else 1 - s
        gradient = np.stack([s, *by_shape[:2], by_initial, *by_shape[2:]], axis=-1)
        return gradient[:, :, None] * gradient[:, None, :]

    so_far = np.sum(weight[:, None, None] * information(log_compute), axis=0)
    so_far[3, 3] += 1.0 if exact else 1 / points.initial_variance
    # Future evaluations: as dense along the compute as these, with their mean weight.
    places = np.unique(log_compute)
    most = np.exp(places[-1])
    spacing = (most - np.exp(places[0])) / (len(places) - 1)
    edges = np.geomspace(most, _HORIZON * most, _STEPS + 1)
    added = np.diff(edges) / spacing  # evaluations in each step, less than one at first
    each = weight.sum() / len(places)
    steps = each * added[:, None, None] * information(np.log((edges[:-1] + edges[1:]) / 2))
    total = so_far + np.cumsum(np.concatenate([np.zeros((1, *so_far.shape)), steps]), axis=0)
    come = np.concatenate([[0.0], np.cumsum(added)]) * len(log_compute) / len(places)
    rise = laws.dispersion * scipy.special.fdtri(1, laws.degrees + come, LEVEL)
    # The limited range of p and q adds information, as an evaluation of them would.
    ranged = total + rise[:, None, None] * np.diag([0.0, 0.0, 0.0, 0.0, *SHAPE_RANGE**-2])
    low, high = intervals["asymptote"]
    half_asymptote = _half_widths(ranged, rise, 0, (high - low) / 2)
    highest = np.log(intervals["midpoint"][1] / midpoint)
    with np.errstate(over="ignore"):
        highest = midpoint * np.exp(_half_widths(total[:, :4, :4], rise, 2, highest))
    reached = initial + (asymptote - initial) * scipy.special.expit(exponent * np.log(edges / midpoint))
    low, high = asymptote - half_asymptote, asymptote + half_asymptote
    identified = is_identified(low, high, highest, initial=initial, most=edges, reached=reached)
    identified[0] = False  # the current points have been judged by their own interval
    return float(edges[np.argmax(identified)]) if identified.any() else np.inf


def _half_widths(information: np.ndarray, rise: np.ndarray, which: int, now: float) -> np.ndarray:
    """Half widths [K] of the expected intervals of parameter `which`, for matrices [K, P, P] and thresholds [K]; the
    first is known to be `now`."""
    scale = np.sqrt(np.einsum("kii->ki", information))  # so that the inverse does not depend on units
    scale = np.where(scale > 0, scale, 1.0)
    scaled = information / (scale[:, :, None] * scale[:, None, :]) + 1e-13 * np.eye(information.shape[-1])
    variance = np.linalg.inv(scaled)[:, which, which] / scale[:, which] ** 2
    half = np.sqrt(np.maximum(rise * variance, 0.0))
    # 0 if all points lie exactly on the curve, inf if they contain no information: no factor is applied to these.
    return half * (np.clip(now / half[0], *_WIDER) if 0 < half[0] < np.inf else 1.0)


def sentence(identified: bool, interval: tuple[float, float], most: float, needed: float, misfit: str = "") -> str:
    """The verdict as the command prints it. interval: of A; most: the compute reached; needed: the compute that would
    identify A; misfit: why no law describes the points (family.py)."""
    low, high = interval
    ends = f"(these end at {_number(float(f'{most:.4g}'))})"
    if identified:
        return f"A is identified: {low:.3f} to {high:.3f} (95 %), and {SEED_MARGIN:g} either way between seeds"
    if misfit:
        return f"A is not identified: no law describes these points, {misfit} {ends}"
    digits = 2 if high - low >= 0.02 else 3
    verdict = f"A is not identified yet: {low:.{digits}f} to {high:.{digits}f} fit as well"
    if np.isfinite(needed):
        return (
            f"{verdict}; evaluations up to about {_round(needed, most)} would identify it, if the curve is as fitted "
            f"{ends}"
        )
    return f"{verdict}; if the curve is as fitted, {_HORIZON:g} times the compute would not identify it either {ends}"


def _round(value: float, most: float) -> str:
    """Rounds to two digits, since no more are known: 31840 -> 32000, 2.38e13 -> 24T; but keeps it above `most`."""
    rounded = next((near for digits in (2, 3, 4) if (near := float(f"{value:.{digits}g}")) > most), value)
    return _number(rounded)


def _number(value: float) -> str:
    return f"{value:.10g}" if 1 <= value < 1e7 else short_number(value)

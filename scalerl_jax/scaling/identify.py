"""Whether the points tell A, and if not, what compute would.

They tell it when A's 95 % interval is narrower than 0.04, closes inside (R0, 1), and the data reach 1.5 times the upper
end of C_mid's interval: only then is the bend behind them, and what looks like an asymptote is one. An interval that
ends at 1 is cut off there, and may be narrow for that alone, unless the curve has come within 0.04 of 1 already: no
score is above 1, and none falls. Where one sigmoid does not describe the points (misfit.py) they tell no A, whatever
its interval.

If they do not, the run is imagined to go on along its fitted curve, evaluated as often and as finely as so far, and the
first compute is named at which the same three conditions hold for the intervals to be expected there:

    half width = sqrt(threshold * (J^T W J)^-1)
    J: derivatives of the curve in (A, ln B, ln C_mid, R0); W: 1 / variance

Profile intervals are wider than these where the points leave much open. By how much they are now is carried on, fading
as most / compute.

Left out: that the curve may turn out to be another one. Where the points leave much open, so does this number.
"""

import numpy as np
import scipy.special

from scalerl_jax.scaling.profile import LEVEL, FitState
from scalerl_jax.scaling.units import short_number

SEED_MARGIN = 0.02  # A of runs that differ only in the seed, as the paper found
IDENTIFIED_WIDTH = 0.04  # widest 95 % interval of A that still tells A
IDENTIFIED_REACH = 1.5  # the data must reach this many times the upper end of C_mid's interval
_HORIZON = 100.0  # times the compute so far: further ahead nothing is named
_MOST_WIDER = 3.0  # an interval that is open says no more than that
_STEPS = 400  # on the way there


def is_identified(low, high, highest_midpoint, initial, most, reached):
    """The three conditions, elementwise: bool. low, high: of A's 95 % interval; most: the compute reached; reached: the
    curve there."""
    closed = (high < 1) | (reached > 1 - IDENTIFIED_WIDTH)
    narrow = (np.minimum(high, 1) - low < IDENTIFIED_WIDTH) & (low > initial)
    return closed & narrow & (most >= IDENTIFIED_REACH * highest_midpoint)


def compute_that_tells(
    state: FitState, estimate: tuple[float, float, float, float], intervals: dict[str, tuple[float, float]]
) -> float:
    """The compute up to which evaluations of the same kind are expected to tell A; inf if 100 times the compute is not.

    estimate: A, B, C_mid, R0; intervals: the profile's.
    """
    asymptote, exponent, midpoint, initial = estimate
    data, dispersion = state.data, state.dispersion
    real = data.weight > 0
    log_compute, weight = data.log_compute[real], data.weight[real]
    if not 0 < exponent < np.inf or not np.isfinite(dispersion) or asymptote <= initial:
        return np.inf
    exact = bool(np.isinf(data.initial_weight))

    def information(at: np.ndarray) -> np.ndarray:
        """J^T J of one evaluation of weight 1 at each ln C [M]: [M, 4, 4], or [M, 3, 3] where R0 is exact."""
        x = at - np.log(midpoint)
        rise = 1 / (1 + np.exp(-np.clip(exponent * x, -500, 500)))
        slope = (asymptote - initial) * exponent * rise * (1 - rise)
        gradient = np.stack([rise, slope * x, -slope, 1 - rise][: 3 if exact else 4], axis=-1)
        return gradient[:, :, None] * gradient[:, None, :]

    so_far = np.sum(weight[:, None, None] * information(log_compute), axis=0)
    if not exact:
        so_far[3, 3] += data.initial_weight
    # Evaluations to come: as dense along the compute as these are, and of their mean weight.
    places = np.unique(log_compute)
    most = np.exp(places[-1])
    spacing = (most - np.exp(places[0])) / (len(places) - 1)
    edges = np.geomspace(most, _HORIZON * most, _STEPS + 1)
    added = np.diff(edges) / spacing  # evaluations in each step, a fraction of one at first
    each = weight.sum() / len(places)
    steps = each * added[:, None, None] * information(np.log((edges[:-1] + edges[1:]) / 2))
    total = so_far + np.cumsum(np.concatenate([np.zeros((1, *so_far.shape)), steps]), axis=0)
    scale = np.sqrt(np.einsum("kii->ki", total))  # so that units do not matter to the inverse
    scale = np.where(scale > 0, scale, 1.0)
    scaled = total / (scale[:, :, None] * scale[:, None, :]) + 1e-13 * np.eye(total.shape[-1])
    come = np.concatenate([[0.0], np.cumsum(added)]) * len(log_compute) / len(places)
    rise = dispersion * scipy.special.fdtri(1, state.degrees + come, LEVEL)
    with np.errstate(over="ignore"):
        variance = np.einsum("kii->ki", np.linalg.inv(scaled)) / scale**2
        half = np.sqrt(np.maximum(rise[:, None] * variance, 0.0))
        low, high = intervals["asymptote"]
        now = np.array([(high - low) / 2, np.log(intervals["midpoint"][1] / midpoint)])
        expected = half[0, [0, 2]]
        # 0 is expected where points lie on the curve exactly, inf where they tell nothing: no factor makes them wider.
        some = (expected > 0) & np.isfinite(expected)
        wider = np.divide(now, expected, out=np.ones(2), where=some).clip(1.0, _MOST_WIDER)
        half_asymptote, half_midpoint = (half[:, [0, 2]] * (1 + (wider - 1) * most / edges[:, None])).T
        highest = midpoint * np.exp(half_midpoint)
    reached = initial + (asymptote - initial) * scipy.special.expit(exponent * np.log(edges / midpoint))
    low, high = asymptote - half_asymptote, asymptote + half_asymptote
    told = is_identified(low, high, highest, initial=initial, most=edges, reached=reached)
    told[0] = False  # it has been judged, by its own interval
    return float(edges[np.argmax(told)]) if told.any() else np.inf


def sentence(identified: bool, interval: tuple[float, float], most: float, needed: float, misfit: str = "") -> str:
    """The verdict as the command prints it. interval: of A; most: the compute reached; needed: what would tell;
    misfit: why no sigmoid does (misfit.py)."""
    low, high = interval
    ends = f"(these end at {_number(float(f'{most:.4g}'))})"
    if identified:
        return f"A is identified: {low:.3f} to {high:.3f} (95 %), and {SEED_MARGIN:g} either way between seeds"
    if misfit:
        return f"A is not identified: one sigmoid does not describe these points, {misfit} {ends}"
    digits = 2 if high - low >= 0.02 else 3
    verdict = f"A is not identified yet: {low:.{digits}f} to {high:.{digits}f} fit as well"
    if np.isfinite(needed):
        return (
            f"{verdict}; evaluations up to about {_round(needed, most)} would identify it, if the curve is as fitted "
            f"{ends}"
        )
    return f"{verdict}; if the curve is as fitted, {_HORIZON:g} times the compute would not identify it either {ends}"


def _round(value: float, most: float) -> str:
    """Two digits, no more is known: 31840 -> 32000, 2.38e13 -> 24T; but more than `most`, as the value is."""
    rounded = next((near for digits in (2, 3, 4) if (near := float(f"{value:.{digits}g}")) > most), value)
    return _number(rounded)


def _number(value: float) -> str:
    return f"{value:.10g}" if 1 <= value < 1e7 else short_number(value)

"""The gain of more compute for a run: compute to a target, score at a budget, gain of a doubling, stop or go on.

The numbers are the fitted curve's. Their intervals are the profile's (profile.py): over all curves within the
threshold, the lowest and highest score at a budget, the least and most compute at which one reaches the target, and
the least and most gain. For rising curves, the compute is where the two edges of the band cross the target.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.scaling import profile
from scalerl_jax.scaling.fit import SEED_MARGIN, SigmoidFit
from scalerl_jax.scaling.law import double_precision
from scalerl_jax.scaling.units import short_number

_HORIZON = 1e6  # times the compute so far: a target reached only beyond this counts as never reached
_DIGITS = 3  # of a printed score
_SEARCH = 128  # points of each of the two searches along the band


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number of the fitted curve, and its least and most over the curves that fit as well."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Intervals are 95 %. Compute is in the unit of the fit."""

    reached: float  # compute of the last point used
    score: Estimate  # of the curve there
    gain_of_a_doubling: Estimate  # gain from there to twice that compute
    target: float | None
    compute_to_target: Estimate | None  # infinite: never
    budget: float | None
    score_at_budget: Estimate | None  # score at the budget
    gain_to_budget: Estimate | None
    advice: str  # "stop" | "go on"
    reason: str


def forecast(
    fit: SigmoidFit,
    reached: float,
    *,
    target: float | None = None,
    budget: float | None = None,
    worth: float = SEED_MARGIN,
) -> Forecast:
    """reached: compute of the last point used; budget: of the whole run; worth: the least gain worth more compute.

    Raises ValueError where the budget is not beyond what was reached.
    """
    if budget is not None and budget <= reached:
        raise ValueError(f"budget={budget:g}: these points reach {reached:g} already")
    score = _score(fit, reached)
    doubling = gain(fit, reached, 2 * reached)
    to_target = None if target is None else compute_to_target(fit, target, reached)
    at_budget = None if budget is None else _score(fit, budget)
    gained = None if budget is None else gain(fit, reached, budget)
    if to_target is not None:
        assert target is not None
        advice, reason = _advise_target(fit, score, target, to_target, budget, at_budget)
    elif gained is not None:
        advice, reason = _advise_gain(fit, gained, worth, f"the rest of the budget ({_short(budget)})")
    else:
        advice, reason = _advise_gain(fit, doubling, worth, f"one more doubling (to {_short(2 * reached)})")
    return Forecast(reached, score, doubling, target, to_target, budget, at_budget, gained, advice, reason)


def _score(fit: SigmoidFit, compute: float) -> Estimate:
    low, high = fit.band(np.array([compute]))
    return Estimate(float(fit.predict(compute)), float(low[0]), float(high[0]))


def compute_to_target(fit: SigmoidFit, target: float, reached: float) -> Estimate:
    """Compute at which the curve, the highest and the lowest curve reach `target`; infinite beyond 1e6 x reached."""
    least = float(np.exp(fit.state.data.log_compute.min()))
    ends = []
    for edge in (0, 1):  # the lowest curves reach it last
        x = np.geomspace(least * 1e-3, reached * _HORIZON, _SEARCH)
        for _ in range(2):
            arrived = fit.band(x)[edge] >= target
            if not arrived.any():
                ends.append(math.inf)
                break
            first = int(np.argmax(arrived))
            if first == 0:  # at the start: R0 or the floor of the search
                ends.append(0.0)
                break
            x = np.geomspace(x[first - 1], x[first], _SEARCH)
        else:
            ends.append(float(x[int(np.argmax(fit.band(x)[edge] >= target))]))
    value = fit.compute_to_reach(target)
    return Estimate(value, min(ends[1], value), max(ends[0], value))


def gain(fit: SigmoidFit, start: float, end: float) -> Estimate:
    """R(end) - R(start)."""
    state = fit.state
    with double_precision():
        shapes = profile.band_shapes(state.found)
        low, high = _gain_range(
            np.log(start), np.log(end), shapes, state.data, state.constraint, state.found.best, state.rise(0.95)
        )
    value = float(fit.predict(end) - fit.predict(start))
    return Estimate(value, min(float(low), value), max(float(high), value))


@jax.jit
def _gain_range(log_start, log_end, shapes, data, constraint, best, rise):
    """Least and most (A - R0) (s(end) - s(start)) over the curves within the threshold, of shapes [K, 2].

    At a shape, Q is a quadratic of (R0, A) with matrix H, and the gain is linear in them: it can differ from its value
    at the shape's minimum by at most sqrt(remaining rise * c^T H^-1 c).
    """
    w, y = data.weight, data.reward
    exact = jnp.isinf(data.initial_weight)
    known = jnp.where(exact, 0.0, data.initial_weight)

    def of_shape(shape):
        exponent = jnp.exp(shape[0])
        step = jax.nn.sigmoid(exponent * (log_end - shape[1])) - jax.nn.sigmoid(exponent * (log_start - shape[1]))
        s = jax.nn.sigmoid(exponent * (data.log_compute - shape[1]))
        u = 1 - s
        uu, us, ss = jnp.sum(w * u * u) + known, jnp.sum(w * u * s), jnp.maximum(jnp.sum(w * s * s), 1e-300)
        uy, sy = jnp.sum(w * u * y) + known * data.initial, jnp.sum(w * s * y)
        determinant = jnp.maximum(uu * ss - us * us, 1e-13 * uu * ss)
        initial = jnp.where(exact, data.initial, (ss * uy - us * sy) / determinant)
        asymptote = (sy - initial * us) / ss
        r = y - initial * u - asymptote * s
        cost = jnp.sum(w * r * r) + known * (data.initial - initial) ** 2
        left = rise + best.cost - cost
        spread = jnp.where(exact, 1 / ss, (uu + 2 * us + ss) / determinant)  # c^T H^-1 c for c = (-1, 1)
        reach = jnp.sqrt(jnp.maximum(left, 0.0) * spread)
        # A stays in its range; R0 stays at its value for this shape.
        lowest, highest = constraint.low - initial, constraint.high - initial
        low = jnp.clip(asymptote - initial - reach, lowest, highest) * step
        high = jnp.clip(asymptote - initial + reach, lowest, highest) * step
        return jnp.where(left >= 0, low, jnp.inf), jnp.where(left >= 0, high, -jnp.inf)

    low, high = jax.vmap(of_shape)(shapes)
    return jnp.min(low), jnp.max(high)


def _advise_target(
    fit: SigmoidFit,
    score: Estimate,
    target: float,
    to_target: Estimate,
    budget: float | None,
    at_budget: Estimate | None,
) -> tuple[str, str]:
    highest = fit.intervals["asymptote"][1]
    when = f"{target:g} is reached at {_short(to_target.value)} ({_short(to_target.low)} to {_short(to_target.high)})"
    if round(score.low, _DIGITS) >= target:  # a curve approaches its end without reaching it
        return "stop", f"{target:g} is reached: the score is {_range(score)}"
    if highest < target:
        return "stop", f"never {target:g}, by this fit: A is at most {highest:.3f}"
    if at_budget is not None:
        assert budget is not None
        there = f"at {_short(budget)} the score is {_range(at_budget)}"
        if at_budget.high < target:
            return "stop", f"{target:g} is beyond the budget: {there}"
        if at_budget.low >= target:
            return "go on", f"{when}, within the budget: {there}"
        if at_budget.value >= target:
            return "go on", f"the curve reaches {target:g} within the budget, not every curve that fits does: {there}"
        if note := _identification_note(fit, budget):
            return "go on", f"these points do not decide: {there}; {note}"
        return "stop", f"the curve stays below {target:g} within the budget: {there}"
    if to_target.value < math.inf:
        return "go on", when
    if note := _identification_note(fit, math.inf):
        return "go on", f"the curve ends below {target:g}, but A up to {highest:.3f} fits as well; {note}"
    return "stop", f"the curve ends below {target:g}: A is {fit.asymptote:.3f}, at most {highest:.3f}"


def _advise_gain(fit: SigmoidFit, found: Estimate, worth: float, what: str) -> tuple[str, str]:
    text = f"{what} gains {found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    if found.high < worth:
        return "stop", f"{text}, less than the {worth:g} that count"
    if found.low >= worth:
        return "go on", text
    if found.value >= worth:
        return "go on", f"{text}: by the curve, not for certain, the {worth:g} that count"
    if note := _identification_note(fit, math.inf):
        return "go on", f"{text}, and these points do not decide whether that is the {worth:g} that count; {note}"
    return "stop", f"{text}: by the curve less than the {worth:g} that count"


def _identification_note(fit: SigmoidFit, most: float) -> str:
    """Text on the compute up to which evaluations would identify A; "" if they already do, or if it exceeds `most` or
    is not finite."""
    needed = fit.compute_to_identify
    if fit.identified or not math.isfinite(needed) or needed > most:
        return ""
    return f"evaluations up to {_short(needed)} would tell"


def _range(found: Estimate) -> str:
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def _short(value: float) -> str:
    return short_number(value) if math.isfinite(value) else "never"

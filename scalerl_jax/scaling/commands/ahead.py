"""What scalerl-fit says of the points held out, or of twice the compute: by all laws, with a calibration."""

from typing import Any

from scalerl_jax.scaling.average import average_forecast
from scalerl_jax.scaling.calibration import Calibration
from scalerl_jax.scaling.fit import Run
from scalerl_jax.scaling.forecast import Estimate
from scalerl_jax.scaling.half_time import HALF, judged
from scalerl_jax.scaling.statement import LEVEL, hours, statement
from scalerl_jax.scaling.units import short_number


def foretold(one: Run, calibration: Calibration, axis: str, *, half: bool) -> tuple[dict[str, Any], str]:
    """For fit.json, in the fit's units, and in words. half: the points are those up to half of the compute.

    Raises ValueError where the points tell nothing of their noise.
    """
    ahead = average_forecast(one.points, calibration)
    seen = HALF if half else f"at {short_number(one.reached)}"
    if not one.held.any():
        end = 2 * one.reached
        (low,), (high,) = ahead.band(end, level=LEVEL)
        score = Estimate(float(ahead.predict(end)[0]), float(low), float(high))
        found, said = {}, statement(seen, axis, score, "at twice the compute") + hours(end, one.rate)
    else:
        later = judged(one.compute, one.reward, one.fit, ahead, seen)
        end, score = float(one.compute.max()), later.score
        found = {"measured": later.measured, "held_out_within_90": later.within, "held_out_points": later.later}
        said = f"{later.statement(axis)}; {later.outcome}"
    interval = (score.low, score.high)
    document = {"compute": end, "score": score.value, "interval_90": interval, "weights": ahead.law_weights, **found}
    return document, said

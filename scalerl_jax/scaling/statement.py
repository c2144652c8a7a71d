"""What a forecast says, in the one form that console, curve.png, report and scalerl-fit share:

    forecast at half of the compute (model FLOPs): 0.931 at the end (90 %: 0.880 to 0.960); measured 0.927; 14 of 15
    later evaluations within

The interval is for an evaluation. The end of a run that goes on is its last update; that of one that is over is the
mean of its evaluations in the last quarter of the compute, which no single one moves much.
"""

import math

from scalerl_jax.scaling.fit import SigmoidFit
from scalerl_jax.scaling.forecast import Estimate
from scalerl_jax.scaling.units import short_number

LEVEL = 0.9
PERCENT = f"{100 * LEVEL:.0f} %"


def statement(seen: str, axis: str, score: Estimate, where: str = "at the end") -> str:
    """seen: up to where evaluations were known; axis: what the compute is; score: at LEVEL."""
    return f"forecast {seen} ({axis}): {score.value:.3f} {where} ({PERCENT}: {score.low:.3f} to {score.high:.3f})"


def outcome(measured: float, within: int, later: int, *, bins: bool = False) -> str:
    """What came of it. bins: `later` counts means of neighbours, of very many evaluations."""
    return f"measured {measured:.3f}; {within} of {later} {'bins of ' if bins else ''}later evaluations within"


def of_asymptote(fit: SigmoidFit, rate: float | None) -> str:
    """Whether the points tell A, and what compute would; rate: as of `hours`."""
    cost = "" if fit.identified else hours(fit.compute_to_identify, rate)
    return f"{fit.verdict}{cost}"


def hours(compute: float, rate: float | None) -> str:
    """Behind a place on the axis: what it costs. rate: device-hours of a unit of compute, over the whole run so far.
    "" where it or the compute is not known."""
    if rate is None or not math.isfinite(compute):
        return ""
    return f"; up to there about {short_number(float(f'{compute * rate:.2g}'))} device-hours at this run's rate"

"""A forecast in words, in the form used by console, curve.png, report and scalerl-fit:

    forecast at half of the compute (model FLOPs): 0.931 at the end (90 %: 0.880 to 0.960); measured 0.927; 14 of 15
    later evaluations within

The interval is for an evaluation. The end of a running run is its last update; that of a finished one is the mean of
its evaluations in the last quarter of the compute, which depends little on any single one.
"""

import math

from scalerl_jax.scaling.fit import SigmoidFit
from scalerl_jax.scaling.forecast import Estimate
from scalerl_jax.scaling.units import short_number

LEVEL = 0.9
PERCENT = f"{100 * LEVEL:.0f} %"


def statement(seen: str, axis: str, score: Estimate, where: str = "at the end") -> str:
    """The forecast. seen: text on the evaluations used; axis: name of the compute; score: at LEVEL."""
    return f"forecast {seen} ({axis}): {score.value:.3f} {where} ({PERCENT}: {score.low:.3f} to {score.high:.3f})"


def outcome(measured: float, within: int, later: int, *, bins: bool = False) -> str:
    """The outcome. bins: `later` counts means of neighbours, of very many evaluations."""
    return f"measured {measured:.3f}; {within} of {later} {'bins of ' if bins else ''}later evaluations within"


def of_asymptote(fit: SigmoidFit, rate: float | None) -> str:
    """Whether the points identify A, and what compute would; rate: as in `hours`."""
    cost = "" if fit.identified else hours(fit.compute_to_identify, rate)
    return f"{fit.verdict}{cost}"


def hours(compute: float, rate: float | None) -> str:
    """Suffix with the device-hours of a compute. rate: device-hours per unit of compute, over the whole run so far.
    "" if rate or compute is not known."""
    if rate is None or not math.isfinite(compute):
        return ""
    return f"; up to there about {short_number(float(f'{compute * rate:.2g}'))} device-hours at this run's rate"

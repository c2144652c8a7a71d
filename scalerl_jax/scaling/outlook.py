"""What the rest of a run will bring, by the averaged forecast: the score at its end, and when more stops paying.

stop    the most that the rest may gain (90 %) is less than what counts
go on   it may gain as much; and from some compute on, most likely, twice the compute gains less than what counts
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling.average import AverageForecast
from scalerl_jax.scaling.forecast import Estimate
from scalerl_jax.scaling.identify import SEED_MARGIN
from scalerl_jax.scaling.statement import LEVEL, hours, statement
from scalerl_jax.scaling.units import short_number

_FURTHER = 64.0  # times the compute so far: beyond nothing is said
_PLACES = 49


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Intervals at LEVEL. Compute is in the unit of the points."""

    end: float  # compute at the planned end
    score: Estimate  # of the evaluation there
    gain: Estimate  # of the policy from now to there
    pays_until: float  # compute from which on a doubling gains less than `worth` in the median; inf: not as far as said
    worth: float

    @property
    def goes_on(self) -> bool:
        return self.gain.high >= self.worth

    def sentence(self, seen: str, axis: str, *, place: str = "", rate: float | None = None) -> str:
        """seen, axis: as of `statement`; place: where more stops paying, in words; rate: as of `hours`."""
        said, gain = statement(seen, axis, self.score), self.gain
        rest = f"the rest gains {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
        if not self.goes_on:
            return f"{said}; {rest}, less than the {self.worth:g} that count: stop"
        if not np.isfinite(self.pays_until):
            return f"{said}; {rest}: go on"
        place = place or short_number(self.pays_until)
        after = f"from {place} on twice the compute gains less than {self.worth:g}, most likely"
        return f"{said}; {rest}: go on; {after}{hours(self.pays_until, rate)}"


def outlook(forecast: AverageForecast, end: float, *, worth: float = SEED_MARGIN) -> Outlook:
    """end: compute of the whole run, beyond what was reached."""
    tails = [50 - 50 * LEVEL, 50, 50 + 50 * LEVEL]
    now, then = forecast.ways([forecast.reached, end]).T
    low, middle, high = np.percentile(then - now, tails)
    at_end = np.percentile(forecast.evaluations([end])[:, 0], tails)
    places = np.geomspace(forecast.reached, _FURTHER * forecast.reached, _PLACES)
    per_doubling = (_PLACES - 1) // int(np.log2(_FURTHER))
    ways = forecast.ways(places)
    doubling = np.median(ways[:, per_doubling:] - ways[:, :-per_doubling], axis=0)
    idle = doubling < worth
    first = places[int(np.argmax(idle))] if idle.any() else np.inf
    return Outlook(
        end=end,
        score=Estimate(float(at_end[1]), float(at_end[0]), float(at_end[2])),
        gain=Estimate(float(middle), float(low), float(high)),
        pays_until=float(first),
        worth=worth,
    )

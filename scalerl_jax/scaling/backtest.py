"""Compares the forecast from the first half of a run, or from the fitted part, with the run's actual end.

Also the outlook for the rest of a run by the averaged forecast: the score at its end, and when more compute stops
paying.

stop    the most that the rest may gain (90 %) is less than SEED_MARGIN
go on   it may gain as much; beyond some compute, most likely, doubling the compute gains less than SEED_MARGIN

A forecast in words has the same form on the console, in curve.png, in the report and in scalerl-fit:

    forecast at half of the compute (model FLOPs): 0.931 at the end (90 %: 0.880 to 0.960); measured 0.927; 14 of 15
    later evaluations within

The interval is for an evaluation. The end of a running run is its last update; that of a finished one is the mean of
its evaluations in the last quarter of the compute, which depends little on any single one.
"""

import dataclasses
import math

import numpy as np

from scalerl_jax.scaling.average import AverageForecast, average_forecast, default_calibration
from scalerl_jax.scaling.fit import SigmoidFit, fit_sigmoid
from scalerl_jax.scaling.forecast import Estimate
from scalerl_jax.scaling.identify import SEED_MARGIN
from scalerl_jax.scaling.points import MOST_POINTS, make_bins
from scalerl_jax.scaling.units import short_number

LEVEL = 0.9  # of the intervals here
PERCENT = f"{100 * LEVEL:.0f} %"
LAST = 0.75  # share of the compute: later evaluations are the end
HALF = "at half of the compute"
_FURTHER = 64.0  # times the compute so far: limit of the outlook
_PLACES = 49


def statement(seen: str, axis: str, score: Estimate, where: str = "at the end") -> str:
    """The forecast. seen: text on the evaluations used; axis: name of the compute; score: at LEVEL."""
    return f"forecast {seen} ({axis}): {score.value:.3f} {where} ({PERCENT}: {score.low:.3f} to {score.high:.3f})"


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


@dataclasses.dataclass(frozen=True)
class Backtest:
    """A forecast compared with the outcome: N evaluations, some of them later than those used for the forecast."""

    compute: np.ndarray  # [N]
    reward: np.ndarray  # [N]
    fit: SigmoidFit  # of the evaluations used
    ahead: AverageForecast  # forecast of the later ones, by all laws
    score: Estimate  # forecast of an evaluation at the end, at LEVEL
    measured: float  # mean of the evaluations there
    within: int  # later evaluations within their bands
    later: int  # number of later evaluations
    bins: bool  # whether `later` counts means of neighbours, of very many evaluations
    seen: str  # text: up to where evaluations were used

    @property
    def error(self) -> float:
        """Forecast minus measured, in units of the score."""
        return self.score.value - self.measured

    @property
    def gain_ahead(self) -> float:
        """Share of the gain from R0 to the last evaluation that was still to come at half of the compute."""
        order = np.argsort(self.compute)
        # The score at half is interpolated between two evaluations, so that one noisy point weighs less.
        at_half = np.interp(self.compute.max() / 2, self.compute[order], self.reward[order])
        final = self.reward[order[-1]]
        gain = final - self.fit.initial_reward
        return float((final - at_half) / gain) if gain else 0.0

    def statement(self, axis: str) -> str:
        """The forecast in words, without the outcome."""
        return statement(self.seen, axis, self.score)

    @property
    def outcome(self) -> str:
        """What came of it, in words."""
        within = f"{self.within} of {self.later} {'bins of ' if self.bins else ''}later evaluations within"
        return f"measured {self.measured:.3f}; {within}"


def forecast_at_half(compute, reward, counts=None) -> Backtest:
    """The backtest of a run at half of its compute. compute [N] with a row at 0, reward [N] in [0, 1], counts as in
    fit_sigmoid.

    Raises ValueError where the run has too few evaluations: at least three of different compute up to the half, and one
    in the last quarter, are needed.
    """
    compute = np.asarray(compute, np.float64)
    reward = np.asarray(reward, np.float64)
    fit = fit_sigmoid(compute, reward, fit_until="half", counts=counts)
    return judged(compute, reward, fit, average_forecast(fit.state.points, default_calibration()), HALF)


def judged(compute: np.ndarray, reward: np.ndarray, fit: SigmoidFit, ahead: AverageForecast, seen: str) -> Backtest:
    """Compares a forecast with the outcome. compute, reward: [N], in any order; some are later than the fit's."""
    beyond = compute > ahead.reached
    order = np.argsort(compute[beyond], kind="stable")
    later, measured = compute[beyond][order], reward[beyond][order]
    rows = np.ones(len(later))
    if len(later) > MOST_POINTS:
        bins = make_bins(later, np.zeros(len(later), int))
        later, measured, rows = bins.sums(later) / bins.rows, bins.sums(measured) / bins.rows, bins.rows
    low, high = ahead.band(later, level=LEVEL, rows=rows)
    last = later > LAST * compute.max()
    at_end = (ahead.predict(later[last]), *ahead.band(later[last], level=LEVEL))
    return Backtest(
        compute=compute,
        reward=reward,
        fit=fit,
        ahead=ahead,
        score=Estimate(*(float(np.average(part, weights=rows[last])) for part in at_end)),
        measured=float(np.average(measured[last], weights=rows[last])),
        within=int(np.sum((low <= measured) & (measured <= high))),
        later=len(later),
        bins=len(later) < beyond.sum(),
        seen=seen,
    )


@dataclasses.dataclass(frozen=True)
class Outlook:
    """The outlook for the rest of a run. Intervals at LEVEL. Compute is in the unit of the points."""

    score: Estimate  # of the evaluation at the planned end
    gain: Estimate  # of the policy from now to there
    pays_until: float  # beyond this compute a doubling gains less than SEED_MARGIN in the median; inf: not found

    @property
    def goes_on(self) -> bool:
        return self.gain.high >= SEED_MARGIN

    def sentence(self, seen: str, axis: str, *, place: str = "", rate: float | None = None) -> str:
        """The outlook in words. seen, axis: as in `statement`; place: text for `pays_until`; rate: as in `hours`."""
        text, gain = statement(seen, axis, self.score), self.gain
        rest = f"the rest gains {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
        if not self.goes_on:
            return f"{text}; {rest}, less than the {SEED_MARGIN:g} that count: stop"
        if not np.isfinite(self.pays_until):
            return f"{text}; {rest}: go on"
        place = place or short_number(self.pays_until)
        after = f"from {place} on twice the compute gains less than {SEED_MARGIN:g}, most likely"
        return f"{text}; {rest}: go on; {after}{hours(self.pays_until, rate)}"


def outlook(forecast: AverageForecast, end: float) -> Outlook:
    """end: compute of the whole run, greater than what was reached."""
    tails = [50 - 50 * LEVEL, 50, 50 + 50 * LEVEL]
    now, then = forecast.ways([forecast.reached, end]).T
    low, middle, high = np.percentile(then - now, tails)
    at_end = np.percentile(forecast.evaluations([end])[:, 0], tails)
    places = np.geomspace(forecast.reached, _FURTHER * forecast.reached, _PLACES)
    per_doubling = (_PLACES - 1) // int(np.log2(_FURTHER))
    ways = forecast.ways(places)
    doubling = np.median(ways[:, per_doubling:] - ways[:, :-per_doubling], axis=0)
    idle = doubling < SEED_MARGIN
    first = places[int(np.argmax(idle))] if idle.any() else np.inf
    return Outlook(
        score=Estimate(float(at_end[1]), float(at_end[0]), float(at_end[2])),
        gain=Estimate(float(middle), float(low), float(high)),
        pays_until=float(first),
    )

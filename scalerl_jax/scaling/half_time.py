"""What the first half of a run, or as much as was fitted, said of its end, beside what the end was."""

import dataclasses

import numpy as np

from scalerl_jax.scaling import calibration
from scalerl_jax.scaling.average import AverageForecast, average_forecast
from scalerl_jax.scaling.binning import MOST_POINTS, make_bins
from scalerl_jax.scaling.fit import SigmoidFit, fit_sigmoid
from scalerl_jax.scaling.forecast import Estimate
from scalerl_jax.scaling.statement import LEVEL, outcome, statement

LAST = 0.75  # of the compute: evaluations beyond are the end
HALF = "at half of the compute"


@dataclasses.dataclass(frozen=True)
class HalfTimeForecast:
    """A forecast judged by what came: N evaluations, some of them beyond those it was made of."""

    compute: np.ndarray  # [N]
    reward: np.ndarray  # [N]
    fit: SigmoidFit  # of those it was made of
    ahead: AverageForecast  # by all laws, of those beyond
    score: Estimate  # of an evaluation at the end, at LEVEL
    measured: float  # mean of the evaluations there
    within: int  # evaluations beyond that lie in their bands
    later: int  # of so many
    bins: bool  # or means of neighbours, where there are very many
    seen: str  # up to where evaluations were known

    @property
    def error(self) -> float:
        """Forecast minus measured, in units of the score."""
        return self.score.value - self.measured

    @property
    def gain_ahead(self) -> float:
        """Share of the gain from R0 to the last evaluation that was still to come at half of the compute."""
        order = np.argsort(self.compute)
        # The score at half: between its two neighbours among the evaluations, so that one noisy point weighs less.
        at_half = np.interp(self.compute.max() / 2, self.compute[order], self.reward[order])
        final = self.reward[order[-1]]
        gain = final - self.fit.initial_reward
        return float((final - at_half) / gain) if gain else 0.0

    def statement(self, axis: str) -> str:
        """The forecast, without what came."""
        return statement(self.seen, axis, self.score)

    @property
    def outcome(self) -> str:
        return outcome(self.measured, self.within, self.later, bins=self.bins)


def half_time_forecast(compute, reward, counts=None) -> HalfTimeForecast:
    """compute [N] with a row at 0, reward [N] in [0, 1], counts as of fit_sigmoid.

    Raises ValueError where the run has too few evaluations: three of different compute up to the half, one in the last
    quarter.
    """
    compute = np.asarray(compute, np.float64)
    reward = np.asarray(reward, np.float64)
    fit = fit_sigmoid(compute, reward, fit_until="half", counts=counts)
    return judged(compute, reward, fit, average_forecast(fit.state.points, calibration.default()), HALF)


def judged(
    compute: np.ndarray, reward: np.ndarray, fit: SigmoidFit, ahead: AverageForecast, seen: str
) -> HalfTimeForecast:
    """compute, reward: [N], in any order; some are beyond those of the fit."""
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
    return HalfTimeForecast(
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

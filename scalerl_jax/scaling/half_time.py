"""What the first half of a run said of its end, beside what the end was."""

import dataclasses

import numpy as np

from scalerl_jax.scaling import calibration
from scalerl_jax.scaling.average import AverageForecast, average_forecast
from scalerl_jax.scaling.fit import SigmoidFit, fit_sigmoid

BAND_LEVEL = 0.9


@dataclasses.dataclass(frozen=True)
class HalfTimeForecast:
    """The forecast made at half of the compute, judged by what came. N evaluations, one of them at 0."""

    compute: np.ndarray  # [N]
    reward: np.ndarray  # [N]
    last: np.ndarray  # [N] bool: above three quarters of the final compute
    fit: SigmoidFit  # of those above 0 and at or below half of it
    ahead: AverageForecast  # by all laws, of those beyond
    band: tuple[np.ndarray, np.ndarray]  # [last] each, of the evaluations, at `level`
    forecast_mean: float
    measured_mean: float
    gain_ahead: float  # share of the gain from R0 to the last evaluation that was still to come at half of the compute
    level: float = BAND_LEVEL

    @property
    def error(self) -> float:
        """Forecast minus measured, in units of the score."""
        return self.forecast_mean - self.measured_mean

    @property
    def within(self) -> tuple[int, int]:
        """How many of the evaluations after the half lie in the band at `level`, and how many there are."""
        later = self.compute > self.compute.max() / 2
        order = np.argsort(self.compute[later])
        low, high = self.ahead.band(self.compute[later][order], level=self.level)
        measured = self.reward[later][order]
        return int(np.sum((low <= measured) & (measured <= high))), int(later.sum())

    def at_level(self, level: float) -> "HalfTimeForecast":
        """The same with a band of another level."""
        return dataclasses.replace(self, band=_band(self.ahead, self.compute[self.last], level), level=level)

    def sentence(self) -> str:
        """The outcome in one line."""
        low, high = float(np.mean(self.band[0])), float(np.mean(self.band[1]))
        outcome = f"measured {self.measured_mean:.3f}, error {self.error:+.3f}"
        held, later = self.within
        return (
            f"forecast at half of the compute for the last quarter: {self.forecast_mean:.3f} "
            f"({100 * self.level:.0f} %: {low:.3f} to {high:.3f}), {outcome}; {held} of the {later} later evaluations "
            f"lie within; {100 * self.gain_ahead:.0f} % of the gain was still ahead"
        )


def half_time_forecast(compute, reward, counts=None) -> HalfTimeForecast:
    """compute [N] with a row at 0, reward [N] in [0, 1], counts as of fit_sigmoid.

    Raises ValueError where the run has too few evaluations: three of different compute up to the half, one in the last
    quarter.
    """
    compute = np.asarray(compute, np.float64)
    reward = np.asarray(reward, np.float64)
    fit = fit_sigmoid(compute, reward, fit_until="half", counts=counts)
    ahead = average_forecast(fit.state.points, calibration.default())
    last = compute > 0.75 * compute.max()
    # The score at half: between its two neighbours among the evaluations, so that one noisy point weighs less.
    order = np.argsort(compute)
    at_half = float(np.interp(compute.max() / 2, compute[order], reward[order]))
    final = float(reward[order[-1]])
    gain = final - fit.initial_reward
    return HalfTimeForecast(
        compute=compute,
        reward=reward,
        last=last,
        fit=fit,
        ahead=ahead,
        band=_band(ahead, compute[last], BAND_LEVEL),
        forecast_mean=float(ahead.predict(np.sort(compute[last])).mean()),
        measured_mean=float(reward[last].mean()),
        gain_ahead=(final - at_half) / gain if gain else 0.0,
    )


def _band(ahead: AverageForecast, compute: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """At compute [M] in any order."""
    order = np.argsort(compute)
    back = np.argsort(order)
    low, high = ahead.band(compute[order], level=level)
    return low[back], high[back]

"""Model-averaged forecast: the laws of laws.py, weighted by how well each did on this run and on earlier ones.

    logit R(C) = logit R_law(C) + s h^g z        h = ln(C / C_now), z normal, one for each path

The second term is the discrepancy: the error of a law even with the right parameters, growing with the distance of
extrapolation. Its size differs from run to run, so every law comes with each of several scales s, and each pair is
weighted by its record on the run:

    weight of a law and a scale  ~  prior weight * exp(rate * mean log density)

of the evaluations in the last 40 % of the compute so far, forecast from those before. The prior weights, the rate and g
were fitted on complete runs (calibrate.py); if the points are too few for a record, only the prior is used. All laws
except the random walk rise, so a run that has fallen (trend.py) is forecast by the walk alone.
"""

import dataclasses
import zlib
from collections.abc import Mapping

import numpy as np
from scipy.special import expit, logit, logsumexp

from scalerl_jax.scaling.calibration import SCALES, Calibration, Weights
from scalerl_jax.scaling.laws import LAWS, Drawn
from scalerl_jax.scaling.points import Points, TooFewPoints
from scalerl_jax.scaling.trend import has_fallen

DRAWS = 2000  # of each law
BACKTEST = 0.6  # share of the compute so far: later evaluations are forecast from earlier ones
_EDGE = 1e-4  # scores nearer to 0 or 1 count as this near
_RECORD_EDGE = 5e-3  # likewise, for the noise of a logit
RECORD_DRAWS = 400
_AT_ONCE = 1000  # compute values at once: for each, all draws of all laws are in memory
_OF_A_FALL = "random_walk"  # the law of a run that has fallen
_LEAST_CHANCE = 0.05  # lower bound of 4 R (1 - R), by which the noise at different scores is compared


@dataclasses.dataclass(frozen=True)
class AverageForecast:
    """The forecast of later evaluations from those up to `reached`."""

    reached: float  # compute of the last point
    drawn: Mapping[str, Drawn]  # of each law
    weights: Weights  # their sum is 1
    calibration: Calibration
    evaluation_variance: float  # of a new evaluation like those so far, at a score of 1/2
    count: int
    seed: int

    def ways(self, compute) -> np.ndarray:
        """Scores [S, M] at compute [M], rising, from `reached` on: equally likely paths of the policy."""
        compute = np.asarray(compute, np.float64)
        rng = np.random.default_rng(self.seed)
        logits = {name: _logit(drawn.at(compute)) for name, drawn in self.drawn.items()}
        pairs = [(name, scale, weight) for name, row in self.weights.items() for scale, weight in zip(SCALES, row)]
        whole = np.rint(np.cumsum([weight for *_, weight in pairs]) * self.count).astype(int)
        parts, used = [], dict.fromkeys(self.drawn, 0)
        for (name, scale, _), many in zip(pairs, np.diff(whole, prepend=0)):
            taken = logits[name][used[name] : used[name] + many]
            used[name] += many
            off = self.calibration.deviation(scale, compute / self.reached)
            parts.append(expit(taken + off * rng.standard_normal((len(taken), 1))))
        return np.concatenate(parts)

    def evaluations(self, compute, *, rows=1) -> np.ndarray:
        """As `ways`, measured with the noise of an evaluation like those so far, or of the mean of `rows` of them."""
        ways = self.ways(compute)
        noise = np.random.default_rng(self.seed + 1).standard_normal(ways.shape)
        variance = self.evaluation_variance / np.asarray(rows)
        return np.clip(ways + np.sqrt(4 * ways * (1 - ways) * variance) * noise, 0.0, 1.0)

    @property
    def law_weights(self) -> dict[str, float]:
        """The weight of each law, summed over its scales."""
        return {name: sum(row) for name, row in self.weights.items()}

    def predict(self, compute) -> np.ndarray:
        """The median score [M] at each compute."""
        return np.concatenate([np.median(self.ways(part), axis=0) for part in _parts(np.atleast_1d(compute))])

    def band(self, compute, *, level: float, evaluation: bool = True, rows=1) -> tuple[np.ndarray, np.ndarray]:
        """The interval, low and high [M], that contains an evaluation at each compute [M], or the mean of `rows` (a
        number or [M]) evaluations, with probability `level`; with evaluation=False, the policy's true score."""
        compute = np.atleast_1d(compute)
        found = []
        for part, many in zip(_parts(compute), _parts(np.broadcast_to(rows, compute.shape))):
            made = self.evaluations(part, rows=many) if evaluation else self.ways(part)
            found.append(np.quantile(made, [(1 - level) / 2, (1 + level) / 2], axis=0))
        low, high = np.concatenate(found, axis=1)
        return low, high


def average_forecast(points: Points, calibration: Calibration, *, count: int = DRAWS, seed: int = 0) -> AverageForecast:
    """The forecast from these points. Raises ValueError where a law's noise cannot be estimated from them."""
    return from_record(points, calibration, record(points, calibration, seed=seed), count=count, seed=seed)


def from_record(
    points: Points,
    calibration: Calibration,
    found: Mapping[str, tuple[float, ...]] | None,
    *,
    count: int = DRAWS,
    seed: int = 0,
) -> AverageForecast:
    """found: the result of `record`."""
    drawn = {name: draw(name, points, count=count, seed=seed) for name in LAWS}
    each = points.rows * points.noise_variance / np.maximum(4 * points.reward * (1 - points.reward), _LEAST_CHANCE)
    heard = 1.0
    if points.counts is not None:  # an upper bound if prompts differ; the best law's residuals show by how much
        heard = min(1.0, *(float(np.median(one.dispersion)) for one in drawn.values() if one.dispersion is not None))
    return AverageForecast(
        reached=points.most,
        drawn=drawn,
        weights=calibration.weights(found, alone=_OF_A_FALL if has_fallen(points) else None),
        calibration=calibration,
        evaluation_variance=heard * float(np.median(each)),
        count=count,
        seed=seed,
    )


def _parts(values: np.ndarray) -> list[np.ndarray]:
    return np.array_split(values, range(_AT_ONCE, len(values), _AT_ONCE))


def draw(name: str, points: Points, *, count: int, seed: int) -> Drawn:
    """Draws of a law, with its own random numbers."""
    return LAWS[name](points, count=count, seed=seed + zlib.crc32(name.encode()) % 1000)


def record(points: Points, calibration: Calibration, *, seed: int = 0) -> dict[str, tuple[float, ...]] | None:
    """Mean log density (of the logit) of the last evaluations, forecast from the earlier ones by each law with each
    scale; None if there are too few."""
    try:
        before, later = points.split(BACKTEST * points.most)
    except TooFewPoints:
        return None
    ratio = np.sort(later.compute) / before.most
    found = {}
    for name in LAWS:
        off, noise = away(draw(name, before, count=RECORD_DRAWS, seed=seed), later)
        densities = (log_density(off, noise, calibration.deviation(scale, ratio)) for scale in SCALES)
        found[name] = tuple(float(np.mean(density)) for density in densities)
    return found


def log_density(off: np.ndarray, noise: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Log densities [M] of evaluations whose logits differ by `off` [S, M] from equally likely draws. noise, deviation:
    [M] standard deviations, of an evaluation and of the law."""
    scale = np.hypot(deviation, noise)
    each = -0.5 * (off / scale) ** 2
    return logsumexp(each, axis=0) - np.log(len(off)) - np.log(scale) - 0.5 * np.log(2 * np.pi)


def away(drawn: Drawn, later: Points) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the evaluations [M], by rising compute, minus those of the draws: [S, M]; and the standard deviation
    [M] of the evaluations' logits due to noise."""
    order = np.argsort(later.compute, kind="stable")
    reward, variance = later.reward[order], later.noise_variance[order]
    inside = np.clip(reward, _RECORD_EDGE, 1 - _RECORD_EDGE)
    return _logit(reward) - _logit(drawn.at(later.compute[order])), np.sqrt(variance) / (inside * (1 - inside))


def _logit(score: np.ndarray) -> np.ndarray:
    return logit(np.clip(score, _EDGE, 1 - _EDGE))

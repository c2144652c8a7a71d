"""Model-averaged forecast: the laws of laws.py, weighted by how well each did on this run and on earlier ones.

    logit R(C) = logit R_law(C) + s h^g z        h = ln(C / C_now), z normal, one for a way on

The second term is the discrepancy: what a law with the right parameters is still off by, growing with the distance that
is extrapolated. How much that is differs from run to run, so every law comes with each of several scales s, and each
pair is weighed by its record on the run at hand:

    weight of a law and a scale  ~  prior weight * exp(rate * mean log density)

of the evaluations in the last 40 % of the compute so far, foretold from those before. The prior weights, the rate and g
were fitted on complete runs (calibrate.py); where the points are too few for a record, the prior alone weighs. All laws
but the random walk rise, so of a run that has fallen (trend.py) the walk alone speaks.
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
BACKTEST = 0.6  # of the compute so far: what comes after is foretold from what comes before
_EDGE = 1e-4  # scores nearer to 0 or 1 count as this near
_RECORD_EDGE = 5e-3  # likewise, where the noise of a logit is told
RECORD_DRAWS = 400
_AT_ONCE = 1000  # places: of each, every draw of every law is in memory
_OF_A_FALL = "random_walk"  # the law of a run that has fallen
_LEAST_CHANCE = 0.05  # of 4 R (1 - R), where evaluations of other scores are compared by their noise


@dataclasses.dataclass(frozen=True)
class AverageForecast:
    """What the evaluations up to `reached` say of those to come."""

    reached: float  # compute of the last point
    drawn: Mapping[str, Drawn]  # of each law
    weights: Weights  # their sum is 1
    calibration: Calibration
    evaluation_variance: float  # of one more evaluation like those so far, at a score of 1/2
    count: int
    seed: int

    def ways(self, compute) -> np.ndarray:
        """Scores [S, M] at compute [M] from `reached` on, rising: ways on for the policy, equally likely."""
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
        """Of each law, whatever the scale."""
        return {name: sum(row) for name, row in self.weights.items()}

    def predict(self, compute) -> np.ndarray:
        """The score [M] that is as likely to be passed as missed."""
        return np.concatenate([np.median(self.ways(part), axis=0) for part in _parts(np.atleast_1d(compute))])

    def band(self, compute, *, level: float, evaluation: bool = True, rows=1) -> tuple[np.ndarray, np.ndarray]:
        """Between which scores an evaluation at each compute [M] will be with chance `level`, [M] each, or the mean of
        `rows` (a number or [M]) evaluations; with evaluation=False the policy's true score."""
        compute = np.atleast_1d(compute)
        found = []
        for part, many in zip(_parts(compute), _parts(np.broadcast_to(rows, compute.shape))):
            made = self.evaluations(part, rows=many) if evaluation else self.ways(part)
            found.append(np.quantile(made, [(1 - level) / 2, (1 + level) / 2], axis=0))
        low, high = np.concatenate(found, axis=1)
        return low, high


def average_forecast(points: Points, calibration: Calibration, *, count: int = DRAWS, seed: int = 0) -> AverageForecast:
    """Raises ValueError where the points tell no law's noise."""
    return from_record(points, calibration, record(points, calibration, seed=seed), count=count, seed=seed)


def from_record(
    points: Points,
    calibration: Calibration,
    found: Mapping[str, tuple[float, ...]] | None,
    *,
    count: int = DRAWS,
    seed: int = 0,
) -> AverageForecast:
    """found: as `record` gives it."""
    drawn = {name: draw(name, points, count=count, seed=seed) for name in LAWS}
    each = points.rows * points.noise_variance / np.maximum(4 * points.reward * (1 - points.reward), _LEAST_CHANCE)
    heard = 1.0
    if points.counts is not None:  # an upper bound where prompts differ; what the best law leaves tells by how much
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
    """Of a law, with random numbers of its own."""
    return LAWS[name](points, count=count, seed=seed + zlib.crc32(name.encode()) % 1000)


def record(points: Points, calibration: Calibration, *, seed: int = 0) -> dict[str, tuple[float, ...]] | None:
    """Of each law, with each scale, the mean log density (of the logit) of the last evaluations, foretold from the ones
    before; None where there are too few."""
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
    """[M] of evaluations that are `off` [S, M] equally likely draws, by logits. noise, deviation: [M], of an evaluation
    and of the law."""
    scale = np.hypot(deviation, noise)
    each = -0.5 * (off / scale) ** 2
    return logsumexp(each, axis=0) - np.log(len(off)) - np.log(scale) - 0.5 * np.log(2 * np.pi)


def away(drawn: Drawn, later: Points) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the evaluations [M], by rising compute, minus those of the draws, [S, M]; and the standard deviation
    [M] of those logits by the noise of an evaluation."""
    order = np.argsort(later.compute, kind="stable")
    reward, variance = later.reward[order], later.noise_variance[order]
    inside = np.clip(reward, _RECORD_EDGE, 1 - _RECORD_EDGE)
    return _logit(reward) - _logit(drawn.at(later.compute[order])), np.sqrt(variance) / (inside * (1 - inside))


def _logit(score: np.ndarray) -> np.ndarray:
    return logit(np.clip(score, _EDGE, 1 - _EDGE))

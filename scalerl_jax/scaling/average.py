"""Model-averaged forecast: the laws of law.py, weighted by how well each did on this run and on earlier ones.

    logit R(C) = logit R_law(C) + s h^g z        h = ln(C / C_now), z normal, one for each path

The second term is the discrepancy: the error of a law even with the right parameters, growing with the distance of
extrapolation. Its size differs from run to run, so every law comes with each of several scales s, and each pair is
weighted by its record on the run:

    weight of a law and a scale  ~  prior weight * exp(rate * mean log density)

of the evaluations in the last 40 % of the compute so far, forecast from those before. The prior weights, the rate and g
were fitted on complete runs (calibrate.py); if the points are too few for a record, only the prior is used. All laws
except the random walk rise, so a run that has fallen (trend.py) is forecast by the walk alone.

calibration.json, next to this file, was fitted on 35 runs of configs/bank.csv; `scalerl-calibrate` makes one of runs
of yours.
"""

import dataclasses
import functools
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import expit, logit, logsumexp

from scalerl_jax.scaling.curve_draws import DrawnCurves
from scalerl_jax.scaling.law import LAWS, Drawn
from scalerl_jax.scaling.points import Points, TooFewPoints
from scalerl_jax.scaling.trend import has_fallen
from scalerl_jax.system import files

SCALES = (0.01, 0.05, 0.2, 0.6, 2.0)  # logits that a law may be off by where the compute has grown by a factor of e
DRAWS = 2000  # of each law
_BACKTEST = 0.6  # share of the compute so far: later evaluations are forecast from earlier ones
_EDGE = 1e-4  # scores nearer to 0 or 1 count as this near
_RECORD_EDGE = 5e-3  # likewise, for the noise of a logit
_RECORD_DRAWS = 400
_AT_ONCE = 1000  # compute values at once: for each, all draws of all laws are in memory
_OF_A_FALL = "random_walk"  # the law of a run that has fallen
_LEAST_CHANCE = 0.05  # lower bound of 4 R (1 - R), by which the noise at different scores is compared
_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calibration.json")

Weights = Mapping[str, tuple[float, ...]]  # law -> weight for each of SCALES


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The parameters of a forecast that do not depend on the run."""

    prior: Weights  # weights without a record; their sum is 1
    growth: float  # power of ln(compute / compute so far) with which a law's error grows
    rate: float  # weight of a nat of mean log density in the record
    runs: int = 0  # number of runs in the fit

    def deviation(self, scale: float, ratio) -> np.ndarray:
        """A law's standard deviation in logits [M] at `ratio` [M] times the compute so far."""
        return scale * np.log(np.maximum(ratio, 1.0)) ** self.growth

    def weights(self, record: Mapping[str, Sequence[float]] | None, *, alone: str | None = None) -> Weights:
        """The weights of laws and scales. record: mean log density of each law at each of SCALES (`record`); None
        uses the prior alone. alone: the law that gets all of the weight."""
        logs = np.log(np.maximum(list(self.prior.values()), 1e-12))
        if record is not None:
            logs = logs + self.rate * np.array([record[name] for name in self.prior])
        if alone is not None:
            logs = np.where(np.array(list(self.prior))[:, None] == alone, logs, -np.inf)
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        return {name: tuple(row.tolist()) for name, row in zip(self.prior, shares)}

    def text(self) -> str:
        """The text of its file, with significant digits only; a line for each part."""
        document = {
            "scales": list(SCALES),
            "prior": {name: [float(f"{weight:.3g}") for weight in row] for name, row in self.prior.items()},
            "growth": float(f"{self.growth:.3g}"),
            "rate": float(f"{self.rate:.3g}"),
            "runs": self.runs,
        }
        return "{\n" + ",\n".join(f'  "{name}": {json.dumps(part)}' for name, part in document.items()) + "\n}\n"


@functools.cache
def default_calibration() -> Calibration:
    """The calibration shipped with this package."""
    return read_calibration(_FILE)


def read_calibration(path: str) -> Calibration:
    """Reads a calibration. Raises ValueError (one line, naming the file) where the file is no calibration."""
    with files.naming(path), open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: is not JSON ({error})") from error
    try:
        if [_number(scale) for scale in found["scales"]] != list(SCALES):
            raise ValueError(f"scales are {found['scales']}, not {list(SCALES)}")
        prior = {name: tuple(_number(weight) for weight in found["prior"][name]) for name in LAWS}
        if any(len(row) != len(SCALES) for row in prior.values()) or sum(map(sum, prior.values())) == 0:
            raise ValueError("prior: a weight for each of the scales")
        return Calibration(prior, _number(found["growth"]), _number(found["rate"]), int(found["runs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not a calibration as scalerl-calibrate writes it ({error!r})") from error


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value!r} is not a number from 0 on")
    return float(value)


@dataclasses.dataclass(frozen=True)
class AverageForecast:
    """The forecast of later evaluations from those up to `reached`."""

    reached: float  # compute of the last point
    drawn: Mapping[str, Drawn]  # of each law
    weights: Weights  # their sum is 1
    calibration: Calibration
    evaluation_variance: float  # of a new evaluation like those so far, at a score of 1/2
    count: int  # of the paths

    def ways(self, compute) -> np.ndarray:
        """Scores [S, M] at compute [M], rising, from `reached` on: equally likely paths of the policy."""
        compute = np.asarray(compute, np.float64)
        rng = np.random.default_rng(0)
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
        noise = np.random.default_rng(1).standard_normal(ways.shape)
        variance = self.evaluation_variance / np.asarray(rows)
        return np.clip(ways + np.sqrt(4 * ways * (1 - ways) * variance) * noise, 0.0, 1.0)

    @property
    def law_weights(self) -> dict[str, float]:
        """The weight of each law, summed over its scales."""
        return {name: sum(row) for name, row in self.weights.items()}

    def predict(self, compute) -> np.ndarray:
        """The median score [M] at each compute."""
        return np.concatenate([np.median(self.ways(part), axis=0) for part in _parts(np.atleast_1d(compute))])

    def band(self, compute, *, level: float, rows=1) -> tuple[np.ndarray, np.ndarray]:
        """The interval, low and high [M], that contains an evaluation at each compute [M], or the mean of `rows` (a
        number or [M]) evaluations, with probability `level`."""
        compute = np.atleast_1d(compute)
        found = []
        for part, many in zip(_parts(compute), _parts(np.broadcast_to(rows, compute.shape))):
            made = self.evaluations(part, rows=many)
            found.append(np.quantile(made, [(1 - level) / 2, (1 + level) / 2], axis=0))
        low, high = np.concatenate(found, axis=1)
        return low, high


def average_forecast(points: Points, calibration: Calibration, *, count: int = DRAWS) -> AverageForecast:
    """The forecast from these points. Raises ValueError where a law's noise cannot be estimated from them."""
    return from_record(points, calibration, record(points, calibration), count=count)


def from_record(
    points: Points,
    calibration: Calibration,
    found: Mapping[str, tuple[float, ...]] | None,
    *,
    count: int = DRAWS,
) -> AverageForecast:
    """found: the result of `record`."""
    drawn = {name: draw(name, points, count=count) for name in LAWS}
    each = points.rows * points.noise_variance / np.maximum(4 * points.reward * (1 - points.reward), _LEAST_CHANCE)
    heard = 1.0
    if points.counts is not None:  # an upper bound if prompts differ; the best law's residuals show by how much
        heard = min(1.0, *(float(np.median(one.dispersion)) for one in drawn.values() if isinstance(one, DrawnCurves)))
    return AverageForecast(
        reached=points.most,
        drawn=drawn,
        weights=calibration.weights(found, alone=_OF_A_FALL if has_fallen(points) else None),
        calibration=calibration,
        evaluation_variance=heard * float(np.median(each)),
        count=count,
    )


def _parts(values: np.ndarray) -> list[np.ndarray]:
    return np.array_split(values, range(_AT_ONCE, len(values), _AT_ONCE))


def draw(name: str, points: Points, *, count: int) -> Drawn:
    """Draws of a law, with its own random numbers."""
    return LAWS[name](points, count=count, seed=zlib.crc32(name.encode()) % 1000)


@dataclasses.dataclass(frozen=True)
class Hindsight:
    """One law's forecast of later evaluations, compared with them: the inputs of its density."""

    away: np.ndarray  # [S, M] logits of the evaluations, by rising compute, minus those of the draws
    noise: np.ndarray  # [M] standard deviation of the evaluations' logits due to noise
    distance: np.ndarray  # [M] ln of the compute over that of the last point

    def log_density(self, growth: float) -> np.ndarray:
        """Log densities [scales, M] of the evaluations."""
        deviations = (scale * self.distance**growth for scale in SCALES)
        return np.stack([log_density(self.away, self.noise, deviation) for deviation in deviations])

    def record(self, growth: float) -> tuple[float, ...]:
        """The mean log density at each of SCALES."""
        return tuple(self.log_density(growth).mean(axis=1).tolist())


def hindsight(before: Points, later: Points) -> dict[str, Hindsight]:
    """The forecast of `later` from `before` by each law."""
    order = np.argsort(later.compute, kind="stable")
    compute, reward, variance = later.compute[order], later.reward[order], later.noise_variance[order]
    inside = np.clip(reward, _RECORD_EDGE, 1 - _RECORD_EDGE)
    noise, distance = np.sqrt(variance) / (inside * (1 - inside)), np.log(compute / before.most)
    found = {}
    for name in LAWS:
        drawn = draw(name, before, count=_RECORD_DRAWS)
        found[name] = Hindsight(_logit(reward) - _logit(drawn.at(compute)), noise, distance)
    return found


def hindsight_of_end(points: Points) -> dict[str, Hindsight] | None:
    """The forecast of the last evaluations from the earlier ones; None if there are too few."""
    try:
        return hindsight(*points.split(_BACKTEST * points.most))
    except TooFewPoints:
        return None


def record(points: Points, calibration: Calibration) -> dict[str, tuple[float, ...]] | None:
    """Mean log density (of the logit) of the last evaluations, forecast from the earlier ones by each law with each
    scale; None if there are too few."""
    found = hindsight_of_end(points)
    return None if found is None else {name: one.record(calibration.growth) for name, one in found.items()}


def log_density(off: np.ndarray, noise: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Log densities [M] of evaluations whose logits differ by `off` [S, M] from equally likely draws. noise, deviation:
    [M] standard deviations, of an evaluation and of the law."""
    scale = np.hypot(deviation, noise)
    each = -0.5 * (off / scale) ** 2
    return logsumexp(each, axis=0) - np.log(len(off)) - np.log(scale) - 0.5 * np.log(2 * np.pi)


def _logit(score: np.ndarray) -> np.ndarray:
    return logit(np.clip(score, _EDGE, 1 - _EDGE))

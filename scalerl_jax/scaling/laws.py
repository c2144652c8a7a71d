"""The laws that a forecast is averaged over: models of a run's score as a function of its compute C.

    sigmoid      R0 + (A - R0) / (1 + (C_mid / C)^B)                               arXiv 2510.13786, law.py
    richards     R0 + (A - R0) / (1 + (2^nu - 1) (C_mid / C)^B)^(1 / nu)           Richards 1959; nu = 1 is the sigmoid
    logistic     R0 + (A - R0) (S(C) - S(0)) / (1 - S(0)), S = 1 / (1 + e^(k - k C / C_0))     Verhulst 1838
    power        1 - (1 - R0) (1 + C / C_0)^-k                                     arXiv 2509.25300
    random_walk  logit R drifts and varies as it has so far: no law at all          (below)

In richards, nu below 1 makes the start steeper than the end (as C^(B / nu)), above 1 the other way round; C_mid is
where half of the gain is reached. The remaining gain of the sigmoid and richards, which are curves of ln C, ends like
C^-B. The logistic is a curve of C itself: it rises more steeply and ends sooner than these. The power law is a straight
line of ln(1 - R) against ln C with slope -k beyond C_0, as that paper fits it run by run, and starts at R0; its A is 1.

The priors are weak, and those of the sigmoid are decide.py's: ln C_mid uniform from a twentieth of the least compute
to 50 times the most, ln B normal around ln 2 with standard deviation 0.5.

The random walk: the score continues to drift and vary as it has so far.

    logit R(C_i) = logit R(C_i-1) + b x + N(0, sigma^2 x)        x = ln(C_i / C_i-1)
    an evaluation of it is off by N(0, variance / (R (1 - R))^2)

The drift b is normal around 0 with standard deviation 1: a run that never moved is not expected to. The Kalman filter
gives the likelihood of sigma (on a grid, with a wide prior) and the posterior of level and drift at the last point,
from which walks are drawn. The walk starts at the first point; anything before it is ignored.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np
from scipy.special import expit, logit

from scalerl_jax.scaling.curve_draws import Axis, DrawnCurves, draw_curves
from scalerl_jax.scaling.points import Points

_SIGMAS = np.geomspace(0.02, 4.0, 33)  # logits per unit of sqrt(ln C)
_PRIOR = (float(np.log(0.4)), 1.0)  # of ln sigma
_DRIFT = 1.0  # standard deviation of b
_EDGE = 2e-3  # scores nearer to 0 or 1 count as this near: their logit is all noise


@dataclasses.dataclass(frozen=True)
class Walks:
    """S walks from the last point."""

    start: float  # ln C of the last point
    level: np.ndarray  # [S] logits there
    drift: np.ndarray  # [S]
    sigma: np.ndarray  # [S]
    dispersion: None  # the noise of the counts, or the scatter of neighbours, is used as it is
    seed: int

    def at(self, compute: np.ndarray) -> np.ndarray:
        """Scores [S, M] at compute [M], rising, from the last point on; constant before it."""
        ahead = np.maximum(np.log(np.asarray(compute, np.float64)) - self.start, 0.0)
        steps = np.diff(ahead, prepend=0.0)
        moves = np.random.default_rng(self.seed).standard_normal((len(self.level), len(ahead)))
        walked = self.sigma[:, None] * np.cumsum(np.sqrt(steps) * moves, axis=1)
        return expit(self.level[:, None] + self.drift[:, None] * ahead + walked)


def draw_walks(points: Points, *, count: int, seed: int) -> Walks:
    """Draws `count` walks; several evaluations at one compute, or of several seeds, are filtered one after another."""
    order = np.argsort(points.compute, kind="stable")
    score = np.clip(points.reward[order], _EDGE, 1 - _EDGE)
    log_compute = np.log(points.compute[order])
    seen, noise = logit(score), points.noise_variance[order] / (score * (1 - score)) ** 2
    many = len(_SIGMAS)
    # Means, variances and covariance of level and drift, for each sigma.
    level, drift = np.full(many, seen[0]), np.zeros(many)
    of_level, of_drift, of_both = np.full(many, noise[0]), np.full(many, _DRIFT**2), np.zeros(many)
    log_likelihood = -0.5 * ((np.log(_SIGMAS) - _PRIOR[0]) / _PRIOR[1]) ** 2
    for i in range(1, len(seen)):
        x = log_compute[i] - log_compute[i - 1]
        level = level + drift * x
        of_level = of_level + 2 * x * of_both + x * x * of_drift + _SIGMAS**2 * x
        of_both = of_both + x * of_drift
        total, off = of_level + noise[i], seen[i] - level
        log_likelihood += -0.5 * np.log(total) - 0.5 * off**2 / total
        level, drift = level + of_level / total * off, drift + of_both / total * off
        of_drift = of_drift - of_both**2 / total
        of_level, of_both = of_level * noise[i] / total, of_both * noise[i] / total
    rng = np.random.default_rng(seed)
    share = np.exp(log_likelihood - log_likelihood.max())
    chosen = rng.choice(many, size=count, p=share / share.sum())
    levels = level[chosen] + np.sqrt(of_level[chosen]) * rng.standard_normal(count)
    given = of_both[chosen] / of_level[chosen]  # regression of the drift on the level
    left = np.sqrt(np.maximum(of_drift[chosen] - given * of_both[chosen], 0.0))
    drifts = drift[chosen] + given * (levels - level[chosen]) + left * rng.standard_normal(count)
    return Walks(float(log_compute[-1]), levels, drifts, _SIGMAS[chosen], None, seed + 1)


class Drawn(Protocol):
    """S equally likely paths."""

    @property
    def dispersion(self) -> np.ndarray | None:
        """[S] noise variance of an evaluation over that of its counts (without counts: the variance itself); None if
        the law does not estimate it."""

    def at(self, compute: np.ndarray) -> np.ndarray:
        """Scores [S, M] at compute [M] above 0, rising."""


def _midpoint(points: Points) -> Axis:
    return Axis(float(np.log(points.compute.min())) - 3.0, float(np.log(points.compute.max())) + 4.0, 48)


_EXPONENT = Axis(float(np.log(2.0)) - 3.0, float(np.log(2.0)) + 3.0, 40, float(np.log(2.0)), 0.5)
_STEEPNESS = Axis(float(np.log(2.0)) - 3.0, float(np.log(2.0)) + 3.0, 40, float(np.log(2.0)), 0.7)  # ln k
_SKEW = Axis(-2.0, 2.0, 13, 0.0, 0.7)  # ln nu


def _sigmoid(shape: np.ndarray, log_compute: np.ndarray) -> np.ndarray:
    return expit(np.exp(shape[:, :1]) * (log_compute - shape[:, 1:2]))


def _richards(shape: np.ndarray, log_compute: np.ndarray) -> np.ndarray:
    skew = np.exp(shape[:, 2:])
    fall = np.log(np.exp2(skew) - 1) - np.exp(shape[:, :1]) * (log_compute - shape[:, 1:2])
    return np.exp(-np.logaddexp(0.0, fall) / skew)


def _logistic(shape: np.ndarray, log_compute: np.ndarray) -> np.ndarray:
    steepness = np.exp(shape[:, :1])
    begun = expit(-steepness)
    at = expit(steepness * np.expm1(np.minimum(log_compute - shape[:, 1:2], 50.0)))
    return np.clip((at - begun) / (1 - begun), 0.0, 1.0)


def _power(shape: np.ndarray, log_compute: np.ndarray) -> np.ndarray:
    return -np.expm1(-np.exp(shape[:, :1]) * np.logaddexp(0.0, log_compute - shape[:, 1:2]))


def sigmoid(points: Points, *, count: int, seed: int) -> DrawnCurves:
    return draw_curves(points, [_EXPONENT, _midpoint(points)], _sigmoid, count=count, seed=seed)


def richards(points: Points, *, count: int, seed: int) -> DrawnCurves:
    return draw_curves(points, [_EXPONENT, _midpoint(points), _SKEW], _richards, count=count, seed=seed)


def logistic(points: Points, *, count: int, seed: int) -> DrawnCurves:
    return draw_curves(points, [_STEEPNESS, _midpoint(points)], _logistic, count=count, seed=seed)


def power(points: Points, *, count: int, seed: int) -> DrawnCurves:
    axes = [Axis(float(np.log(0.5)) - 4.0, float(np.log(0.5)) + 3.0, 48, float(np.log(0.5)), 1.0), _midpoint(points)]
    return draw_curves(points, axes, _power, count=count, seed=seed, asymptote=1.0)


# Raises ValueError if the noise cannot be estimated from the points.
Law = Callable[..., Drawn]
LAWS: dict[str, Law] = {
    "sigmoid": sigmoid,
    "richards": richards,
    "logistic": logistic,
    "power": power,
    "random_walk": draw_walks,
}

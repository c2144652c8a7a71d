"""The laws of a run: pass rate against compute. The one that is fitted is the sigmoid of arXiv 2510.13786:

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)          0 <= A <= 1, B > 0
         = R0 + (A - R0) * sigmoid(B * (ln C - ln C_mid))

A      asymptote: the score with unlimited compute
B      exponent: how fast it gets there; the slope of the straightened form
C_mid  midpoint: the compute at which half of the gain A - R0 is reached
R0     the score before any compute

For large C it is the power law A - D / C^B with D = (A - R0) * C_mid^B, which is here for comparison.
These functions are elementwise jnp and compute in the precision of their inputs. Compute may be in any unit.

A forecast is averaged over five laws, models of a run's score as a function of its compute:

    sigmoid      R0 + (A - R0) / (1 + (C_mid / C)^B)                               the law above
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

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import expit, logit

from scalerl_jax.scaling.curve_draws import Axis, DrawnCurves, draw_curves
from scalerl_jax.scaling.points import Points

_SIGMAS = np.geomspace(0.02, 4.0, 33)  # logits per unit of sqrt(ln C)
_PRIOR = (float(np.log(0.4)), 1.0)  # of ln sigma
_DRIFT = 1.0  # standard deviation of b
_EDGE = 2e-3  # scores nearer to 0 or 1 count as this near: their logit is all noise


@dataclasses.dataclass(frozen=True)
class Sigmoid:
    """The parameters of one curve, in the unit its compute was given in."""

    asymptote: float
    exponent: float
    midpoint: float
    initial_reward: float

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters as keyword arguments of the functions below."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Sigmoid)}


def sigmoid_law(compute, *, asymptote, exponent, midpoint, initial_reward):
    """R(C), of the broadcast shape; R0 at compute 0."""
    rise = jax.nn.sigmoid(exponent * (jnp.log(compute) - jnp.log(midpoint)))
    return initial_reward + (asymptote - initial_reward) * rise


def power_law(compute, *, asymptote, coefficient, exponent):
    """A - D / C^B, meant for C above some C_0 only: it falls without bound towards C = 0."""
    return asymptote - coefficient * jnp.power(compute, -exponent)


def straighten(reward, *, asymptote, midpoint, exponent, initial_reward):
    """F(R) = C_mid^B / ((A - R0) / (R - R0) - 1), which is C^B on the curve: ln F against ln C has slope B.

    NaN where a score is not strictly between R0 and A.
    """
    inside, odds = _odds(reward, asymptote, initial_reward)
    return jnp.where(inside, jnp.power(midpoint, exponent) * odds, jnp.nan)


def compute_to_reach(target, *, asymptote, exponent, midpoint, initial_reward):
    """The compute at which the curve is at `target`: 0 at or below R0, infinity at or above A."""
    inside, odds = _odds(target, asymptote, initial_reward)
    reached = jnp.where(target <= initial_reward, 0.0, jnp.inf)
    return jnp.where(inside, midpoint * jnp.power(odds, 1 / exponent), reached)


def _odds(reward, asymptote, initial_reward):
    """Whether a score is strictly between R0 and A, and if so the ratio of gain so far to gain left."""
    share = jnp.divide(reward - initial_reward, asymptote - initial_reward)  # A may be R0
    inside = (share > 0) & (share < 1)
    return inside, jnp.where(inside, share, 0.5) / (1 - jnp.where(inside, share, 0.5))


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Within it, jax computes in float64 on this process's first CPU device."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


# ---------------------------------------------------------------------- draws of the five laws


@dataclasses.dataclass(frozen=True)
class Walks:
    """S walks from the last point."""

    start: float  # ln C of the last point
    level: np.ndarray  # [S] logits there
    drift: np.ndarray  # [S]
    sigma: np.ndarray  # [S]
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
    return Walks(float(log_compute[-1]), levels, drifts, _SIGMAS[chosen], seed + 1)


# S equally likely paths: at(compute [M] above 0, rising) is their scores [S, M].
Drawn = DrawnCurves | Walks


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


def draw_sigmoids(points: Points, *, count: int, seed: int) -> DrawnCurves:
    return draw_curves(points, [_EXPONENT, _midpoint(points)], _sigmoid, count=count, seed=seed)


def draw_richards(points: Points, *, count: int, seed: int) -> DrawnCurves:
    return draw_curves(points, [_EXPONENT, _midpoint(points), _SKEW], _richards, count=count, seed=seed)


def draw_logistics(points: Points, *, count: int, seed: int) -> DrawnCurves:
    return draw_curves(points, [_STEEPNESS, _midpoint(points)], _logistic, count=count, seed=seed)


def draw_powers(points: Points, *, count: int, seed: int) -> DrawnCurves:
    axes = [Axis(float(np.log(0.5)) - 4.0, float(np.log(0.5)) + 3.0, 48, float(np.log(0.5)), 1.0), _midpoint(points)]
    return draw_curves(points, axes, _power, count=count, seed=seed, asymptote=1.0)


# Raises ValueError if the noise cannot be estimated from the points.
Law = Callable[..., Drawn]
LAWS: dict[str, Law] = {
    "sigmoid": draw_sigmoids,
    "richards": draw_richards,
    "logistic": draw_logistics,
    "power": draw_powers,
    "random_walk": draw_walks,
}

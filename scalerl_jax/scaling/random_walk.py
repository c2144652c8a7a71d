"""No law: the score drifts on as it has so far, and moves about as much.

    logit R(C_i) = logit R(C_i-1) + b x + N(0, sigma^2 x)        x = ln(C_i / C_i-1)
    an evaluation of it is off by N(0, variance / (R (1 - R))^2)

The drift b is normal around 0 with standard deviation 1: a run that never moved is not expected to. The Kalman filter
gives the likelihood of sigma (on a grid, with a wide prior) and what is known of level and drift at the last point;
from there walks are drawn. The first point is where the walk begins: what came before is not heard.
"""

import dataclasses

import numpy as np
from scipy.special import expit, logit

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
    dispersion: None  # the counts' noise, or the scatter of neighbours, is taken as given
    seed: int

    def at(self, compute: np.ndarray) -> np.ndarray:
        """Scores [S, M] at compute [M], rising, from the last point on; before it they stand."""
        ahead = np.maximum(np.log(np.asarray(compute, np.float64)) - self.start, 0.0)
        steps = np.diff(ahead, prepend=0.0)
        moves = np.random.default_rng(self.seed).standard_normal((len(self.level), len(ahead)))
        walked = self.sigma[:, None] * np.cumsum(np.sqrt(steps) * moves, axis=1)
        return expit(self.level[:, None] + self.drift[:, None] * ahead + walked)


def draw_walks(points: Points, *, count: int, seed: int) -> Walks:
    """`count` walks; of several evaluations at one compute, or runs of other seeds, each is heard in turn."""
    order = np.argsort(points.compute, kind="stable")
    score = np.clip(points.reward[order], _EDGE, 1 - _EDGE)
    log_compute = np.log(points.compute[order])
    seen, noise = logit(score), points.noise_variance[order] / (score * (1 - score)) ** 2
    many = len(_SIGMAS)
    # Of level and drift, for each sigma: means, variances and covariance.
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
    given = of_both[chosen] / of_level[chosen]  # drift, where the level is known
    left = np.sqrt(np.maximum(of_drift[chosen] - given * of_both[chosen], 0.0))
    drifts = drift[chosen] + given * (levels - level[chosen]) + left * rng.standard_normal(count)
    return Walks(float(log_compute[-1]), levels, drifts, _SIGMAS[chosen], None, seed + 1)

"""No law: the score goes on from where it is, up or down alike, as far as it has moved so far.

    logit R(C_i) = logit R(C_i-1) + N(0, sigma^2 ln(C_i / C_i-1))        an evaluation: + N(0, phi variance / (R (1-R))^2)

The Kalman filter gives the likelihood of sigma (on a grid, with a wide prior) and the state at the last point; from
there walks are drawn. The first point is where the walk begins: what came before is not heard.
"""

import dataclasses

import numpy as np
from scipy.special import expit, logit

from scalerl_jax.scaling.points import Points

_SIGMAS = np.geomspace(0.02, 4.0, 33)  # logits per unit of sqrt(ln C)
_PRIOR = (float(np.log(0.4)), 1.0)  # of ln sigma
_EDGE = 2e-3  # scores nearer to 0 or 1 count as this near: their logit is all noise


@dataclasses.dataclass(frozen=True)
class Walks:
    """S walks from the last point."""

    start: float  # ln C of the last point
    state: np.ndarray  # [S] logits there
    sigma: np.ndarray  # [S]
    dispersion: None  # the counts' noise, or the scatter of neighbours, is taken as given
    seed: int

    def at(self, compute: np.ndarray) -> np.ndarray:
        """Scores [S, M] at compute [M], rising, from the last point on; before it they stand."""
        ahead = np.maximum(np.log(np.asarray(compute, np.float64)) - self.start, 0.0)
        steps = np.diff(ahead, prepend=0.0)
        moves = np.random.default_rng(self.seed).standard_normal((len(self.state), len(ahead)))
        return expit(self.state[:, None] + self.sigma[:, None] * np.cumsum(np.sqrt(steps) * moves, axis=1))


def draw_walks(points: Points, *, count: int, seed: int) -> Walks:
    """`count` walks; of several evaluations at one compute, or runs of other seeds, each is heard in turn."""
    order = np.argsort(points.compute, kind="stable")
    score = np.clip(points.reward[order], _EDGE, 1 - _EDGE)
    log_compute = np.log(points.compute[order])
    variance = points.noise_variance[order]
    seen, noise = logit(score), variance / (score * (1 - score)) ** 2
    mean = np.full(len(_SIGMAS), seen[0])
    spread = np.full(len(_SIGMAS), noise[0])
    log_likelihood = -0.5 * ((np.log(_SIGMAS) - _PRIOR[0]) / _PRIOR[1]) ** 2
    for i in range(1, len(seen)):
        spread = spread + _SIGMAS**2 * (log_compute[i] - log_compute[i - 1])
        total = spread + noise[i]
        log_likelihood += -0.5 * np.log(total) - 0.5 * (seen[i] - mean) ** 2 / total
        gain = spread / total
        mean, spread = mean + gain * (seen[i] - mean), spread * (1 - gain)
    rng = np.random.default_rng(seed)
    share = np.exp(log_likelihood - log_likelihood.max())
    chosen = rng.choice(len(_SIGMAS), size=count, p=share / share.sum())
    state = mean[chosen] + np.sqrt(spread[chosen]) * rng.standard_normal(count)
    return Walks(float(log_compute[-1]), state, _SIGMAS[chosen], None, seed + 1)

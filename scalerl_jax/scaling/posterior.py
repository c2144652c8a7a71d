"""Sigmoids drawn from what the points and a weak prior leave possible: for decisions, which need averages over curves.

    p(A, B, C_mid, R0 | points)     as curve_draws.py has it, the noise's dispersion integrated out
    prior: A uniform on [0, 1]; ln C_mid uniform from a twentieth of the least compute to 50 times the most;
           ln B normal around ln 2 with standard deviation 0.5 (B from 0.75 to 5.3; published fits lie in 1.1 to 5.2)

Intervals and bands that are printed come from the profile, which needs no prior; an average over likely curves is a
poor point forecast where the points do not bound A, so point forecasts stay with the fit.

Left out: that runs of other seeds differ; seeds given together only widen the noise.
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling import laws
from scalerl_jax.scaling.curve_draws import DrawnCurves
from scalerl_jax.scaling.points import Points


@dataclasses.dataclass(frozen=True)
class Curves:
    """S curves, and what an evaluation of them would be off by."""

    drawn: DrawnCurves
    evaluation_variance: float  # of one more evaluation like those given

    @property
    def asymptote(self) -> np.ndarray:  # [S]
        return self.drawn.asymptote

    @property
    def exponent(self) -> np.ndarray:  # [S]
        return np.exp(self.drawn.shape[:, 0])

    @property
    def midpoint(self) -> np.ndarray:  # [S]
        return np.exp(self.drawn.shape[:, 1])

    @property
    def initial_reward(self) -> np.ndarray:  # [S]
        return self.drawn.initial_reward

    def at(self, compute) -> np.ndarray:
        """Scores [S, M] at compute [M] above 0."""
        return self.drawn.at(compute)


def draw_curves(points: Points, *, count: int, seed: int) -> Curves:
    """`count` curves, in random order. Raises ValueError where no noise can be told from the points."""
    drawn = laws.sigmoid(points, count=count, seed=seed)
    return Curves(drawn, float(np.median(points.variance)) * float(np.median(drawn.dispersion)))

"""The laws that a forecast is averaged over: what a run's score may do as its compute C grows.

    sigmoid      R0 + (A - R0) / (1 + (C_mid / C)^B)                               arXiv 2510.13786, law.py
    richards     R0 + (A - R0) / (1 + (2^nu - 1) (C_mid / C)^B)^(1 / nu)           Richards 1959; nu = 1 is the sigmoid
    logistic     R0 + (A - R0) (S(C) - S(0)) / (1 - S(0)), S = 1 / (1 + e^(k - k C / C_0))     Verhulst 1838
    power        1 - (1 - R0) (1 + C / C_0)^-k                                     arXiv 2509.25300
    random_walk  logit R drifts and moves about as it has so far: no law at all     random_walk.py

Of richards, nu below 1 begins steeper than it ends (as C^(B / nu)) and above 1 the other way round; C_mid is where half
of the gain has come. In the end C^-B is left of the gain of the sigmoid and richards, which are curves of ln C. The
logistic is one of C itself: it rises more steeply and comes to its end sooner than any of theirs. The power law is a
straight line of ln(1 - R) against ln C with slope -k, as that paper fits it run by run, beyond C_0, and goes through
R0; its A is 1.

The priors are weak, and those of the sigmoid are posterior.py's: ln C_mid uniform from a twentieth of the least compute
to 50 times the most, ln B normal around ln 2 with standard deviation 0.5.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from scipy.special import expit

from scalerl_jax.scaling import random_walk
from scalerl_jax.scaling.curve_draws import Axis, DrawnCurves, draw_curves
from scalerl_jax.scaling.points import Points


class Drawn(Protocol):
    """S ways on, equally likely."""

    @property
    def dispersion(self) -> np.ndarray | None:
        """[S] noise variance of an evaluation over that of its counts (without counts: the variance itself); None: the
        law takes it as given."""

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


# Raises ValueError where the points tell nothing of the noise.
Law = Callable[..., Drawn]
LAWS: dict[str, Law] = {
    "sigmoid": sigmoid,
    "richards": richards,
    "logistic": logistic,
    "power": power,
    "random_walk": random_walk.draw_walks,
}

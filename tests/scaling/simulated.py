"""Simulated runs for the tests: the published triples, and evaluations with the noise of real ones.

Prompts differ in difficulty: prompt p passes with probability sigmoid(level_i + difficulty_p) at evaluation i, and the
level is set so that the mean over the prompts is the law's score exactly. So the truth holds for these prompts.
"""

import numpy as np
import scipy.special

from scalerl_jax.scaling.profile import LEVEL

# Table 1 of the paper: C_mid, B, A, and R0 as read off its figures.
TABLE_1 = {
    "ScaleRL": (2542, 1.92, 0.610, 0.40),
    "32k": (11272, 1.89, 0.645, 0.40),
    "8gen": (2542, 2.44, 0.585, 0.40),
    "24gen": (3054, 2.22, 0.590, 0.40),
    "32gen": (2936, 2.07, 0.595, 0.40),
    "Scout": (4242, 1.65, 0.710, 0.51),
    "bs512": (2818, 1.77, 0.605, 0.40),
    "bs2048": (10909, 1.70, 0.645, 0.40),
    "math+code, math": (2896, 2.05, 0.595, 0.40),
    "math+code, code": (1675, 1.09, 0.615, 0.40),
}
LEAVE_ONE_OUT = {
    "plan": (2463, 2.09, 0.590, 0.40),
    "lp": (2660, 1.68, 0.610, 0.40),
    "batch": (2503, 1.84, 0.595, 0.40),
    "8op": (3409, 1.89, 0.605, 0.40),
    "fp32": (2857, 1.88, 0.610, 0.40),
    "savg": (2621, 1.93, 0.600, 0.40),
    "npr": (2621, 1.62, 0.605, 0.40),
    "dapo": (3093, 1.77, 0.610, 0.40),
}
FIGURE_2 = {
    "ScaleRL": (2557, 1.97, 0.610, 0.400),
    "MiniMax-M1": (4137, 1.77, 0.610, 0.398),
    "Magistral": (2139, 1.44, 0.535, 0.399),
    "DAPO": (2866, 1.85, 0.515, 0.395),
    "GRPO": (1733, 1.17, 0.490, 0.400),
}


def curve(compute, midpoint, exponent, asymptote, initial):
    """The law written as the paper does, apart from the code under test."""
    compute = np.asarray(compute, np.float64)
    with np.errstate(divide="ignore"):
        return initial + (asymptote - initial) / (1 + (midpoint / compute) ** exponent)


def sampled_passes(rng, scores, *, runs, prompts=1000, samples=16, spread=2.5, redrawn=False):
    """Passes of every prompt: int [runs, N, prompts] for true scores [N].

    The difficulties are the same in every run and the scores are theirs; or `redrawn` for every run from a population
    whose scores these are.
    """
    difficulty = spread * scipy.special.ndtri((np.arange(prompts) + 0.5) / prompts)
    levels = np.linspace(-15, 15, 6001)
    means = scipy.special.expit(levels[:, None] + difficulty[None, ::10]).mean(axis=1)
    level = np.interp(scores, means, levels)
    # On all prompts, one Newton step makes the mean exact to far below the noise.
    rate = scipy.special.expit(level[:, None] + difficulty)
    level = level + (scores - rate.mean(axis=1)) / (rate * (1 - rate)).mean(axis=1)
    if redrawn:
        difficulty = spread * rng.standard_normal((runs, 1, prompts))
    rate = scipy.special.expit(level[:, None] + difficulty)
    return rng.binomial(samples, rate, size=(runs, len(scores), prompts)).astype(np.int16)


def _richards(nu):
    return lambda x: (1 + (2**nu - 1) * x**-2.0) ** (-1 / nu)


def _logistic(x):
    low = scipy.special.expit(-4.0)
    return (scipy.special.expit(4 * x - 4) - low) / (1 - low)


# The share of the gain that has come at x times C_mid, where half of it has, by laws most of which are no sigmoids.
GAINS = {
    "sigmoid 1.5": lambda x: 1 / (1 + x**-1.5),
    "sigmoid": lambda x: 1 / (1 + x**-2.0),
    "sigmoid 3": lambda x: 1 / (1 + x**-3.0),
    "richards .3": _richards(0.3),
    "richards 3": _richards(3.0),
    "power": lambda x: 1 - (1 + 3 * x) ** -0.5,
    "exponential": lambda x: 1 - 2.0**-x,
    "gompertz": lambda x: 2.0 ** -(x**-1.5),
    "stretched .5": lambda x: 1 - 2.0 ** -(x**0.5),
    "stretched 2": lambda x: 1 - 2.0 ** -(x**2),
    "logistic": _logistic,
    "two phases": lambda x: 0.6 / (1 + (0.6 / x) ** 3) + 0.4 / (1 + (4 / x) ** 3),
    "plateau": lambda x: np.minimum(x / 2, 1.0),  # a straight line that stops at twice C_mid
}


def evaluated(rng, gain, asymptote, *, share, evaluations=24, samples=16_000, initial=0.3):
    """Compute in C_mid, one evaluation at 0 and the rest evenly up to `share`; scores; (passes, trials)."""
    compute = share * np.arange(evaluations + 1) / evaluations
    come = np.append(0.0, GAINS[gain](compute[1:]))
    passes = rng.binomial(samples, initial + (asymptote - initial) * come)
    return compute, passes / samples, (passes, np.full(len(compute), samples))


def sigmoid_intervals(fit, level=LEVEL):
    """Profile likelihood of A, B and C_mid by the sigmoid alone, which is what is drawn and resampled."""
    return fit.state.intervals(level, tuple(fit.parameters.values()))

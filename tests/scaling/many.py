"""Many simulated runs of one row of the paper, fitted at once: the steps of fit_sigmoid under vmap.

A test holds fit_many against fit_sigmoid. A run looks like the paper's: an evaluation at compute 0 and every 100 steps
until the fitted window ends, 1,000 prompts x 16 samples, points before 1,500 GPU-hours dropped, R0 measured.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
import scipy.stats

from scalerl_jax.scaling import least_squares, profile
from scalerl_jax.scaling.law import double_precision
from scalerl_jax.scaling.least_squares import Data, search_cells
from scalerl_jax.scaling.points import BELIEF_PROMPTS, BELIEF_TOTALS, PARAMETERS, read_counts
from scalerl_jax.scaling.profile import read_intervals
from tests.scaling.simulated import TABLE_1, curve, sampled_passes

# GPU-hours of 100 steps, and where the fitted window ends. Where the paper gives neither: the step's cost goes with the
# batch and the length, the window ends at half of the budget of the runs beside it, or at twice C_mid.
SCHEDULE = {
    "ScaleRL": (256, 8000),
    "32k": (640, 25_000),
    "8gen": (256, 8000),
    "24gen": (256, 8000),
    "32gen": (256, 8000),
    "Scout": (634, 16_000),
    "bs512": (171, 8000),
    "bs2048": (1350, 50_000),
    "math+code, math": (256, 8000),
    "math+code, code": (256, 8000),
}
BURN_IN = 1500
SAMPLES = 16
PROMPTS = 1000
_STARTS = 10  # rows of the cells that a search starts from: a quarter of fit_sigmoid's, which finds the same


class Simulated(NamedTuple):
    """S runs: evaluations with the noise of their counts."""

    compute: np.ndarray  # [N]
    reward: np.ndarray  # [S, N]
    variance: np.ndarray  # [S, N], as the counts tell it
    initial: np.ndarray  # [S]
    initial_variance: np.ndarray  # [S]
    belief: float  # how many residuals that variance is worth
    passes: np.ndarray  # [S, 1 + N, prompts], the first at compute 0


class Fits(NamedTuple):
    estimate: np.ndarray  # [S, 4] A, B, C_mid, R0
    low: np.ndarray  # [S, 3] of A, B, C_mid
    high: np.ndarray  # [S, 3]


def schedule(name: str, end: float | None = None) -> np.ndarray:
    """Compute of the evaluations that are fitted, [N]; up to `end` or the end of the window."""
    step, window = SCHEDULE[name]
    compute = step * np.arange(1, int((end or window) // step) + 1)
    return compute[compute >= BURN_IN].astype(np.float64)


def simulate(rng: np.random.Generator, row, compute: np.ndarray, runs: int, *, told: str = "prompts") -> Simulated:
    """row: C_mid, B, A, R0. told: what is known of the counts: "prompts" (passes of each) | "totals" | "none"."""
    scores = curve(np.concatenate([[0.0], compute]), *row)
    passes = sampled_passes(rng, scores, runs=runs, prompts=PROMPTS, samples=SAMPLES)
    reward = passes.mean(axis=2) / SAMPLES
    variance, belief = np.ones(reward.shape), 0.0
    if told == "prompts":
        variance = np.stack([read_counts((one, SAMPLES), len(scores)).variance() for one in passes])
        belief = BELIEF_PROMPTS
    elif told == "totals":
        trials = np.full(len(scores), PROMPTS * SAMPLES)
        variance = np.stack([read_counts((one.sum(axis=1), trials), len(scores)).variance() for one in passes])
        belief = BELIEF_TOTALS
    return Simulated(compute, reward[:, 1:], variance[:, 1:], reward[:, 0], variance[:, 0], belief, passes)


@functools.partial(jax.jit, static_argnames="chunk")
def _fit_chunks(cells, starts, log_range, squares: Data, likelihood: Data, belief, degrees, quantiles, chunk: int):
    free = least_squares.free()

    def one(run):
        squares, likelihood = (data._replace(log_compute=log_compute) for data in run)
        point = least_squares.search_from_rows(cells, squares, free, _STARTS)
        best = least_squares.search_from_rows(cells, likelihood, free, _STARTS)
        dispersion = (belief + best.cost) / degrees
        of_level = jax.vmap(profile.profile, in_axes=(None, None, None, None, 0, None))
        return point, of_level(best, starts, likelihood, free, dispersion * quantiles, log_range)

    log_compute = squares.log_compute
    run_axes = (squares._replace(log_compute=None), likelihood._replace(log_compute=None))
    return jax.lax.map(one, run_axes, batch_size=chunk)


def fit_many(runs: Simulated, levels: tuple[float, ...] = (0.90,), *, chunk: int = 50) -> list[Fits]:
    """Every run as fit_sigmoid(compute, reward, counts=counts) has it, with intervals of each level."""
    data = least_squares.make_data(runs.compute, runs.reward, np.ones(len(runs.compute)), initial=0, initial_weight=0)
    weight = np.pad(1 / runs.variance, [(0, 0), (0, len(data.log_compute) - len(runs.compute))])
    count = len(runs.reward)
    exact = np.full(count, np.inf)
    squares = data._replace(weight=np.tile(data.weight, (count, 1)), initial=runs.initial, initial_weight=exact)
    likelihood = squares._replace(weight=weight, initial_weight=1 / runs.initial_variance)
    degrees = runs.belief + len(runs.compute) - PARAMETERS
    margin = profile.LOG_COMPUTE_RANGE
    log_range = np.array([data.log_compute.min() - margin, data.log_compute.max() + margin])
    cells, starts = search_cells(data.log_compute), search_cells(data.log_compute, coarse=True)
    quantiles = scipy.stats.f.ppf(levels, 1, degrees)
    with double_precision():
        point, found = jax.device_get(
            _fit_chunks(cells, starts, log_range, squares, likelihood, runs.belief, float(degrees), quantiles, chunk)
        )
    estimate = np.column_stack([point.asymptote, np.exp(point.shape), point.initial_reward])
    fits = []
    for level in range(len(levels)):
        of_level = jax.tree.map(lambda field, level=level: field[:, level], found)
        ends = []
        for run in range(count):
            one = jax.tree.map(lambda field, run=run: field[run], of_level)
            intervals = read_intervals(one, estimate[run])
            ends.append([intervals[name] for name in profile.PARAMETERS])
        low, high = np.moveaxis(np.array(ends), 2, 0)
        fits.append(Fits(estimate, low, high))
    return fits


TRUTH = {name: np.array([row[2], row[1], row[0]]) for name, row in TABLE_1.items()}  # A, B, C_mid

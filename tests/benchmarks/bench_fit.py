"""The fit of one run against the same fit as a loop around scipy.optimize.curve_fit, on the same cores.

    python -m tests.benchmarks.bench_fit [--repeats=7] [--scipy_repeats=3] [--bootstrap=1000]

The run is the longest of the paper as simulated: 75 evaluations from 1.5k to 100k GPU-hours (A 0.645, B 1.70, C_mid
10909), each of 1,000 prompts x 16, with the sampling noise of these counts.

  grid       the paper's procedure: A in {0.450 .. 0.800} (71) x C_mid in [100, 40000] (100), B by least squares in each
             cell. SciPy: one curve_fit for each cell. Before anything is timed the residuals of all cells are compared.
  bootstrap  a fit with intervals and 1,000 resamples, ours to the true minimum over all A, B, C_mid. SciPy: 1,000 of
             the loops above, which is as many seconds as 1,000 times one loop.

Both in float64, in one process. Compile time is told apart: it is the first call less the median of the later ones.
Printed: medians and their ratios.
"""

import statistics
import time
import warnings

import numpy as np
from absl import app, flags
from scipy.optimize import OptimizeWarning, curve_fit

from scalerl_jax.scaling import fit_sigmoid, paper_grid
from tests.scaling.simulated import curve, sampled_passes

FLAGS = flags.FLAGS
flags.DEFINE_integer("repeats", 7, "timed calls of ours", lower_bound=1)
flags.DEFINE_integer("scipy_repeats", 3, "timed loops of SciPy", lower_bound=1)
flags.DEFINE_integer("bootstrap", 1000, "resamples", lower_bound=1)

COMPUTE = np.concatenate([[0.0], np.linspace(1500, 100_000, 75)])  # GPU-hours
ROW = (10909, 1.70, 0.645, 0.40)
SAMPLES = 16


def cell_law(initial: float, asymptote: float, midpoint: float):
    """Of compute and B alone: curve_fit fits every parameter that a function has."""
    return lambda c, b: initial + (asymptote - initial) / (1 + (midpoint / c) ** b)


def scipy_loop(compute: np.ndarray, reward: np.ndarray, initial: float) -> tuple[np.ndarray, np.ndarray]:
    """B and the sum of squares in every cell, [71, 100]; NaN where curve_fit gives up."""
    exponent = np.full((len(paper_grid.ASYMPTOTES), len(paper_grid.MIDPOINTS)), np.nan)
    ssr = exponent.copy()
    with warnings.catch_warnings(), np.errstate(over="ignore"):
        warnings.simplefilter("ignore", OptimizeWarning)
        for i, asymptote in enumerate(paper_grid.ASYMPTOTES):
            for j, midpoint in enumerate(paper_grid.MIDPOINTS):
                law = cell_law(initial, asymptote, midpoint)
                try:
                    (b,), _ = curve_fit(law, compute, reward)
                except RuntimeError:
                    continue
                exponent[i, j], ssr[i, j] = b, np.sum((reward - law(compute, b)) ** 2)
    return exponent, ssr


def timed(call, repeats: int) -> tuple[float, float]:
    """Seconds of the first call, and the median of `repeats` later ones."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds[0], statistics.median(seconds[1:])


def main(_) -> None:
    rng = np.random.default_rng(0)
    passes = sampled_passes(rng, curve(COMPUTE, *ROW), runs=1, samples=SAMPLES)[0]
    scores = passes.mean(axis=1) / SAMPLES
    initial, compute, reward = scores[0], COMPUTE[1:], scores[1:]

    def grid():
        return paper_grid.fit_cells(compute, reward, initial_reward=initial)

    first, ours = timed(grid, FLAGS.repeats)
    loops = []
    for _ in range(FLAGS.scipy_repeats):
        start = time.perf_counter()
        exponent, ssr = scipy_loop(compute, reward, initial)
        loops.append(time.perf_counter() - start)
    theirs = statistics.median(loops)
    positive = exponent > 0
    found = grid()
    apart = np.abs(found.ssr - ssr)[positive].max()
    assert apart < 1e-6, f"a cell's residual is {apart:g} from SciPy's"
    cells = exponent.size
    print(f"grid       {len(compute)} points x {cells} cells; residuals agree to {apart:.1e} in {positive.sum()} cells")
    print(f"           ours {1e3 * ours:8.1f} ms   SciPy {1e3 * theirs:9.1f} ms   ratio {theirs / ours:8.1f}")
    print(f"           ours compiles in {first - ours:.2f} s more, once", flush=True)

    def whole():
        return fit_sigmoid(COMPUTE, scores, counts=(passes, SAMPLES), bootstrap=FLAGS.bootstrap)

    first, ours = timed(whole, FLAGS.repeats)
    extrapolated = FLAGS.bootstrap * theirs
    print(f"bootstrap  {FLAGS.bootstrap} resamples, with profile intervals")
    print(f"           ours {ours:8.3f} s    SciPy {extrapolated:9.0f} s    ratio {extrapolated / ours:8.0f}")
    print(f"           ours compiles in {first - ours:.2f} s more, once")


if __name__ == "__main__":
    app.run(main)

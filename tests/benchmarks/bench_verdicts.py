"""Verdicts on simulated runs whose end is known: by the sigmoid alone, and over all laws that the points allow.

    python -m tests.benchmarks.bench_verdicts [--pairs=richards,power,...] [--shares=2,3,6,10] [--samples=2048,16000]
        [--repeats=40] [--evaluations=24] [--seed=0]

A pair is two runs with their laws (tests/scaling/simulated.py) and asymptotes, evaluated up to the same share of C_mid
with the noise of `samples` answers counted. Printed for each: how often the verdict of the comparison names the run
that ends higher, names the other (or one of two that end alike), and leaves it; how many of the runs are identified,
and of how many of these the true asymptote lies outside the interval. At most 5 % of the verdicts should be wrong.
"""

import collections
import dataclasses

import numpy as np
from absl import app, flags

from scalerl_jax.scaling import compare, fit_sigmoid, identify
from scalerl_jax.scaling.family import find_misfit
from scalerl_jax.scaling.fit import Run, SigmoidFit
from tests.scaling.simulated import evaluated, sigmoid_intervals

PAIRS = {
    # end alike
    "sigmoids": ("sigmoid 1.5", 0.82, "sigmoid 3", 0.82),
    "richards": ("richards .3", 0.82, "richards 3", 0.82),
    "power": ("power", 0.82, "exponential", 0.82),
    "exponential": ("sigmoid", 0.82, "exponential", 0.82),
    "gompertz": ("gompertz", 0.82, "sigmoid", 0.82),
    "stretched": ("stretched .5", 0.82, "stretched 2", 0.82),
    "logistic": ("logistic", 0.82, "power", 0.82),
    "phases": ("two phases", 0.82, "sigmoid", 0.82),
    "plateau": ("plateau", 0.82, "sigmoid", 0.82),
    # the first ends higher
    "higher": ("sigmoid", 0.82, "sigmoid", 0.73),
    "high": ("sigmoid", 0.91, "sigmoid", 0.82),
    "steep": ("sigmoid 3", 0.82, "sigmoid 3", 0.73),
    "others": ("exponential", 0.82, "richards .3", 0.73),
    "far": ("sigmoid", 0.91, "sigmoid", 0.73),
}
FLAGS = flags.FLAGS
flags.DEFINE_list("pairs", list(PAIRS), f"of {', '.join(PAIRS)}")
flags.DEFINE_list("shares", ["2", "3", "6", "10"], "where the evaluations end, in C_mid")
flags.DEFINE_list("samples", ["2048", "16000"], "answers of an evaluation")
flags.DEFINE_integer("repeats", 40, "simulated pairs of each kind", lower_bound=1)
flags.DEFINE_integer("evaluations", 24, "of a run", lower_bound=4)
flags.DEFINE_integer("seed", 0, "of the simulation")
HEAD = ("right", "wrong", "left", "identified", "outside")


def by_sigmoid(fit: SigmoidFit) -> SigmoidFit:
    """The fit as if the sigmoid were the only law."""
    intervals = sigmoid_intervals(fit)
    points = fit.state.points
    why = find_misfit(points, fit.predict(points.compute))
    reached = float(fit.predict(points.most))
    ends = (*intervals["asymptote"], intervals["midpoint"][1])
    told = identify.is_identified(*ends, initial=fit.initial_reward, most=points.most, reached=reached)
    identified = bool(fit.rises and not why and told)
    return dataclasses.replace(fit, intervals=intervals, identified=identified, laws=None)


def count(name: str, share: float, samples: int) -> list[collections.Counter]:
    """What came of it by the sigmoid alone, and over all laws."""
    first, high, second, low = PAIRS[name]
    rng = np.random.default_rng([FLAGS.seed, list(PAIRS).index(name), int(100 * share), samples])
    counts = [collections.Counter(), collections.Counter()]
    for _ in range(FLAGS.repeats):
        runs: list[Run] = []
        for law, asymptote in ((first, high), (second, low)):
            compute, reward, passes = evaluated(
                rng, law, asymptote, share=share, evaluations=FLAGS.evaluations, samples=samples
            )
            runs.append(Run(law, compute, reward, fit_sigmoid(compute, reward, counts=passes)))
        alone = [dataclasses.replace(run, fit=by_sigmoid(run.fit)) for run in runs]
        for counted, pair_of in zip(counts, (alone, runs)):
            own, others = ((run.fit.intervals["asymptote"],) * 2 for run in pair_of)  # the 90 % is not looked at
            _, word = compare.judge(pair_of[0], own, pair_of[1], others, identify.SEED_MARGIN)
            true = "first" if high > low else "none"
            counted["left" if word in ("none", "open") else "right" if word == true else "wrong"] += 1
            for run, asymptote in zip(pair_of, (high, low)):
                least, most = run.fit.intervals["asymptote"]
                counted["identified"] += run.fit.identified
                counted["outside"] += run.fit.identified and not least <= asymptote <= most
    return counts


def main(_) -> None:
    for name in FLAGS.pairs:
        if name not in PAIRS:
            raise app.UsageError(f"--pairs: unknown pair {name!r}; choose from {', '.join(PAIRS)}")
    print(f"{FLAGS.repeats} pairs each, sigmoid alone | all laws: {', '.join(HEAD)} (of {2 * FLAGS.repeats} runs)")
    for share in map(float, FLAGS.shares):
        for samples in map(int, FLAGS.samples):
            print(f"up to {share:g} C_mid, {samples} samples", flush=True)
            for pair in FLAGS.pairs:
                alone, of_all = count(pair, share, samples)
                columns = (" ".join(f"{counted[word]:4d}" for word in HEAD) for counted in (alone, of_all))
                first, high, second, low = PAIRS[pair]
                print(f"  {f'{first} {high:g}, {second} {low:g}':36s} {'  |'.join(columns)}", flush=True)


if __name__ == "__main__":
    app.run(main)

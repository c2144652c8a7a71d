"""The 90 % band from half of simulated runs: smooth ones, ones that stop rising, and ones that fall.

    python -m tests.benchmarks.bench_bands [--repeats=4] [--evaluations=24] [--samples=2048] [--seed=0] [--shares=2,3,6]

Smooth runs follow the laws of tests/scaling/simulated.py up to so many C_mid. Others follow the sigmoid and then stay
where they are, from a place before or behind the half on, or lose a part of their gain at once. The forecast is the
average of all laws with the calibration that comes with the package. Printed for each kind: how many of the later
evaluations are in the band; the same without the runs of which the fit says, once all evaluations are there, that no
law describes them or that they fall; and how many runs these are.
"""

from collections.abc import Callable

import numpy as np
from absl import app, flags

from scalerl_jax.scaling import fit_sigmoid
from scalerl_jax.scaling.backtest import forecast_at_half
from tests.scaling.simulated import GAINS

FLAGS = flags.FLAGS
flags.DEFINE_integer("repeats", 4, "runs of each kind", lower_bound=1)
flags.DEFINE_integer("evaluations", 24, "of a run", lower_bound=8)
flags.DEFINE_integer("samples", 2048, "answers of an evaluation")
flags.DEFINE_integer("seed", 0, "of the simulation")
flags.DEFINE_list("shares", ["2", "3", "6"], "where the evaluations end, in C_mid")

Gain = Callable[[np.ndarray, float], np.ndarray]  # of the place in the run [N], from 0 to 1, and its end in C_mid


def smooth(law: str) -> Gain:
    return lambda place, share: GAINS[law](place * share)


def stops(where: float) -> Gain:
    return lambda place, share: GAINS["sigmoid"](np.minimum(place, where) * share)


def falls(where: float, part: float) -> Gain:
    return lambda place, share: GAINS["sigmoid"](place * share) * np.where(place > where, 1 - part, 1.0)


KINDS: dict[str, list[Gain]] = {
    "smooth": [smooth(law) for law in GAINS if law not in ("two phases", "plateau")],
    "stop rising before the half": [stops(where) for where in (0.2, 0.3, 0.4, 0.45)],
    "stop rising later": [stops(where) for where in (0.55, 0.7, 0.85)],
    "fall before the half": [falls(0.35, part) for part in (0.1, 0.2, 0.4)],
    "fall later": [falls(0.75, part) for part in (0.1, 0.2, 0.4)],
}


def main(_) -> None:
    print(f"{'kind':30s} runs  in the 90 % band  without those told  told  mean error at the end", flush=True)
    for index, (kind, gains) in enumerate(KINDS.items()):
        rng = np.random.default_rng([FLAGS.seed, index])
        held, errors, told = [], [], []
        for gain in gains:
            for share in map(float, FLAGS.shares):
                for _ in range(FLAGS.repeats):
                    place = np.arange(FLAGS.evaluations + 1) / FLAGS.evaluations
                    score = 0.3 + 0.5 * np.append(0.0, gain(place[1:], share))
                    trials = np.full(len(score), FLAGS.samples)
                    passes = rng.binomial(trials, score)
                    found = forecast_at_half(place, passes / trials, (passes, trials))
                    whole = fit_sigmoid(place, passes / trials, counts=(passes, trials))
                    held.append(found.within / found.later)
                    errors.append(abs(found.error))
                    told.append(bool(whole.misfit) or not whole.rises)
        left = np.array(held)[~np.array(told)]
        print(
            f"{kind:30s} {len(held):4d}  {np.mean(held):16.0%}  {np.mean(left) if len(left) else np.nan:18.0%}  "
            f"{sum(told):4d}  {np.mean(errors):.3f}",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)

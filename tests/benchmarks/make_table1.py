"""Writes configs/table1.csv: evaluations as the runs of the paper's Table 1 would give them.

    python -m tests.benchmarks.make_table1

Each row of the table is drawn as its published curve with the noise of 1,000 prompts x 16 samples, at 40 evaluations
from tests.support.paths import ROOT
from the burn-in of 1,500 GPU-hours to the end of the run, and one at compute 0.
"""

import csv
import os

import numpy as np

from tests.scaling.simulated import TABLE_1, curve, sampled_passes
from tests.support.paths import ROOT

PATH = os.path.join(ROOT, "configs", "table1.csv")
# GPU-hours at which the runs end; all others at 16,000.
ENDS = {"32k": 50_000, "Scout": 45_000, "bs2048": 100_000}
PROMPTS, SAMPLES = 1000, 16


def main() -> None:
    rng = np.random.default_rng(0)
    with open(PATH, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["run", "gpu_hours", "pass_rate", "passes", "trials"])
        for run, (midpoint, exponent, asymptote, initial) in TABLE_1.items():
            hours = np.concatenate([[0], np.linspace(1500, ENDS.get(run, 16_000), 40).round()])
            scores = curve(hours, midpoint, exponent, asymptote, initial)
            passes = sampled_passes(rng, scores, runs=1, prompts=PROMPTS, samples=SAMPLES)[0].sum(axis=-1)
            trials = PROMPTS * SAMPLES
            for at, count in zip(hours, passes):
                out.writerow([run, int(at), f"{count / trials:.5f}", int(count), trials])
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()

"""scalerl-fit on very many rows: seconds, CPU seconds and peak memory of the whole command, for each kind of file.

    python -m tests.benchmarks.bench_fit_rows [--rows=1000000] [--repeats=3]

The rows are one run: a published curve (A 0.645, B 1.70, C_mid 10909) from 1 to 100k GPU-hours, with noise of 0.05, in
a file of (step, reward). Each command is a process of its own, imports and compilation included; beside it stands the
same command on 1,000 rows spread alike, so that what the rows themselves cost can be told.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

from tests.scaling.simulated import curve

FLAGS = flags.FLAGS
flags.DEFINE_integer("rows", 1_000_000, "rows of the large files", lower_bound=2001)
flags.DEFINE_integer("repeats", 3, "timed runs of each command", lower_bound=1)

ROW = (10909, 1.70, 0.645, 0.40)
_FEW = 1000


def write(path: pathlib.Path, rows: int) -> None:
    compute = np.concatenate([[0.0], np.linspace(1.0, 100_000, rows)])
    reward = np.clip(curve(compute, *ROW) + 0.05 * np.random.default_rng(0).standard_normal(rows + 1), 0, 1)
    with open(path, "w") as file:
        if path.suffix == ".csv":
            file.write("step,reward\n")
            file.writelines(f"{c:.3f},{r:.5f}\n" for c, r in zip(compute, reward))
        else:
            file.writelines(json.dumps({"step": c, "reward": r}) + "\n" for c, r in zip(compute, reward))


def command(path: pathlib.Path) -> tuple[float, float, float]:
    """Seconds, seconds of CPU, and the most memory of the process in MB."""
    arguments = [str(path), "--x=step", "--y=reward", f"--out={path.parent / 'out'}"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "scalerl_jax.scaling.commands.scalerl_fit", *arguments], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, f"scalerl-fit {path} failed"
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main(_) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rows in (_FEW, FLAGS.rows):
            for kind in ("csv", "jsonl"):
                path = pathlib.Path(folder, f"{rows}.{kind}")
                write(path, rows)
                found = [command(path) for _ in range(FLAGS.repeats)]
                seconds, busy = (statistics.median(one[i] for one in found) for i in (0, 1))
                memory = max(one[2] for one in found)
                print(f"{rows:>9,} rows  {kind:5}  {seconds:6.1f} s  {busy:6.1f} s CPU  {memory:6.0f} MB", flush=True)


if __name__ == "__main__":
    app.run(main)

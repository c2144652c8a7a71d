"""The quickstart's forecast at half, over seeds, on a quiet machine and on one that is busy at times.

    python -m tests.benchmarks.bench_quickstarts --folder=DIR [--seeds=5] [--machines=quiet,busy] [--x=AXIS,...]

Makes the runs that are not finished in DIR yet, one after another (5 to 10 minutes each), killed at any time the same
command goes on. On a busy machine two endless loops start and stop at random moments, a quarter to two minutes apart.
Printed for each run and axis: the pass rate before and after, the forecast at half of the compute with its 90 %
interval, what the last quarter came to, the error, and how many of the later evaluations were in the band.
"""

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
from absl import app, flags

from scalerl_jax.report.score import backtest
from scalerl_jax.run.jsonl import read_rows
from tests.support.paths import ROOT

FLAGS = flags.FLAGS
_FOLDER = flags.DEFINE_string("folder", None, "of the runs", required=True)
_SEEDS = flags.DEFINE_integer("seeds", 5, "0 to this less one", lower_bound=1)
_MACHINES = flags.DEFINE_list("machines", ["quiet", "busy"], "quiet, busy")
_AXES = flags.DEFINE_list("x", ["typical_hours", "device_hours"], "columns that the forecast is made by")
CONFIG = "configs/quickstart.py"
SECONDS = (15.0, 120.0)  # that loops run, and that they do not


def run(workdir: str, seed: int, busy: bool) -> None:
    """A whole quickstart. Raises CalledProcessError."""
    start = f"{workdir}-warm-start"
    arguments = [f"--config={CONFIG}", f"--config.seed={seed}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with busy_at_times(seed) if busy else contextlib.nullcontext(), open(f"{workdir}.log", "ab") as log:
        for module, *others in (
            ("scalerl_jax.sft", f"--workdir={start}"),
            ("scalerl_jax.train", f"--workdir={workdir}", f"--config.model.path={start}/model"),
        ):
            command = [sys.executable, "-m", module, *arguments, *others]
            subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)


@contextlib.contextmanager
def busy_at_times(seed: int) -> Iterator[None]:
    rng, over = random.Random(seed), threading.Event()

    def loops() -> None:
        while not over.wait(rng.uniform(*SECONDS)):
            hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
            over.wait(rng.uniform(*SECONDS))
            for hog in hogs:
                hog.kill()
                hog.wait()

    thread = threading.Thread(target=loops, name="busy at times", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main(_) -> None:
    if unknown := set(_MACHINES.value) - {"quiet", "busy"}:
        raise app.UsageError(f"--machines: unknown {', '.join(sorted(unknown))}; choose from quiet, busy")
    os.makedirs(_FOLDER.value, exist_ok=True)
    print("machine  seed  before  after  axis           forecast                measured  error   within", flush=True)
    for machine in _MACHINES.value:
        errors: dict[str, list[float]] = {axis: [] for axis in _AXES.value}
        held = {axis: np.zeros(2, int) for axis in _AXES.value}
        for seed in range(_SEEDS.value):
            workdir = os.path.abspath(os.path.join(_FOLDER.value, f"{machine}_{seed}"))
            if not os.path.exists(os.path.join(workdir, "report.html")):
                run(workdir, seed, machine == "busy")
            rows = list(read_rows(os.path.join(workdir, "evals.jsonl")))
            for axis in _AXES.value:
                found, why = backtest(rows, axis)
                if found is None:
                    raise ValueError(f"{workdir}: {why}")
                errors[axis].append(found.error)
                held[axis] += found.within, found.later
                score = found.score
                print(
                    f"{machine:7s}  {seed:4d}  {rows[0]['pass_rate']:.3f}   {rows[-1]['pass_rate']:.3f}  {axis:13s}  "
                    f"{score.value:.3f} ({score.low:.3f} to {score.high:.3f})  {found.measured:.3f}     "
                    f"{found.error:+.3f}  {found.within} of {found.later}",
                    flush=True,
                )
        for axis in _AXES.value:
            within, later = held[axis]
            print(
                f"{machine}, {axis}: mean error {np.mean(np.abs(errors[axis])):.3f}; {within} of {later} later "
                f"evaluations in the 90 % band ({within / later:.0%})",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)

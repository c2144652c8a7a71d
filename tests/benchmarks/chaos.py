"""A run under chaos for as long as you like: is the memory of every process flat, and does the run go to its end?

    python -m tests.benchmarks.chaos --model=runs/quickstart-warm-start/model --out=runs/chaos [--minutes=30]

The quickstart's run with so many updates that it lasts, three local servers, and every --every seconds one of them
killed or frozen in turn (tests/train/chaos.py); server 0 is frozen but never killed, so that a server's memory is seen
over the whole time. After --minutes the chaos ends and the trainer is stopped with SIGINT, as a user stops it. Then
    --out/memory.csv   seconds, role, process, MiB (resident, less what is shared), once a second
    --out/chaos.png    a line for every process, the deaths and freezes below
and printed: what was done to the servers; updates, evaluations and lag; for each role the median of its memory in the
second and in the last quarter of the time, and the slope between, in MiB an hour. A server counts from its first minute
on: what it takes to start is no leak. Nothing lost, nothing twice, lag <= k is checked on the rows there are.
"""

import csv
import os
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
from absl import app, flags

from launch.commands import restart_with_tuned_malloc
from scalerl_jax.config_io import load_file, override
from scalerl_jax.run.jsonl import read_rows
from tests.support.paths import ROOT
from tests.train.chaos import Chaos, Reading, check_rows

FLAGS = flags.FLAGS
flags.DEFINE_string("model", None, "Hugging Face folder to start from: the quickstart's warm start", required=True)
flags.DEFINE_string("out", None, "folder of the run and of what is drawn; must not be there", required=True)
flags.DEFINE_float("minutes", 30.0, "how long")
flags.DEFINE_float("every", 5.0, "seconds between two events")
flags.DEFINE_float("frozen", 7.0, "seconds that a frozen server sleeps")
flags.DEFINE_integer("servers", 3, "local servers")

CONFIG = os.path.join(ROOT, "configs", "quickstart.py")
SETTLED_SECONDS = 60.0  # a process is no longer starting


def fields() -> dict[str, object]:
    return {
        "max_steps": 100_000,
        "model.path": os.path.abspath(FLAGS.model),
        "curriculum.no_positive_resampling_at": 1.1,  # prompts for ever
        "evaluation.every": 25,  # the forecast is first fitted within the first quarter
        "evaluation.prompts": 64,
        "evaluation.samples": 4,
        "checkpoint.every": 20,
        "fleet.servers": FLAGS.servers,
        "fleet.heartbeat_seconds": 0.5,
        "fleet.status_seconds": 2.0,
        "fleet.silence_seconds": 4.0,
    }


def settled(memory: list[Reading]) -> dict[str, list[tuple[float, float]]]:
    """(seconds, MiB) by role, without each process's first minute."""
    born: dict[int, float] = {}
    out: dict[str, list[tuple[float, float]]] = {}
    for reading in memory:
        first = born.setdefault(reading.process, reading.seconds)
        if reading.seconds - first >= SETTLED_SECONDS:
            out.setdefault(reading.role, []).append((reading.seconds, reading.mebibytes))
    return out


def draw(chaos: Chaos, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(10, 6), height_ratios=[4, 1], layout="constrained"
    )
    roles = sorted({reading.role for reading in chaos.memory})
    colours = {role: f"C{number}" for number, role in enumerate(roles)}
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for reading in chaos.memory:
        lines.setdefault((reading.role, reading.process), []).append((reading.seconds / 60, reading.mebibytes))
    named = set()
    for (role, _), points in lines.items():
        above.plot(*zip(*points), color=colours[role], linewidth=1, label=None if role in named else role)
        named.add(role)
    above.set_ylabel("resident memory of its own, MiB")
    above.set_ylim(bottom=0)
    above.legend(loc="upper left", fontsize=8)
    kinds = ["kill", "freeze"]
    for kind, marker in zip(kinds, ("x", "s")):
        points = [(seconds / 60, role) for seconds, done, role in chaos.events if done == kind]
        if points:
            below.scatter(*zip(*sorted(points, key=lambda p: p[1])), marker=marker, s=12, label=kind)
    below.legend(loc="upper left", fontsize=8)
    below.set_xlabel("minutes")
    figure.savefig(path, dpi=110)


def main(_: list[str]) -> None:
    if os.path.exists(FLAGS.out):
        raise SystemExit(f"--out={FLAGS.out}: is there already")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no process stays behind
    workdir = os.path.join(FLAGS.out, "run")
    os.makedirs(FLAGS.out)
    config = load_file(CONFIG)
    given = [f"--config.{name}={value}" for name, value in fields().items()]
    for name, value in fields().items():
        override(config, name, str(value))
    command = [sys.executable, "-m", "scalerl_jax.train", f"--config={CONFIG}", f"--workdir={workdir}", *given]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    # A shell that puts us in the background makes us deaf to SIGINT, and our children with us.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.path.join(FLAGS.out, "output.log"), "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            rows = os.path.join(workdir, "metrics.jsonl")
            while not (os.path.exists(rows) and os.path.getsize(rows)):
                if process.poll() is not None:
                    raise SystemExit(f"the run has ended: see {log.name}")
                time.sleep(0.2)
            spared = ("server 0",)
            with Chaos(process.pid, every=FLAGS.every, frozen_seconds=FLAGS.frozen, spared=spared) as chaos:
                while time.monotonic() - chaos.began < 60 * FLAGS.minutes and process.poll() is None:
                    time.sleep(0.5)
                alive = process.poll() is None
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    with open(os.path.join(FLAGS.out, "memory.csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["seconds", "role", "process", "mebibytes"])
        for r in chaos.memory:
            writer.writerow([round(r.seconds, 1), r.role, r.process, round(r.mebibytes, 1)])
    draw(chaos, os.path.join(FLAGS.out, "chaos.png"))

    metrics = read_rows(os.path.join(workdir, "metrics.jsonl"))
    check_rows(metrics, config)
    lags = [int(lag) for row in metrics for lag in row["lags"]]
    print(f"the trainer was {'alive at the end' if alive else 'gone'}, and left with code {code}")
    print(f"{chaos.count('kill')} killed, {chaos.count('freeze')} frozen in {FLAGS.minutes:g} minutes")
    print(
        f"{len(metrics)} updates, groups in order and each once; "
        f"lag at most {max(lags)} of {config.pacing.max_off_policy_steps}"
    )
    evaluations = read_rows(os.path.join(workdir, "evals.jsonl"))
    print("held-out pass rate", " ".join(f"{row['step']}:{row['pass_rate']:.3f}" for row in evaluations))
    print("role                 processes   second quarter   last quarter   slope, MiB/h")
    end = 60 * FLAGS.minutes
    for role, points in sorted(settled(chaos.memory).items()):
        early = [mebibytes for seconds, mebibytes in points if end / 4 <= seconds < end / 2]
        late = [mebibytes for seconds, mebibytes in points if seconds >= 3 * end / 4]
        count = len({reading.process for reading in chaos.memory if reading.role == role})
        if not early or not late:
            print(f"{role:20s} {count:9d}   no process of it has stood for {SETTLED_SECONDS:.0f} s early and late")
            continue
        times, values = np.array([p for p in points if p[0] >= end / 4]).T
        slope = 3600 * np.polyfit(times, values, 1)[0]
        print(f"{role:20s} {count:9d} {statistics.median(early):16.0f} {statistics.median(late):14.0f} {slope:14.1f}")


if __name__ == "__main__":
    restart_with_tuned_malloc()  # as the commands do
    app.run(main)

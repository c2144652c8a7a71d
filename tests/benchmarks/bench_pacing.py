"""pipeline(8) against phased(8): the time of the same updates, trainer and generator on a core each.

    python -m tests.benchmarks.bench_pacing [--updates=32] [--repeats=1] [--pinned_only]

Whole runs of scalerl-train with one scalerl-serve --engine=jax, on a policy of random weights that stops at every
position about as often: completions of geometric length, many short and a few long. Pinned, the trainer has the first
of two cores and the generator the second (os.sched_setaffinity, one XLA thread each); unpinned, both may use both.

phased(8) samples 8 batches from one version and then makes 8 updates, so either side waits for the other and for the
longest completions; in pipeline(8) both work all the time, and the batch time is that of the slower one. With the two
roles' times equal the ratio cannot go below 0.5, and a factor of two between them allows 0.67: so the ratio says
something only where the roles' busy times, printed first, are within a factor of two.

Measured: wall seconds of `updates` updates after the first 8 (compilation, the first phase), from metrics.jsonl; busy
and idle shares of both roles over the same updates, from the ledger.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

from launch.commands import restart_with_tuned_malloc
from scalerl_jax.run.jsonl import read_rows
from tests.benchmarks.folders import write_stopping_policy
from tests.support.paths import ROOT

FLAGS = flags.FLAGS
flags.DEFINE_integer("updates", 32, "that are timed, a multiple of 8", lower_bound=8)
flags.DEFINE_integer("repeats", 1, "runs of each kind, in turn")
flags.DEFINE_bool("pinned_only", False, "leave out the unpinned runs")
flags.DEFINE_integer("width", 64, "of the decoder")
flags.DEFINE_integer("layers", 3, "of the decoder")
flags.DEFINE_float("stop_every", 60.0, "tokens between two stops, on average")
flags.DEFINE_integer("groups", 16, "prompts of a batch")
flags.DEFINE_integer("slots", 8, "of the generator")
flags.DEFINE_integer("decode_chunk", 1, "of the generator: with few slots it is then as slow as the trainer")

K, GROUP, LONGEST = 8, 8, 320

CONFIG = """
from scalerl_jax.config import Config

def get_config():
    config = Config(seed=1, max_steps={updates})
    config.model.path = {model!r}
    config.model.compute_dtype = config.model.sync_dtype = "float32"
    config.model.remat = "none"
    config.environment.name = "math"
    config.environment.train, config.environment.validation = {task!r}, {held_out!r}
    config.curriculum.no_positive_resampling_at = 1.1
    config.rollout.prompts_per_step, config.rollout.group_size = {groups}, {group}
    config.rollout.max_prompt_tokens = 16
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    config.rollout.answer_budget = {longest}
    config.objective.truncated = "fail"
    config.objective.filter_zero_variance = False
    config.optimizer.learning_rate = 1e-9
    config.learner.seq_len, config.learner.micro_batch_rows, config.learner.logprob_chunk = 352, 12, 128
    config.pacing.kind, config.pacing.max_off_policy_steps = {kind!r}, {k}
    config.evaluation.every, config.evaluation.prompts, config.evaluation.samples = 10_000, 1, 1
    config.checkpoint.every = 10_000
    config.telemetry.tensorboard = False
    config.telemetry.samples_every = 10_000
    return config
"""


@contextlib.contextmanager
def generator(folder: str, model: str, core: int | None) -> Iterator[str]:
    """The address of a server on this core; None: on all."""
    port_file = os.path.join(folder, "port")
    command = [
        *(sys.executable, "-m", "rollout_server.serve", "--engine=jax", f"--model={model}", "--port=0"),
        *(f"--port_file={port_file}", "--exit_with_parent", "--compute_dtype=float32", "--sync_dtype=float32"),
        *(f"--maximum_tokens={LONGEST + 16}", f"--slots={FLAGS.slots}", f"--queue={2 * FLAGS.slots}"),
        f"--decode_chunk={FLAGS.decode_chunk}",
    ]
    with open(os.path.join(folder, "server.log"), "wb") as log:
        process = start(command, core, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            while not os.path.exists(port_file):
                assert process.poll() is None, open(log.name).read()  # noqa: SIM115
                time.sleep(0.05)
            with open(port_file, encoding="ascii") as file:
                yield f"127.0.0.1:{file.read().strip()}"
        finally:
            process.kill()
            process.wait()


def start(command: Sequence[str], core: int | None, **options: Any) -> subprocess.Popen:
    """One XLA thread where it has one core."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
    if core is not None:
        environment["NPROC"] = "1"
        # Before the program begins, so that every thread of it is there; not between fork and exec, which jax forbids.
        pin = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", pin, *command]
    return subprocess.Popen(command, cwd=ROOT, env=environment, **options)


def run(kind: str, folder: str, model: str, cores: tuple[int, int] | None) -> dict[str, float]:
    """Seconds of the timed updates; busy and idle seconds of both roles in them; tokens sampled."""
    os.makedirs(folder)
    task, held_out, path, workdir = (
        os.path.join(folder, name) for name in ("task.jsonl", "held_out.jsonl", "config.py", "run")
    )
    updates = K + FLAGS.updates
    for name, numbers in ((task, range(64)), (held_out, range(64, 65))):
        with open(name, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"prompt": f"{n} abc", "answer": str(n)}) + "\n" for n in numbers)
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            CONFIG.format(
                updates=updates,
                model=model,
                task=task,
                held_out=held_out,
                groups=FLAGS.groups,
                group=GROUP,
                longest=LONGEST,
                kind=kind,
                k=K,
            )
        )
    with generator(folder, model, cores and cores[1]) as address:
        command = [sys.executable, "-m", "scalerl_jax.train", f"--config={path}", f"--workdir={workdir}"]
        with open(os.path.join(folder, "train.log"), "wb") as log:
            process = start([*command, f"--servers={address}"], cores and cores[0], stdout=log, stderr=log)
            if process.wait():
                raise RuntimeError(f"the run has failed: {open(log.name).read()[-2000:]}")  # noqa: SIM115
    rows = {row["step"]: row for row in read_rows(os.path.join(workdir, "metrics.jsonl"))}
    first, last = rows[K], rows[updates]
    hours = {
        name: last["compute"][f"{name}_hours"] - first["compute"][f"{name}_hours"]
        for name in ("trainer_busy", "trainer_idle", "generator_busy", "generator_idle")
    }
    lengths = [rows[step]["length_mean"] for step in range(K + 1, updates + 1)]
    return {
        "seconds": last["time"] - first["time"],
        "tokens": last["compute"]["sampled_tokens"] - first["compute"]["sampled_tokens"],
        "length_mean": statistics.mean(lengths),
        "length_max": max(rows[step]["length_max"] for step in range(K + 1, updates + 1)),
        "lag_mean": statistics.mean(rows[step]["lag_mean"] for step in range(K + 1, updates + 1)),
        **{name: 3600 * value for name, value in hours.items()},
    }


def report(title: str, runs: dict[str, list[dict[str, float]]]) -> None:
    print(f"\n{title}")
    print("          seconds  trainer busy idle  generator busy idle   of the time   tokens   length mean max   lag")
    for kind, results in runs.items():
        r = {name: statistics.median(result[name] for result in results) for name in results[0]}
        shares = f"{100 * r['trainer_busy'] / r['seconds']:.0f}% {100 * r['generator_busy'] / r['seconds']:.0f}%"
        print(
            f"{kind:8s} {r['seconds']:8.1f} {r['trainer_busy']:13.1f} {r['trainer_idle']:4.1f} "
            f"{r['generator_busy']:15.1f} {r['generator_idle']:4.1f} {shares:>13s} {r['tokens']:8.0f} "
            f"{r['length_mean']:13.0f} {r['length_max']:3.0f} {r['lag_mean']:5.1f}"
        )
    pairs = zip(runs["pipeline"], runs["phased"])
    ratios = [pipeline["seconds"] / phased["seconds"] for pipeline, phased in pairs]
    busy = [r["trainer_busy"] / r["generator_busy"] for r in runs["phased"]]
    print(f"trainer's busy time over the generator's (phased): {statistics.median(busy):.2f}")
    print(f"pipeline({K}) / phased({K}): {statistics.median(ratios):.2f}   each: {[round(r, 2) for r in ratios]}")


def main(_: list[str]) -> None:
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise SystemExit("two cores are needed")
    with tempfile.TemporaryDirectory() as folder:
        model = write_stopping_policy(folder, width=FLAGS.width, layers=FLAGS.layers, stop_every=FLAGS.stop_every)
        modes: dict[str, tuple[int, int] | None] = {"pinned": (available[0], available[1])}
        if not FLAGS.pinned_only:
            modes["unpinned"] = None
        for mode, cores in modes.items():
            runs: dict[str, list[dict[str, float]]] = {"phased": [], "pipeline": []}
            for repeat in range(FLAGS.repeats):
                for kind in runs:
                    runs[kind].append(run(kind, os.path.join(folder, f"{mode}-{kind}-{repeat}"), model, cores))
            report(f"{mode}, {FLAGS.updates} updates of {FLAGS.groups} x {GROUP} completions", runs)


if __name__ == "__main__":
    restart_with_tuned_malloc()  # as the commands do
    app.run(main)

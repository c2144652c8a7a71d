"""The quickstart's two commands on the device: a warm start, then 20 steps of RL beside one server on the same GPU.

Long, since it says nothing new on a CPU, where it costs 35 CPU seconds; `make test-accelerator` has it all the same.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.paths import ROOT

STEPS = 20
COMMON = [f"--config={ROOT / 'configs' / 'quickstart.py'}", "--config.telemetry.tensorboard=False"]


def run(command: str, sizes, *flags: str) -> str:
    """As the installed command runs: malloc tuned, JAX's share of the GPU chosen by the command itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA_PYTHON_CLIENT")}
    if sizes.platform == "gpu":
        environment["JAX_PLATFORMS"] = "cuda,cpu"  # no GPU is an error then, and not a run on the CPU
    program = f"import sys; sys.argv[0] = 'scalerl-{command}'; from launch.commands import {command}; {command}()"
    paths = [str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-c", program, *COMMON, *flags],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
def test_the_quickstart_learns_here(device, sizes, tmp_path):
    dtypes = [f"--config.model.{name}=bfloat16" for name in ("compute_dtype", "sync_dtype")]
    run(
        "sft",
        sizes,
        f"--workdir={tmp_path / 'warm'}",
        f"--config.sft.max_steps={sizes.pick(20, 220)}",
        f"--config.sft.warmup_steps={sizes.pick(5, 40)}",
    )
    said = run(
        "train",
        sizes,
        f"--workdir={tmp_path / 'run'}",
        f"--config.model.path={tmp_path / 'warm' / 'model'}",
        f"--config.max_steps={STEPS}",
        *(dtypes if not sizes.tiny else []),
        f"--config.fleet.compute_dtype={'float32' if sizes.tiny else 'bfloat16'}",
        "--config.fleet.servers=1",
        f"--config.fleet.slots={sizes.pick(16, 64)}",
        f"--config.rollout.prompts_per_step={sizes.pick(4, 24)}",
        f"--config.rollout.group_size={sizes.pick(4, 8)}",
        f"--config.learner.micro_batch_rows={sizes.pick(4, 24)}",
        f"--config.evaluation.prompts={sizes.pick(8, 256)}",
        f"--config.evaluation.samples={sizes.pick(2, 8)}",
        "--config.evaluation.every=10",
        "--config.checkpoint.every=10",
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()]
    log = (tmp_path / "run" / "logs" / "server-0.log").read_text()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in evaluations] == [0, 10, 20]
    trained = [number for row in rows for number, _ in row["groups"]]
    assert sorted(trained) == list(range(len(trained)))  # every group once
    assert "joined: |log-prob difference|" in said  # the two sides run the same policy
    if sizes.platform == "gpu":
        assert "the trainer takes 50%, the server 40%" in said
        assert "Falling back to cpu" not in said + log
    learned = [row for row in rows if "loss" in row]
    assert learned, "no batch had a gradient"
    for row in learned:
        assert np.isfinite([row["loss"], row["gradient_norm"], row["entropy"], row["ratio"]]).all()
        assert row["mismatch"] < 0.2 and row["effective_sample_size"] > 0.5
    print(
        f"held-out pass rate {evaluations[0]['pass_rate']:.3f} to {evaluations[-1]['pass_rate']:.3f}, "
        f"{np.median([row['update_seconds'] for row in rows]):.2f} s an update"
    )

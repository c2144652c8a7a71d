"""A run that learns from a teacher: the policy comes to say what it says, whatever dies on the way."""

import os
import pathlib
import signal

import numpy as np
import pytest

from tests.support.tiny_task import write_model
from tests.train.comparing import check_rows, config_of


def kill_server_of(workdir: str) -> None:
    """SIGKILL to the local server whose files are there."""
    flag = f"--port_file={os.path.join(workdir, 'servers', '0.port')}"
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        if flag.encode() in path.read_bytes().split(b"\0"):
            os.kill(int(path.parent.name), signal.SIGKILL)
            return
    raise AssertionError(f"no process with {flag}")


@pytest.mark.slow
def test_a_policy_becomes_its_teacher_though_teacher_and_trainer_are_killed(tmp_path, flags, start):
    teacher = write_model(str(tmp_path / "teacher"), likes="11=1", leaning=0.2)  # says 1 more often than the policy
    flags = [
        *flags,
        "--config.objective.distill=student_topk",
        "--config.objective.reward_weight=0",
        "--config.objective.truncated=penalize",  # what is cut is learned from, too
        f'--config.distill.teachers={{"one":"{teacher}"}}',
        "--config.distill.k=8",
        "--config.max_steps=24",
        "--config.curriculum.no_positive_resampling_at=2",
        "--config.optimizer.learning_rate=1e-2",
        "--config.fleet.servers=1",
    ]
    run = start(tmp_path / "run", *flags)
    run.until(lambda: len(run.metrics) >= 3, "3 updates")
    kill_server_of(run.path("teachers", "one"))
    run.until(lambda: "teacher one: every server is lost" in run.output(), "the teacher is missed")
    steps = len(run.metrics)
    run.until(lambda: len(run.metrics) >= steps + 6, "it goes on when the teacher is back")
    run.kill()
    run = start(tmp_path / "run", *flags).finish()
    check_rows(run, config_of(flags))
    assert "going on from step" in run.output()
    rows = run.metrics
    for name in ("teacher_kl", "teacher_divergence"):  # falls to a third
        values = [row[name] for row in rows]
        assert np.mean(values[-4:]) < np.mean(values[:3]) / 3, values
    assert sum(row["teachers"]["one"]["sequences"] for row in rows) > 0
    assert rows[-1]["compute"]["teacher_hours"] > 0

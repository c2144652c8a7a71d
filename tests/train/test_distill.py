"""Runs that learn from a teacher: the policy comes to say what it says, whatever dies on the way."""

import numpy as np
import pytest

from tests.support.servers import ServerProcess
from tests.support.tiny_task import write_model
from tests.train.comparing import check_rows, config_of

FLAGS = (
    "--config.objective.reward_weight=0",
    "--config.objective.truncated=penalize",  # what is cut is learned from, too
    "--config.max_steps=30",
    "--config.curriculum.no_positive_resampling_at=2",
    "--config.optimizer.learning_rate=1e-2",
    "--config.distill.k=8",
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """It says 1 more often than the policy, and 2 less."""
    return write_model(str(tmp_path_factory.mktemp("teacher") / "model"), likes="11=1", leaning=0.2)


def kl_fell(rows: list[dict]) -> bool:
    """To a third, of the policy's to its teacher."""
    kl = [row["teacher_kl"] for row in rows]
    return float(np.mean(kl[-6:])) < float(np.mean(kl[:3])) / 3


@pytest.mark.slow
def test_a_model_folder_is_a_teacher(tmp_path, flags, teacher, start):
    flags = [
        *flags,
        *FLAGS,
        "--config.objective.distill=student_topk",
        f'--config.distill.teachers={{"one":"{teacher}"}}',
    ]
    run = start(tmp_path / "run", *flags).finish()
    check_rows(run, config_of(flags))
    rows = run.metrics
    assert kl_fell(rows), rows
    divergence = [row["teacher_divergence"] for row in rows]
    assert np.mean(divergence[-6:]) < np.mean(divergence[:3]) / 3
    assert sum(row["teachers"]["one"]["sequences"] for row in rows) > 0
    assert rows[-1]["compute"]["teacher_hours"] > 0


@pytest.mark.slow
def test_a_teacher_is_replaced_and_the_trainer_killed_in_mid_run(tmp_path, flags, teacher, start):
    listed = tmp_path / "listed"
    serve = (
        "--engine=jax",
        f"--model={teacher}",
        "--compute_dtype=float32",
        "--sync_dtype=float32",
        "--maximum_tokens=64",
    )
    flags = [*flags, *FLAGS, "--config.objective.distill=topk_forward", "--config.fleet.discovery_seconds=0.2"]
    flags.append(f'--config.distill.teachers={{"one":"file:{listed}"}}')
    first, second = (ServerProcess(tmp_path, *serve, name=name) for name in ("first", "second"))
    try:
        listed.write_text(f"127.0.0.1:{first.wait().port}\n")
        run = start(tmp_path / "run", *flags)
        run.until(lambda: len(run.metrics) >= 4, "4 updates")
        first.kill()
        run.until(lambda: "teacher one: every server is lost" in run.output(), "the teacher is missed")
        listed.write_text(f"127.0.0.1:{second.wait().port}\n")
        steps = len(run.metrics)
        run.until(lambda: len(run.metrics) >= steps + 4, "it goes on with another server")
        run.kill()
        run = start(tmp_path / "run", *flags).finish()
    finally:
        for server in (first, second):
            server.close()
    check_rows(run, config_of(flags))
    assert kl_fell(run.metrics), run.metrics
    assert "going on from step" in run.output()

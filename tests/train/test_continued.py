"""A run goes on as the same run with what does not change what it learns, and with more updates."""

import os

import pytest

from tests.support.runs import config_of, read
from tests.train.comparing import PACED, compare, last_checkpoint

pytestmark = pytest.mark.slow


def test_another_machine_and_more_updates_make_the_same_run(tmp_path, flags, replayed, start):
    """Half of it on one device; the other half, begun as more updates of a finished run, on eight."""
    # Adam divides by the gradient's size: with its epsilon at 1e-15 the rounding of a zero would count as a gradient.
    flags = [*flags, *replayed(PACED), "--config.optimizer.epsilon=1e-4", "--config.optimizer.learning_rate=1e-3"]
    half, whole_length = ["--config.max_steps=4"], ["--config.max_steps=8"]
    whole = start(tmp_path / "whole", *flags, *whole_length).finish()
    start(tmp_path / "moved", *flags, *half).finish()
    elsewhere = [
        "--config.learner.replica=2",
        "--config.learner.fsdp=2",
        "--config.learner.tensor=2",
        "--config.learner.micro_batch_rows=1",
        "--config.learner.seq_len=96",
        "--config.learner.logprob_chunk=16",
        "--config.model.remat=full",
        "--config.environment.verifier_processes=2",
        "--config.rollout.max_prompt_tokens=9",
        "--config.checkpoint.every=1",
    ]
    devices = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"}
    moved = start(tmp_path / "moved", *flags, *whole_length, *elsewhere, variables=devices).finish()
    assert "going on from step 4 of 8" in moved.output()
    compare(whole, moved, [*flags, *whole_length], tolerance=1e-5)

    # Fewer than it has made cannot be; and what is learned is not changed by accident.
    fewer = start(tmp_path / "moved", *flags, "--config.max_steps=5", log=tmp_path / "fewer.log")
    assert fewer.wait() == 2
    assert fewer.output() == "error: config.max_steps=5: the run has made 8 updates already\n"
    more = ["--config.max_steps=9", "--config.objective.max_ratio=4"]
    refused = start(tmp_path / "moved", *flags, *more, log=tmp_path / "refused.log")
    assert refused.wait() == 2
    assert refused.output() == (
        f"error: --workdir={tmp_path}/moved: holds a run of another config: config.objective.max_ratio is 5.0 "
        "there and 4.0 now; --allow=objective.max_ratio goes on with what is given now\n"
    )
    more.append("--config.pacing.max_off_policy_steps=1")
    by_name = "--allow=objective.max_ratio,pacing.max_off_policy_steps"
    allowed = start(tmp_path / "moved", *flags, *more, by_name, log=tmp_path / "allowed.log").finish()
    assert "from step 8 on config.pacing.max_off_policy_steps is 1; before: 3" in allowed.output()
    assert "from step 8 on config.objective.max_ratio is 4.0; before: 5.0" in allowed.output()
    assert '"objective.max_ratio": {"before": 5.0, "now": 4.0' in read(allowed.path("config_history.jsonl"))
    assert [row["step"] for row in allowed.metrics] == list(range(1, 10))
    assert last_checkpoint(allowed, flags).step == config_of(more).max_steps == 9

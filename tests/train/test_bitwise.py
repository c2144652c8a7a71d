"""config.numerics=bitwise in whole runs. Costs 40 CPU seconds: three starts of a trainer and a server."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.support.runs import Run
from tests.train.comparing import last_checkpoint

ON_POLICY = (
    "--config.model.compute_dtype=bfloat16", "--config.model.sync_dtype=bfloat16",  # whose kernels are the choosiest
    "--config.pacing.kind=phased", "--config.pacing.max_off_policy_steps=1", "--config.max_steps=6",
    "--config.checkpoint.every=2",
    "--config.objective.filter_zero_variance=false", "--config.objective.entropy_bonus=0.1",  # no reward differs
)  # fmt: skip
BITWISE = "--config.numerics=bitwise"


def trained(run: Run) -> list[dict[str, Any]]:
    """The rows of steps with a token to learn from."""
    return [row for row in run.metrics if row["loss_tokens"]]


@pytest.mark.slow
def test_a_run_on_policy_has_no_other_bits_and_comes_again(tmp_path, flags, start):
    """Killed on its way, with other slots, chunks and rows than a run that is left alone; in other numerics the same
    run has other bits."""
    flags = [*flags, *ON_POLICY]
    alone = start(tmp_path / "alone", *flags, BITWISE)
    alone.finish()
    other = start(
        tmp_path / "other", *flags, BITWISE, "--config.fleet.slots=5", "--config.fleet.decode_chunk=3",
        "--config.fleet.servers=1",
    )  # fmt: skip
    other.until(lambda: len(other.metrics) >= 3, "three steps")
    other.kill()
    other.start().finish()
    for run in (alone, other):
        assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
        assert sum(row["loss_tokens"] for row in run.metrics) > 100
        for row in trained(run):
            assert row["lag_max"] == 0 and row["other_bits"] == row["mismatch_max"] == row["kl"] == 0, row
    assert [row["loss"] for row in trained(alone)] == [row["loss"] for row in trained(other)]
    ends = [last_checkpoint(run, flags).state["params"] for run in (alone, other)]
    assert all(map(np.array_equal, *map(jax.tree.leaves, ends)))

    fast = start(tmp_path / "fast", *flags)
    fast.finish()
    assert max(row["other_bits"] for row in trained(fast)) > 0

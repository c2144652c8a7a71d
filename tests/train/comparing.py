"""Two runs that must be the same run, however often one of them was stopped.

Rollouts come from replay servers: what they say depends on a completion's name alone, so whatever differs between the
two runs is the trainer's doing.
"""

import itertools
import os
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.learner.checkpoint import Checkpoint, Checkpoints
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.model.decoder_config import read_config
from tests.support.runs import Run, config_of

# Decoding takes longer than an update, so that groups are in flight whenever the trainer dies.
PACED = "--replay_token_seconds=0.004"
REPLAY = ("--engine=replay", PACED)
# A replay server's log-probs are nobody's: the probe must let them pass.
UNPROBED = ("--config.parity.mean_limit=100", "--config.parity.p99_limit=100")


def groups(run: Run) -> list[list[int]]:
    """(group number, prompt) of every group trained on, in order."""
    return [pair for row in run.metrics for pair in row["groups"]]


def saved(run: Run) -> list[str]:
    """The names in the folder of checkpoints: a step that is whole, or longer ones of steps being written."""
    return os.listdir(run.path("checkpoints")) if os.path.isdir(run.path("checkpoints")) else []


def saved_steps(run: Run) -> list[int]:
    """The steps of the checkpoints that are whole, in order."""
    return sorted(int(name) for name in saved(run) if name.isdigit())


def damage(run: Run, step: int) -> None:
    """Flips one bit in the largest file of a checkpoint."""
    files = [path for path in pathlib.Path(run.path("checkpoints", str(step), "state")).rglob("*") if path.is_file()]
    data = max(files, key=lambda path: path.stat().st_size)
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)


def last_checkpoint(run: Run, flags: Sequence[str]) -> Checkpoint:
    config = config_of(flags)
    trainer = make_trainer(config, read_config(config.model.path), max_segment=64)
    found = Checkpoints(run.path("checkpoints"), keep=2).restore(trainer.abstract_state)
    assert found is not None
    return found


def check_rows(run: Run, config: Config) -> None:
    """What holds of the files of any run that ended, however often it was stopped."""
    rows, size = run.metrics, config.rollout.prompts_per_step
    assert [row["step"] for row in rows] == list(range(1, config.max_steps + 1))
    assert [number for number, _ in groups(run)] == list(range(config.max_steps * size))
    every = config.evaluation.every
    evaluated = [row["step"] for row in run.rows("evals.jsonl")]
    assert evaluated == sorted({*range(0, config.max_steps + 1, every), config.max_steps})
    assert all(0 <= int(lag) <= config.pacing.max_off_policy_steps for row in rows for lag in row["lags"])
    for before, after in itertools.pairwise(rows):
        assert before["incarnation"] <= after["incarnation"]
        assert all(before["compute"][name] <= after["compute"][name] for name in before["compute"])


def check_cut(run: Run, config: Config) -> None:
    """No completion that was cut counts as right, though some of a long run would be."""
    sampled = [row for step in range(1, config.max_steps + 1) for row in run.rows(f"rollouts/step-{step:08d}.jsonl")]
    cut = [row for row in sampled if row["finish_reason"] == "length"]
    assert any(row["completion"].endswith(f"</think>{row['answer']}") for row in cut)  # were it not cut, it were right
    assert not any(row["verdict"] for row in cut) and any(row["verdict"] for row in sampled)


def compare(whole: Run, stopped: Run, flags: Sequence[str], *, tolerance: float = 0.0) -> None:
    """Both have ended; `flags` are those of `whole`. tolerance: of the parameters, absolute; 0: bit by bit."""
    config = config_of(flags)
    # 1. The same policy, the same optimizer and the same curriculum.
    one, other = last_checkpoint(whole, flags), last_checkpoint(stopped, flags)
    assert one.step == other.step == config.max_steps
    leaves = jax.tree_util.tree_leaves_with_path(one.state)
    assert len(leaves) == len(jax.tree.leaves(other.state)) > 20
    for (path, mine), theirs in zip(leaves, jax.tree.leaves(other.state)):
        if tolerance:
            np.testing.assert_allclose(mine, theirs, atol=tolerance, err_msg=jax.tree_util.keystr(path))
        else:
            assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes(), jax.tree_util.keystr(path)
    assert one.arrays.keys() == other.arrays.keys()
    for name, value in one.arrays.items():
        np.testing.assert_array_equal(value, other.arrays[name], err_msg=name)

    # 2. The same prompts for the same groups, and each group once.
    check_rows(whole, config)
    check_rows(stopped, config)
    assert groups(whole) == groups(stopped)

    # 3. The same numbers where they do not depend on timing.
    for mine, theirs in zip(whole.metrics, stopped.metrics):
        for name in ("pass_rate", "reward", "prompts_surviving", "prompts_retired"):
            assert mine.get(name) == theirs.get(name), (mine["step"], name)
        for name in ("loss", "gradient_norm"):
            np.testing.assert_allclose(mine.get(name, 0), theirs.get(name, 0), rtol=1e3 * tolerance)
    for mine, theirs in zip(whole.rows("evals.jsonl"), stopped.rows("evals.jsonl"), strict=True):
        assert mine["passes"] == theirs["passes"]

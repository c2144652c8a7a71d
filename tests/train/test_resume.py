"""A run killed again and again is the run that was never stopped.

Rollouts come from replay servers: what they say depends on a completion's name alone, so whatever differs between the
two runs is the trainer's doing. The trainers, the servers, gRPC, the checkpoints and the kills are real.
"""

import itertools
import json
import os
import pathlib
import random
import signal
import time

import jax
import numpy as np
import pytest

from scalerl_jax.learner.checkpoint import Checkpoint, Checkpoints
from scalerl_jax.model.hf import read_config
from scalerl_jax.train import make_learner
from tests.rollout_server.certificates import Authority
from tests.train import helpers
from tests.train.helpers import config_of, serve

pytestmark = pytest.mark.timeout(1800)  # processes start slowly on a busy machine

# Decoding takes longer than an update, so that groups are in flight whenever the trainer dies.
REPLAY = ("--engine=replay", "--replay_token_seconds=0.004")
# A replay server's log-probs are nobody's: the probe must let them pass.
UNPROBED = ("--config.probe.mean_limit=100", "--config.probe.p99_limit=100")


def groups(run: helpers.Run) -> list[list[int]]:
    """(group number, prompt) of every group trained on, in order."""
    return [pair for row in run.metrics for pair in row["groups"]]


def saved(run: helpers.Run) -> list[str]:
    """The names in the folder of checkpoints: a step that is whole, or longer ones of steps being written."""
    return os.listdir(run.path("checkpoints")) if os.path.isdir(run.path("checkpoints")) else []


def last_checkpoint(run: helpers.Run, flags) -> Checkpoint:
    config = config_of(flags)
    learner = make_learner(config, read_config(config.model.path), max_segment=64)
    found = Checkpoints(run.path("checkpoints"), keep=2).restore(learner.abstract_state())
    assert found is not None
    return found


def totals(ledger) -> dict[str, float]:
    """Every number of a ledger that may only grow, by name."""
    sums = {f"finished/{kind}": values[0] for kind, values in ledger["finished"].items()}
    for part in ("seconds", "trainer", "sampled", "decoded", "prefilled"):
        sums |= {f"{part}/{name}": value for name, value in ledger[part].items()}
    return sums


def check_rows(run: helpers.Run, config) -> None:
    """What holds of the files of any run that ended, however often it was stopped."""
    rows, size = run.metrics, config.rollout.groups
    assert [row["step"] for row in rows] == list(range(1, config.updates + 1))
    assert [number for number, _ in groups(run)] == list(range(config.updates * size))
    every = config.evaluation.every
    evaluated = [row["step"] for row in run.rows("evals.jsonl")]
    assert evaluated == sorted({*range(0, config.updates + 1, every), config.updates})
    assert all(0 <= int(lag) <= config.pacing.k for row in rows for lag in row["lags"])
    sampled = [row for step in range(1, config.updates + 1) for row in run.rows(f"rollouts/step-{step:08d}.jsonl")]
    cut = [row for row in sampled if row["finish_reason"] == "length"]
    assert any(row["completion"].endswith(f"</think>{row['answer']}") for row in cut)  # were it not cut, it were right
    assert not any(row["verdict"] for row in cut) and any(row["verdict"] for row in sampled)
    for before, after in itertools.pairwise(rows):
        assert before["incarnation"] <= after["incarnation"]
        assert all(before["compute"][name] <= after["compute"][name] for name in before["compute"])


def test_killed_runs_end_where_a_run_never_stopped_does(tmp_path, flags, model, rollouts, start):
    flags = [*flags, *UNPROBED, "--config.updates=24"]  # half of them after the last kill: the run must not end before
    config = config_of(flags)
    replay = (*REPLAY, f"--model={model}", f"--replay_file={rollouts}")
    os.mkdir(tmp_path / "servers")
    with serve(tmp_path / "servers", 2, *replay) as addresses:
        whole = start(tmp_path / "whole", *flags, f"--servers={addresses[0]}").finish()
        # The same command says again what came of it, and needs no server for that.
        ended = {name: helpers.read(whole.path(name)) for name in ("metrics.jsonl", "evals.jsonl", "ledger.json")}
        again = start(tmp_path / "whole", *flags, "--servers=127.0.0.1:1").finish()
        assert again.output().count("pass rate after") == 2
        assert {name: helpers.read(whole.path(name)) for name in ended} == ended

        rng = random.Random(0)
        stopped = start(tmp_path / "stopped", *flags, f"--servers={','.join(addresses)}")
        booked: list[dict[str, float]] = []

        def again() -> None:
            stopped.kill()
            booked.append(totals(stopped.ledger()))
            stopped.start()

        # Somewhere in the first updates, ...
        step = rng.randint(1, 5)
        stopped.until(lambda: len(stopped.metrics) >= step, f"{step} updates")
        time.sleep(rng.uniform(0, 0.2))
        again()
        # ... while a checkpoint is being written, ...
        stopped.until(lambda: any("tmp" in name for name in saved(stopped)), "a save begins")
        again()
        # ... and later.
        step = rng.randint(8, 11)
        stopped.until(lambda: len(stopped.metrics) >= step, f"{step} updates")
        time.sleep(rng.uniform(0, 0.2))
        again()
        stopped.finish()
        booked.append(totals(stopped.ledger()))

    # 1. The same policy, bit by bit, the same optimizer and the same curriculum.
    one, other = last_checkpoint(whole, flags), last_checkpoint(stopped, flags)
    assert one.step == other.step == config.updates
    leaves = jax.tree_util.tree_leaves_with_path(one.state)
    assert len(leaves) == len(jax.tree.leaves(other.state)) > 20
    for (path, mine), theirs in zip(leaves, jax.tree.leaves(other.state)):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes(), jax.tree_util.keystr(path)
    assert one.arrays.keys() == other.arrays.keys()
    for name, value in one.arrays.items():
        np.testing.assert_array_equal(value, other.arrays[name], err_msg=name)

    # 2. The same prompts for the same groups, and each group once.
    check_rows(whole, config)
    check_rows(stopped, config)
    assert groups(whole) == groups(stopped)
    assert len({row["incarnation"] for row in whole.metrics}) == 1 < len({r["incarnation"] for r in stopped.metrics})

    # 3. The same numbers where they do not depend on timing.
    for mine, theirs in zip(whole.metrics, stopped.metrics):
        for name in ("pass_rate", "reward", "loss", "gradient_norm", "prompts_surviving", "prompts_retired"):
            assert mine.get(name) == theirs.get(name), (mine["step"], name)
    for mine, theirs in zip(whole.rows("evals.jsonl"), stopped.rows("evals.jsonl")):
        assert mine["passes"] == theirs["passes"]

    # 4. It was a run worth the name: updates with a gradient, prompts retired, weights swapped under way.
    assert whole.metrics[-1]["optimizer_step"] >= config.updates - 2
    assert whole.metrics[-1]["prompts_retired"] > 0
    assert max(int(lag) for row in whole.metrics for lag in row["lags"]) > 0

    # 5. What was spent stays booked, whatever was lost.
    for before, after in itertools.pairwise(booked):
        assert all(before[name] <= after[name] for name in before)
    lost = sum(row["loss_tokens"] for row in stopped.metrics)
    assert booked[-1]["trainer/tokens"] > lost


def test_ctrl_c(tmp_path, flags, model, rollouts, start):
    """One line, what was saved is whole, and no process stays."""
    flags = [*flags, *UNPROBED, "--config.updates=500", "--config.checkpoint.every=2"]
    with serve(tmp_path, 1, *REPLAY, f"--model={model}", f"--replay_file={rollouts}") as addresses:
        run = start(tmp_path / "run", *flags, f"--servers={addresses[0]}")
        run.until(lambda: len(run.metrics) >= 3, "3 updates")
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does it
        assert run.wait() == 130, run.output()
    assert "Traceback" not in run.output()
    assert run.output().splitlines()[-1] == "interrupted: the same command goes on where this one stopped"
    assert any(name.isdigit() for name in saved(run))
    assert not any("tmp" in name for name in saved(run))
    with pytest.raises(ProcessLookupError):
        os.killpg(run.process.pid, 0)


def test_phased_run(tmp_path, flags, model, rollouts, start):
    """k = 2: two batches from one frozen version, then two updates. The servers are found in a file, behind TLS."""
    flags = [*flags, *UNPROBED, "--config.pacing.kind=phased", "--config.pacing.k=2", "--config.updates=5"]
    authority, token, found = Authority(tmp_path, "authority"), "a-token-that-nobody-guesses", tmp_path / "found"
    (tmp_path / "token").write_text(token)
    (server, server_key), (client, client_key) = authority.sign("server"), authority.sign("client")
    tls = [f"--tls_certificate={server}", f"--tls_key={server_key}", f"--tls_client_authority={authority.certificate}"]
    flags += [f"--config.fleet.tls_authority={authority.certificate}", f"--config.fleet.token_file={tmp_path}/token"]
    flags += [f"--config.fleet.tls_certificate={client}", f"--config.fleet.tls_key={client_key}"]
    replay = (*REPLAY, f"--model={model}", f"--replay_file={rollouts}", f"--token_file={tmp_path}/token", *tls)
    with serve(tmp_path, 1, *replay) as addresses:
        found.write_text(f"{addresses[0]}\n")
        run = start(tmp_path / "run", *flags, f"--servers=file:{found}").finish()
    written = [path for path in pathlib.Path(run.workdir).rglob("*") if path.is_file()]
    assert "config.json" in {path.name for path in written}
    assert not any(token.encode() in path.read_bytes() for path in [*written, pathlib.Path(f"{run.workdir}.log")])
    check_rows(run, config_of(flags))
    # Batches 0 and 1 are version 0's, 2 and 3 version 2's, 4 version 4's.
    assert [[int(lag) for lag in row["lags"]] for row in run.metrics] == [[0], [1], [0], [1], [0]]
    samples = [json.loads(line) for line in helpers.read(run.path("rollouts", "step-00000004.jsonl")).splitlines()]
    assert {step for sample in samples for step, _, _ in sample["versions"]} == {2}

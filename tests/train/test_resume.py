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

import pytest

from tests.rollout_server.certificates import Authority
from tests.support.runs import config_of, read
from tests.support.waiting import eventually
from tests.train.comparing import PACED, check_cut, check_rows, compare, saved

# Whoever begins to make a checkpoint whole says so, and never does.
HOLDS = """
import os, threading
real = os.rename
def rename(source, *arguments, **options):
    if "orbax-checkpoint-tmp" in str(source):
        open({file!r}, "w").close()
        threading.Event().wait()
    return real(source, *arguments, **options)
os.rename = rename
"""


def totals(ledger) -> dict[str, float]:
    """Every number of a ledger that may only grow, by name."""
    sums = {f"finished/{kind}": values[0] for kind, values in ledger["finished"].items()}
    for part in ("seconds", "trainer", "sampled", "decoded", "prefilled"):
        sums |= {f"{part}/{name}": value for name, value in ledger[part].items()}
    return sums


@pytest.mark.slow
def test_killed_runs_end_where_a_run_never_stopped_does(tmp_path, flags, replayed, start):
    # Half of the steps are after the last kill: the run must not end before.
    flags = [*flags, "--config.max_steps=24", *replayed(PACED, count=2)]
    config, one_server = config_of(flags), flags[-1].partition(",")[0]
    whole = start(tmp_path / "whole", *flags, one_server).finish()
    # The same command says again what came of it, and needs no server for that.
    ended = {name: read(whole.path(name)) for name in ("metrics.jsonl", "evals.jsonl", "ledger.json")}
    again = start(tmp_path / "whole", *flags, "--servers=127.0.0.1:1").finish()
    assert again.output().count("pass rate after") == 2
    assert {name: read(whole.path(name)) for name in ended} == ended

    rng = random.Random(0)
    stopped = start(tmp_path / "stopped", *flags)
    booked: list[dict[str, float]] = []

    def again(**options) -> None:
        nonlocal stopped
        stopped.kill()
        booked.append(totals(stopped.ledger()))
        stopped = start(tmp_path / "stopped", *flags, **options)

    hold = tmp_path / "hold"
    hold.mkdir()
    (hold / "sitecustomize.py").write_text(HOLDS.format(file=str(hold / "begun")))
    path = os.pathsep.join([str(hold), os.environ.get("PYTHONPATH", "")])

    # Somewhere in the first updates, ...
    step = rng.randint(1, 5)
    stopped.until(lambda: len(stopped.metrics) >= step, f"{step} updates")
    time.sleep(rng.uniform(0, 0.2))
    again(variables={"PYTHONPATH": path})
    # ... while a checkpoint is being written, ...
    stopped.until((hold / "begun").exists, "a save begins")
    assert any("tmp" in name for name in saved(stopped))
    again()
    # ... and later.
    step = rng.randint(8, 11)
    stopped.until(lambda: len(stopped.metrics) >= step, f"{step} updates")
    time.sleep(rng.uniform(0, 0.2))
    again()
    stopped.finish()
    booked.append(totals(stopped.ledger()))

    compare(whole, stopped, flags)
    check_cut(stopped, config)
    assert len({row["incarnation"] for row in whole.metrics}) == 1 < len({r["incarnation"] for r in stopped.metrics})

    # It was a run worth the name: updates with a gradient, prompts retired, weights swapped under way.
    assert whole.metrics[-1]["optimizer_step"] >= config.max_steps - 2
    assert whole.metrics[-1]["prompts_retired"] > 0
    assert max(int(lag) for row in whole.metrics for lag in row["lags"]) > 0

    # What was spent stays booked, whatever was lost.
    for before, after in itertools.pairwise(booked):
        assert all(before[name] <= after[name] for name in before)
    lost = sum(row["loss_tokens"] for row in stopped.metrics)
    assert booked[-1]["trainer/tokens"] > lost


def test_ctrl_c(tmp_path, flags, replayed, start):
    """One line, what was saved is whole, and no process stays."""
    flags = [*flags, *replayed(PACED), "--config.max_steps=500", "--config.checkpoint.every=2"]
    run = start(tmp_path / "run", *flags)
    run.until(lambda: len(run.metrics) >= 3, "3 updates")
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does it
    assert run.wait() == 130, run.output()
    assert "Traceback" not in run.output()
    step = run.metrics[-1]["step"]
    assert run.output().splitlines()[-1] == f"interrupted: saved at step {step}; the same command goes on from there"
    assert str(step) in saved(run)
    assert not any("tmp" in name for name in saved(run))

    def is_gone() -> bool:
        try:
            os.killpg(run.process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    eventually(is_gone, "all that the run has started ends")


@pytest.mark.slow
def test_phased_run(tmp_path, flags, replayed, start):
    """k = 2: two batches from one frozen version, then two updates. The servers are found in a file, behind TLS."""
    flags = [*flags, "--config.pacing.kind=phased", "--config.pacing.max_off_policy_steps=2", "--config.max_steps=5"]
    authority, token, found = Authority(tmp_path, "authority"), "a-token-that-nobody-guesses", tmp_path / "found"
    (tmp_path / "token").write_text(token)
    (server, server_key), (client, client_key) = authority.sign("server"), authority.sign("client")
    tls = [f"--tls_certificate={server}", f"--tls_key={server_key}", f"--tls_client_authority={authority.certificate}"]
    flags += [f"--config.fleet.tls_authority={authority.certificate}", f"--config.fleet.token_file={tmp_path}/token"]
    flags += [f"--config.fleet.tls_certificate={client}", f"--config.fleet.tls_key={client_key}"]
    *unprobed, servers = replayed(PACED, f"--token_file={tmp_path}/token", *tls)
    found.write_text(servers.removeprefix("--servers=") + "\n")
    run = start(tmp_path / "run", *flags, *unprobed, f"--servers=file:{found}").finish()
    written = [path for path in pathlib.Path(run.workdir).rglob("*") if path.is_file()]
    assert "config.json" in {path.name for path in written}
    assert not any(token.encode() in path.read_bytes() for path in [*written, pathlib.Path(f"{run.workdir}.log")])
    check_rows(run, config_of(flags))
    # Batches 0 and 1 are version 0's, 2 and 3 version 2's, 4 version 4's.
    assert [[int(lag) for lag in row["lags"]] for row in run.metrics] == [[0], [1], [0], [1], [0]]
    samples = [json.loads(line) for line in read(run.path("rollouts", "step-00000004.jsonl")).splitlines()]
    assert {step for sample in samples for step, _, _ in sample["versions"]} == {2}

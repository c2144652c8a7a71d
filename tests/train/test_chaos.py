"""A run with a server killed or frozen every few steps does not notice: a tiny one, and the quickstart, shortened."""

import os

import pytest

from scalerl_jax.config_io import load_file, override
from tests.support.paths import ROOT
from tests.support.processes import run_command, single_threaded
from tests.support.runs import Run, config_of
from tests.train.chaos import Chaos, check

pytestmark = pytest.mark.slow

QUICKSTART = os.path.join(ROOT, "configs", "quickstart.py")
FLEET = {
    "fleet.servers": 3,
    "fleet.heartbeat_seconds": 0.5,
    "fleet.status_seconds": 2,
    "fleet.silence_seconds": 4,  # on a machine that does other things too
}
TINY = {"max_steps": 200, "evaluation.every": 50}
SHORTENED = {
    "max_steps": 40,
    "optimizer.warmup_steps": 20,
    "optimizer.learning_rate": 1.5e-4,
    "evaluation.every": 10,
    "evaluation.prompts": 128,
    "telemetry.tensorboard": "false",
}


def wild_run(run: Run, *, steps: int) -> Run:
    """steps: from one event to the next, so that there are as many of them however fast the machine is."""
    run.until(lambda: run.metrics, "the first update")
    with Chaos(run.process.pid, every=0, frozen_seconds=7.0, progress=lambda: len(run.metrics) // steps) as chaos:
        run.finish()
    assert chaos.count("kill") >= 3 and chaos.count("freeze") >= 3, chaos.events
    # It was noticed, and survived.
    output = run.output()
    assert "no answer for" in output or "the connection is broken" in output
    assert "Traceback" not in output
    return run


def flags_of(fields: dict[str, object]) -> list[str]:
    return [f"--config.{name}={value}" for name, value in fields.items()]


def test_a_server_dies_or_hangs_every_few_steps(tmp_path, flags, start):
    flags = [*flags, *flags_of({**FLEET, **TINY})]
    run = wild_run(start(tmp_path, *flags), steps=20)
    check(run.metrics, run.rows("evals.jsonl"), config_of(flags))


@pytest.mark.long
def test_and_the_quickstart_learns_as_if_none_did(tmp_path, start):
    """Two runs differ by about 0.03 at their end: which version samples which completion is up to the machine."""
    begin = (f"--config={QUICKSTART}", f"--workdir={tmp_path / 'warm'}")
    run_command("scalerl_jax.sft", *begin, environment=single_threaded()).check_returncode()
    fields = {"model.path": tmp_path / "warm" / "model", **FLEET, **SHORTENED}
    config = load_file(QUICKSTART)
    for name, value in fields.items():
        override(config, name, str(value))
    flags = [f"--config={QUICKSTART}", *flags_of(fields)]
    calm = start(tmp_path / "calm", *flags).finish()
    wild = wild_run(start(tmp_path / "wild", *flags), steps=4)
    for run in (calm, wild):
        check(run.metrics, run.rows("evals.jsonl"), config)
    before, after = (run.rows("evals.jsonl")[0]["pass_rate"] for run in (calm, wild))
    assert before == pytest.approx(after, abs=0.02)  # the same version, the same requests
    calm_end, wild_end = (run.rows("evals.jsonl")[-1]["pass_rate"] for run in (calm, wild))
    assert calm_end - before > 0.15
    assert abs(wild_end - calm_end) < 0.12

"""A run that is given an absurd learning rate after 25 steps: it collapses and stops, and goes on as it is told to."""

import json
import os
import shutil

import pytest

from tests.support.runs import Run, read
from tests.train.comparing import saved_steps

pytestmark = pytest.mark.slow

STEPS = 25
# A policy at random says various things, and one that has collapsed does not.
REWARD = "def varied(completion, **row):\n    return 1.0 if len(set(completion)) >= 2 else -1.0\n"
SIZES = [
    "fleet.servers=1", "fleet.slots=64", "rollout.prompts_per_step=8", "rollout.thinking_budget_min=0",
    "rollout.thinking_budget_max=0", "rollout.answer_budget=12", "curriculum.no_positive_resampling_at=2",
    "evaluation.every=5", "evaluation.samples=16", "checkpoint.every=3",
]  # fmt: skip
# What the trainer and the server differ by is no fault of the server's here.
UNPROBED = [f"parity.{name}=1000" for name in ("mean_limit", "p99_limit", "difference_limit", "ratio_limit")]
ABSURD = ["--config.max_steps=60", "--config.optimizer.learning_rate=0.3", "--allow=optimizer.learning_rate"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory, flags) -> tuple[str, list[str]]:
    """(the folder of a run that is well, its flags)."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "reward.py").write_text(REWARD)
    settings = [*SIZES, *UNPROBED, f"environment.reward={folder}/reward.py:varied"]
    flags = [*flags, *(f"--config.{setting}" for setting in settings)]
    sound = ["--config.optimizer.learning_rate=1e-4", f"--config.max_steps={STEPS}"]
    run = Run(folder / "run", *flags, *sound).start()
    try:
        run.finish()
    finally:
        run.close()
    assert "collapsed" not in run.output()
    return run.workdir, flags


def going_on(tmp_path, start, begun, on_collapse: str) -> Run:
    workdir, flags = begun
    shutil.copytree(workdir, tmp_path / "run")
    return start(tmp_path / "run", *flags, *ABSURD, f"--config.checkpoint.on_collapse={on_collapse}")


def test_it_stops_and_goes_back_where_it_is_asked_to(tmp_path, start, begun):
    run = going_on(tmp_path, start, begun, "stop")
    assert run.wait() == 3, run.output()
    stopped = json.loads(read(run.path("collapse.json")))
    line = run.output().splitlines()[-1]
    assert line.startswith(f"stopped at step {stopped['step']}: the policy has collapsed since update ")
    # A policy that the first absurd update has broken may pass by luck: the evaluation after it is then as good.
    there = saved_steps(run)
    good = max(step for step in there if step <= stopped["last_good"])
    assert good >= STEPS and max(there) < stopped["step"]  # it is kept, and nothing was saved of the collapse
    assert f"is that of step {good}; --from_step={good} goes back to it" in line
    assert "Traceback" not in run.output()
    before = read(run.path("metrics.jsonl"))
    assert run.start().wait() == 3 and run.output().splitlines()[-1] == line
    assert read(run.path("metrics.jsonl")) == before
    spent = booked(run)
    sound = ["--allow=optimizer.learning_rate", f"--config.max_steps={good + 2}"]
    back = start(run.workdir, *begun[1], *sound, f"--from_step={good}").finish()
    assert back.output().splitlines()[-1].startswith(f"back at step {good}; kept aside: set-aside-")
    sound += ["--config.optimizer.learning_rate=1e-4", "--config.checkpoint.on_collapse=alarm"]
    again = start(run.workdir, *begun[1], *sound).finish()
    assert f"going on from step {good} of {good + 2}" in again.output()
    assert [row["step"] for row in again.metrics] == [*range(1, good + 3)]
    assert booked(again) > spent  # what was set aside stays booked


def test_it_goes_on_where_an_alarm_is_enough(tmp_path, start, begun):
    run = going_on(tmp_path, start, begun, "stop")
    assert run.wait() == 3, run.output()
    stopped = json.loads(read(run.path("collapse.json")))
    steps = stopped["step"] + 2 * 5  # two evaluations
    alarm = start(run.workdir, *begun[1], *ABSURD[1:], f"--config.max_steps={steps}").finish()
    assert f"=alarm asks: {stopped['says']}" in alarm.output() and not os.path.exists(run.path("collapse.json"))
    assert "ALARM: the policy has collapsed since update" in alarm.output().rpartition("=alarm asks")[2]
    assert alarm.metrics[-1]["step"] == steps


def booked(run: Run) -> float:
    """Device-seconds of training."""
    return sum(seconds for name, seconds in run.ledger()["seconds"].items() if name.endswith(("busy", "idle")))

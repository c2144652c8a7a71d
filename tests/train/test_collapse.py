"""A run that is given an absurd learning rate after 25 steps: it collapses, and stops or goes back, once."""

import json
import os
import shutil

import pytest

from tests.support.runs import Run, read

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


def collapses(run: Run) -> list[dict]:
    return json.loads(read(run.path("collapse.json")))["collapses"] if os.path.exists(run.path("collapse.json")) else []


def booked(run: Run) -> float:
    """Device-seconds of training."""
    return sum(seconds for name, seconds in run.ledger()["seconds"].items() if name.endswith(("busy", "idle")))


@pytest.mark.parametrize("killed", [False, True], ids=["", "killed as it goes back"])
def test_it_goes_back_once_and_then_stops(tmp_path, start, begun, killed):
    run = going_on(tmp_path, start, begun, "rollback")
    if killed:
        run.until(lambda: collapses(run), "it collapses")
        run.kill()
        spent = booked(run)
        assert len(collapses(run)) == 1 and collapses(run)[0]["then"] in ("going back", "went back")
        run.start()
    assert run.wait() == 3, run.output()
    went, stopped = collapses(run)
    assert (went["then"], went["to"], went["last_good"]) == ("went back", STEPS, STEPS)
    assert stopped["then"] == "stopped" and stopped["last_good"] == STEPS
    console = run.output()
    assert "Traceback" not in console
    assert console.count(f"went back from step {went['step']} to step {STEPS}: the policy has collapsed since ") == 1
    assert console.count("ALARM: the policy has collapsed since update") == 2
    last = console.splitlines()[-1]
    assert last.startswith(f"stopped at step {stopped['step']}: the policy has collapsed since update ")
    assert f"the last good checkpoint is that of step {STEPS}; the run has gone back once" in last
    # What came after the checkpoint is set aside, and its compute stays booked.
    aside = [json.loads(line) for line in read(run.path("collapsed", "metrics.jsonl")).splitlines()]
    assert [row["step"] for row in aside] == [*range(STEPS + 1, went["step"] + 1)]
    rows = run.metrics
    assert [row["step"] for row in rows] == [*range(1, stopped["step"] + 1)]
    hours = [row["compute"]["device_hours"] for row in (*rows[:STEPS], *aside, *rows[STEPS:])]
    assert hours == sorted(hours) and went["device_hours"] == pytest.approx(hours[STEPS + len(aside) - 1] - hours[24])
    assert len({row["incarnation"] for row in (*aside, *rows)}) == 3
    assert not killed or booked(run) > spent
    there = os.listdir(run.path("checkpoints"))
    assert str(STEPS) in there and any(name.startswith("collapsed-") for name in there)
    assert not any(name.isdigit() and int(name) >= stopped["step"] for name in there)  # nothing of it was saved


def test_it_stops_and_goes_on_only_where_it_is_asked_to(tmp_path, start, begun):
    run = going_on(tmp_path, start, begun, "stop")
    assert run.wait() == 3, run.output()
    (entry,) = collapses(run)
    line = run.output().splitlines()[-1]
    assert line.startswith(f"stopped at step {entry['step']}: ") and entry["then"] == "stopped"
    assert f"is that of step {STEPS}; --config.checkpoint.on_collapse=rollback goes back to it" in line
    assert str(STEPS) in os.listdir(run.path("checkpoints"))  # two newer ones, and it is kept
    before = read(run.path("metrics.jsonl"))
    assert run.start().wait() == 3 and run.output().splitlines()[-1] == line
    assert read(run.path("metrics.jsonl")) == before
    alarm = start(run.workdir, *begun[1], *ABSURD[1:], f"--config.max_steps={entry['step'] + 2}").finish()
    assert f"=alarm asks: {entry['says']}" in alarm.output() and collapses(run)[0]["then"] == "overruled"
    assert "ALARM: the policy has collapsed since update" in alarm.output().rpartition("=alarm asks")[2]
    assert alarm.metrics[-1]["step"] == entry["step"] + 2

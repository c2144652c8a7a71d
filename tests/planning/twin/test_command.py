"""scalerl-plan for a fleet, as a user calls it."""

import json

import pytest

from scalerl_jax.planning.twin.speeds import Machine
from tests.planning.twin.run_folder import write_simulated_run
from tests.planning.twin.test_calibrate import config, truth
from tests.support.paths import ROOT
from tests.support.processes import run_python

pytestmark = pytest.mark.slow

COMMAND = "from launch.commands import plan; plan()"
SPEEDS = ["--tokens_per_second=2000", "--step_seconds=20", "--lengths_quantiles=0:200,0.5:4000,1:14000"]
CONFIG = f"--config={ROOT}/configs/quickstart.py"


def plan(*arguments, folder=None):
    return run_python("-c", COMMAND, *arguments, folder=folder or ROOT)


def test_of_a_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    write_simulated_run(run, truth(Machine()), config=config(), steps=60)
    done = plan(f"--run={run}", "--servers=3,1", "--max_off_policy_steps=2,8", "--out=fleet.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{run}: 55 steps with 2 generators of 32 slots, ")
    assert lines[2].startswith("simulated against measured: update ")
    table = [line.split()[:2] for line in lines if line.strip()[:1].isdigit()]
    assert table == [["1", "2"], ["1", "8"], ["3", "2"], ["3", "8"]]
    assert lines[-2].startswith("fastest   ") and lines[-1].startswith("cheapest  1 generator, k ")
    written = json.loads((tmp_path / "fleet.json").read_text())
    assert written["measured"]["servers"] == 2 and len(written["outcomes"]) == 4
    assert all(set(map(int, o["staleness"])) <= set(range(9)) for o in written["outcomes"])


def test_of_speeds_that_are_given(tmp_path):
    arguments = [
        CONFIG,
        *SPEEDS,
        "--servers=1,2",
        "--config.rollout.prompts_per_step=8",
        "--config.evaluation.prompts=1",
    ]
    done = plan(*arguments, f"--out={tmp_path / 'a.json'}")
    assert done.returncode == 0, done.stderr
    outcomes = json.loads((tmp_path / "a.json").read_text())["outcomes"]
    # The generators are the slower side: a batch is 8 groups of 8 completions of 5,550 tokens on average.
    tokens = 8 * 8 * (0.5 * 2100 + 0.5 * 9000)
    for outcome in outcomes:
        rate = outcome["servers"] * 2000 / tokens * 3600
        # A batch waits for its longest completion, and few slots are taken by then.
        assert 0.3 * rate < outcome["steps_per_hour"] <= 1.05 * rate
        assert outcome["generator_busy"] > 0.5
    plan(*arguments, f"--out={tmp_path / 'b.json'}")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run=nowhere"], "--run: nowhere: is no run folder: it has no config.json"),
        (["--run=.", CONFIG], "--config: goes without --run, which has its own"),
        (["--run=.", "--topology=v5p:4x4x4"], "--topology=v5p:4x4x4: goes without --run"),
        (["--run=.", "--servers=1,some"], "--servers=1,some: whole numbers, with commas between"),
        (["--run=.", "--cores=2x"], "--cores=2x: a number of cores, or two with + between"),
        ([CONFIG, *SPEEDS[:2]], "--lengths_quantiles: wanted where there is no --run to take it from"),
        ([CONFIG, *SPEEDS[:2], "--lengths_quantiles=0.5:9"], "--lengths_quantiles=0.5:9: shares must rise"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, message):
    done = plan(*arguments, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert not done.stdout and not list(tmp_path.iterdir())

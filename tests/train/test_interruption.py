"""A run that is told to stop saves what it has trained, and goes on from there as if it had never been stopped."""

import random
import re
import signal
import time

import pytest

from tests.support.runs import Run, read
from tests.train.comparing import compare, saved

pytestmark = pytest.mark.slow

UPDATES = 14


def stop(run: Run) -> bool:
    """Asks a run to stop; False: it was over. What it says and what it leaves behind is checked."""
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, said = run.wait(), run.output()
    assert "Traceback" not in said
    assert not any("tmp" in name for name in saved(run))
    if code == 0:
        return False
    assert code == 143, said
    last, step = said.splitlines()[-1], run.metrics[-1]["step"] if run.metrics else 0
    if last == f"interrupted: saved at step {step}; the same command goes on from there":
        assert str(step) in saved(run)
    elif found := re.match(r"interrupted: the same command goes on from step (\d+)", last):
        assert found[1] == "0" or found[1] in saved(run), said
    elif step == UPDATES:
        assert last == "interrupted: the run is finished; the same command shows its results"
    else:
        assert last == "interrupted before the first update: the same command begins again" and step == 0, said
    return True


def reached(run: Run, step: int) -> bool:
    """Whether the process is past its imports, and `step` updates are made."""
    return read(run.path("lock")).strip() == str(run.process.pid) and len(run.metrics) >= step


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param(0, id="evaluations stop training", marks=pytest.mark.long),
        pytest.param(1, id="evaluations beside training"),
    ],
)
def test_runs_told_to_stop_end_where_a_run_never_stopped_does(tmp_path, flags, replayed, start, beside):
    # So slowly that a run which has come so far has seconds to go.
    flags = [*flags, *replayed("--replay_token_seconds=0.02", count=2)]
    flags += [f"--config.max_steps={UPDATES}", f"--config.evaluation.servers={beside}"]
    flags += ["--config.checkpoint.every=1000"]  # what is saved is saved for a signal
    flags += ["--config.objective.reference_kl=0.05"]  # to the policy of step 0, wherever it goes on
    rng = random.Random(beside)
    whole = start(tmp_path / "whole", *flags).finish()
    stopped = start(tmp_path / "stopped", *flags)
    stops = 0
    # Before the first update or within an early one, while a version is evaluated, ..., and at the last evaluation.
    for step in (rng.randint(1, 3) if beside else 0, 8, rng.randint(9, 11), UPDATES):
        stopped.until_ended_or(lambda step=step: reached(stopped, step))
        time.sleep(rng.choice([0, 0.05, 0.2]))
        if stopped.process.poll() is not None or not stop(stopped):
            break
        stops += 1
        stopped.start()
    stopped.finish()
    assert stops >= 2
    compare(whole, stopped, flags)
    assert len({row["incarnation"] for row in stopped.metrics}) > 1

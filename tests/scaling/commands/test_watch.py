"""scalerl-fit --watch: draws what arrives, forgives a row in mid-write, and ends when it should."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from rich.console import Console

from scalerl_jax.cli.entry import UserError
from scalerl_jax.scaling import readers
from scalerl_jax.scaling.commands import watch
from scalerl_jax.scaling.points import TooFewPoints
from tests.scaling.simulated import TABLE_1, curve
from tests.support.processes import SECONDS
from tests.support.waiting import eventually

COMPUTE = np.concatenate([[0.0], np.linspace(500, 16_000, 32)])


def rows(count, start=0):
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    return "".join(
        json.dumps({"step": step, "device_hours": COMPUTE[step], "pass_rate": scores[step]}) + "\n"
        for step in range(start, count)
    )


@pytest.fixture
def folder(tmp_path):
    """A run folder whose trainer is this process."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"max_steps": 32}))
    (path / "lock").write_text(f"{os.getpid()}\n")
    (path / "evals.jsonl").touch()
    return path


class Draws:
    """Stands for the fit: reads the rows as scalerl-fit does, and keeps how many there were."""

    def __init__(self):
        self.counts = []

    def __call__(self, paths):
        try:
            (found,) = readers.read_runs(paths, x=None, y=None)
        except readers.InputError as error:
            raise UserError(str(error)) from error
        if len(found.compute) < 4:
            raise UserError(f"{len(found.compute)} points") from TooFewPoints()
        self.counts.append(len(found.compute))


class Pauses:
    """Stands for the clock of a watch: counts its looks, and waits for a row that has been begun until it is there."""

    def __init__(self):
        self.looks, self.settling, self.settled = 0, threading.Event(), threading.Event()

    def sleep(self, seconds):
        if seconds == watch._SETTLE_SECONDS:
            self.settling.set()
            assert self.settled.wait(SECONDS)
        else:
            self.looks += 1
            time.sleep(seconds)


def watching(folder, draw, every=0.05):
    out = io.StringIO()
    errors = []

    def run():
        try:
            watch.watch([str(folder)], draw, every=every, console=Console(file=out, width=200))
        except UserError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out, errors


def test_draws_each_change_and_ends_with_the_run(folder, monkeypatch):
    draw, pauses = Draws(), Pauses()
    monkeypatch.setattr(watch, "time", pauses)
    thread, out, errors = watching(folder, draw)
    eventually(lambda: "waiting for its first evaluation" in out.getvalue())
    (folder / "evals.jsonl").write_text(rows(3))
    eventually(lambda: "waiting for more evaluations: 3 points" in out.getvalue())
    with open(folder / "evals.jsonl", "a") as file:
        file.write(rows(8, 3))
    eventually(lambda: draw.counts == [8])
    with open(folder / "evals.jsonl", "a") as file:
        text = rows(9, 8)
        file.write(text[:20])  # a row in mid-write
        file.flush()
        eventually(pauses.settling.is_set)
        file.write(text[20:])
    pauses.settled.set()
    eventually(lambda: draw.counts[-1] == 9)
    looks = pauses.looks
    eventually(lambda: pauses.looks > looks + 6)  # at files that stay as they are
    assert draw.counts == [8, 9]
    with open(folder / "evals.jsonl", "a") as file:
        file.write(rows(33, 9))
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert draw.counts == [8, 9, 33] and not errors
    assert "has ended, with update 32" in out.getvalue()


def test_draws_each_new_checkpoint_of_a_transformers_trainer(tmp_path):
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    history = [{"step": step, "eval_reward": score} for step, score in enumerate(scores.tolist())]
    counts = []

    def save(count):
        folder = tmp_path / "out" / f"checkpoint-{count}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history[:count]}) + "\n")

    def draw(paths):
        (found,) = readers.read_runs(paths, x=None, y="eval_reward")
        counts.append(len(found.compute))

    save(5)
    watching(tmp_path / "out", draw)  # it ends with the tests: such a folder has no end of its own
    eventually(lambda: counts == [5])
    save(10)
    eventually(lambda: counts == [5, 10])


def test_ends_when_no_trainer_lives(folder):
    (folder / "evals.jsonl").write_text(rows(8))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (folder / "lock").write_text(f"{gone.pid}\n")
    draw = Draws()
    thread, out, errors = watching(folder, draw)
    thread.join(SECONDS)
    assert draw.counts == [8] and not errors
    assert "no trainer is running in it on this machine" in out.getvalue()
    # With too few evaluations to fit, that is a mistake to tell.
    (folder / "evals.jsonl").write_text(rows(2))
    thread, out, errors = watching(folder, draw)
    thread.join(SECONDS)
    assert "ended with too few evaluations to fit" in str(errors[0])


def test_a_row_that_stays_broken_is_said_once_and_outlived(folder):
    (folder / "evals.jsonl").write_text(rows(8))
    draw = Draws()
    thread, out, errors = watching(folder, draw)
    eventually(lambda: draw.counts == [8])
    (folder / "evals.jsonl").write_text(rows(8) + "{broken}\n")
    eventually(lambda: "line 9: is not JSON" in out.getvalue())
    (folder / "evals.jsonl").write_text(rows(33))
    thread.join(SECONDS)
    assert not thread.is_alive() and not errors
    assert draw.counts == [8, 33]
    assert out.getvalue().count("is not JSON") == 1


def test_a_mistake_at_the_start_is_raised(folder):
    (folder / "evals.jsonl").write_text(rows(8).replace("pass_rate", "score"))
    thread, _, errors = watching(folder, Draws())
    thread.join(SECONDS)
    assert "no column 'pass_rate'" in str(errors[0])


def test_a_folder_that_is_deleted_ends_it_with_one_line(folder):
    (folder / "evals.jsonl").write_text(rows(8))
    draw = Draws()
    thread, _, errors = watching(folder, draw)
    eventually(lambda: draw.counts == [8])
    folder.rename(folder.with_name("elsewhere"))
    thread.join(SECONDS)
    assert not thread.is_alive() and len(errors) == 1
    assert str(errors[0]).startswith(str(folder)) and "\n" not in str(errors[0])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"{", "config.json: is not the config of a run"),
        ("config.json", b"\xff", "config.json: is not the config of a run"),
        ("config.json", b"[]", "config.json: is not the config of a run"),
        ("evals.jsonl", b"[1, 2]\n", "line 1: is not a JSON object"),
        ("evals.jsonl", b"\xff\n", "line 1: byte 0 is not UTF-8"),
    ],
)
def test_garbage_at_the_start_is_one_line(folder, name, content, said):
    (folder / name).write_bytes(content)
    if name == "config.json":
        (folder / "evals.jsonl").write_text(rows(8))
    thread, _, errors = watching(folder, Draws())
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert said in str(errors[0]) and "\n" not in str(errors[0])


@pytest.mark.slow
def test_as_a_command_it_draws_again_and_ends_on_ctrl_c(folder):
    (folder / "evals.jsonl").write_text(rows(12))
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-m", "scalerl_jax.scaling.commands.scalerl_fit",
         str(folder), "--watch", "--watch_every=0.2", "--out=fits"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it is ignored where the tests run detached
    )  # fmt: skip
    try:
        lines = iter(process.stdout)
        picture = folder / "fits" / "fit.json"
        for points, next_rows in ((11, rows(20, 12)), (19, "{broken}\n")):
            assert any(line.startswith("written: ") for line in lines)
            assert json.loads(picture.read_text())["fits"][0]["points"] == points
            with open(folder / "evals.jsonl", "a") as file:
                file.write(next_rows)
        # By now the second drawing has been counted, too.
        assert any(line.startswith("waiting: ") for line in lines)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, error
    assert out.rstrip().endswith("stopped watching; drawn 2 times")
    assert "Traceback" not in error


@pytest.mark.parametrize("data", [b"{", b"\xff\0", b"[]", b'{"max_steps": "many"}', b"[" * 100_000])
def test_a_config_that_is_none_is_one_line(folder, data):
    (folder / "evals.jsonl").write_text(rows(8))
    (folder / "config.json").write_bytes(data)
    thread, _, errors = watching(folder, Draws())
    thread.join(SECONDS)
    assert str(errors[0]) == f"{folder}/config.json: is not the config of a run"


@pytest.mark.parametrize("row", [b"\xff\n", b"[3]\n", b"null\n", b'{"step": null}\n'])
def test_a_last_row_that_is_none_has_no_step(folder, row):
    (folder / "evals.jsonl").write_bytes(row)
    assert watch._last_step(str(folder / "evals.jsonl")) == -1

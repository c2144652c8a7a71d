"""docs/start/ladder.md: its seven commands, run in order, print what the page says they print."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from docs import run_page
from requirements import install
from tests.support.paths import ROOT
from tests.support.ports import free_port

PAGE = pathlib.Path(ROOT) / "docs" / "start" / "ladder.md"
RUNGS = [step for step in run_page.parse(PAGE.read_text()) if isinstance(step, run_page.Command)]
SHELL_SECONDS = 600.0  # of a loaded machine
PORT = "8500"  # on the page
# How far a printed number may be from the page's: by itself, and as a share; on the other rungs numbers are free.
NEAR = {3: (0.9, 0.0), 4: (0.003, 0.02)}


def rung(command: run_page.Command) -> int:
    return int(command.heading.partition(".")[0])


def test_there_are_seven_rungs() -> None:
    assert [rung(command) for command in RUNGS] == [1, 2, 3, 4, 5, 6, 7]
    assert all(command.shown for command in RUNGS)
    assert [rung(command) for command in RUNGS if command.not_run] == [2]


def test_the_set_up_says_what_the_page_shows() -> None:
    """Without making an environment: its words, and how many packages the lock file has."""
    making, installing, ready = RUNGS[1].shown.splitlines()
    source = pathlib.Path(install.__file__).read_text()
    for words in ('say(f"making {venv} with Python', 'say(f"installing {len(locked)} packages from', "is ready ("):
        assert words in source
    count, lock = re.fullmatch(r"setup: installing (\d+) packages from (\S+)", installing).groups()
    assert int(count) == len(install.pins(pathlib.Path(ROOT) / lock))
    assert making.startswith("setup: making /") and re.search(r"/\.venv is ready \(\d+ s\)$", ready)
    if install.is_installed(pathlib.Path(ROOT) / ".venv", "train", False):
        # Under `make test` this make would be one inside another, and say which folder it enters.
        of_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
        outside = {name: value for name, value in os.environ.items() if name not in of_make}
        done = subprocess.run(
            RUNGS[1].script, shell=True, cwd=ROOT, env=outside, capture_output=True, text=True, timeout=600, check=False
        )
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7 * SHELL_SECONDS)
def test_each_command_prints_what_the_page_shows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    folder = tmp_path / "ladder"
    run = run_page.run_page(
        PAGE,
        folder,
        venv=pathlib.Path(sys.prefix),
        block_seconds=SHELL_SECONDS,
        replace={PORT: str(free_port())},
        near=lambda command: NEAR.get(rung(command)),
    )
    assert run == 6
    rows = [json.loads(line) for line in (folder / "runs" / "ladder" / "metrics.jsonl").read_text().splitlines()]
    assert any(row["pushes"]["applied"] for row in rows) and max(row["lag_mean"] for row in rows) > 0
    assert len({server for row in rows for server in row["servers"]}) == 2

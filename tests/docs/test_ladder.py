"""docs/start/ladder.md: its seven commands, run in order, print what the page says they print."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from requirements import install
from tests.support.hosts import free_port
from tests.support.paths import ROOT

PAGE = pathlib.Path(ROOT) / "docs" / "start" / "ladder.md"
_RUNG = r"^## (\d)\. .*?^```sh\n(.*?)^```\n\n^```text\n(.*?)^```"
RUNGS = re.findall(_RUNG, PAGE.read_text(), re.DOTALL | re.MULTILINE)
SHELL_SECONDS = 150
PORT = "8500"  # on the page
# How far a printed number may be from the page's: by itself, and as a share; on the other rungs numbers are free.
NEAR = {3: (0.9, 0.0), 4: (0.003, 0.02)}
_ID = re.compile(r"\b[0-9a-f]{32}\b")
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]\d+)?")
_REST = "..."


def parts(line: str) -> list[str]:
    """A line between its numbers; tables are drawn as wide as their rows."""
    return [re.sub(r"[\s─│┌┐└┘]+", "", part) for part in _NUMBER.split(_ID.sub("0", line))]


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in _NUMBER.findall(_ID.sub("0", line))]


def says(printed: str, shown: str, rung: int) -> bool:
    """Whether a printed line is the one that the page shows; "..." at its end stands for the rest."""
    whole = not shown.rstrip().endswith(_REST)
    shown = shown.rstrip().removesuffix(_REST)
    expected, found = parts(shown), parts(printed)
    if (whole and len(found) != len(expected)) or len(found) < len(expected):
        return False
    found, last = found[: len(expected)], found[len(expected) - 1]
    if found[:-1] != expected[:-1] or not (last == expected[-1] or (not whole and last.startswith(expected[-1]))):
        return False
    if rung not in NEAR:
        return True
    most, share = NEAR[rung]
    return all(abs(a - b) <= most + share * abs(a) for a, b in zip(numbers(shown), numbers(printed)))


def missing(printed: str, shown: str, rung: int) -> list[str]:
    """Lines of the page that are not among the printed ones, in the page's order."""
    left = iter(printed.splitlines())
    lines = [line for line in shown.splitlines() if parts(line) not in ([""], [_REST])]
    return [line for line in lines if not any(says(found, line, rung) for found in left)]


def test_what_counts_as_printed() -> None:
    shown = "setup: installing 77 packages\n...\nstep 6: rate 0.152 (32 prompts)\nstaleness   mean 1.48, ...\n"
    same = "setup: installing 9 packages\nx\nstep 6: rate 0.9 (1 prompts)\nstaleness  mean 2, most 3"
    assert not missing(same, shown, 7)
    assert missing("setup: installing 9 packages\nstep 6: rate 0.9", shown, 7)
    assert missing("2 rows: 2 correct (100.0%)", "2 rows: 1 correct (50.0%)", 3)
    assert missing("A 0.630", "A 0.606", 4) == ["A 0.606"] and not missing("A 0.607", "A 0.606", 4)
    assert missing("b\na", "a\nb", 7) == ["b"]


def test_there_are_seven_rungs() -> None:
    assert [int(number) for number, _, _ in RUNGS] == [1, 2, 3, 4, 5, 6, 7]


def test_the_set_up_says_what_the_page_shows() -> None:
    """Without making an environment: its words, and how many packages the lock file has."""
    _, command, shown = RUNGS[1]
    making, installing, ready = shown.splitlines()
    source = pathlib.Path(install.__file__).read_text()
    for words in ('say(f"making {venv} with Python', 'say(f"installing {len(locked)} packages from', "is ready ("):
        assert words in source
    count, lock = re.fullmatch(r"setup: installing (\d+) packages from (\S+)", installing).groups()
    assert int(count) == len(install.pins(pathlib.Path(ROOT) / lock))
    assert making.startswith("setup: making /") and re.search(r"/\.venv is ready \(\d+ s\)$", ready)
    if command.strip() == "make setup" and install.is_installed(pathlib.Path(ROOT) / ".venv", "train", False):
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(7 * SHELL_SECONDS)
def test_each_command_prints_what_the_page_shows(tmp_path: pathlib.Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "configs").symlink_to(pathlib.Path(ROOT) / "configs")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])
    port = str(free_port())
    for number, command, shown in RUNGS:
        if number == "2":
            continue  # an environment is not made anew here, see above
        done = subprocess.run(
            ["bash", "-c", command.replace(PORT, port)],
            cwd=tmp_path,
            env={**environment, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SHELL_SECONDS,
            check=False,
        )
        print(f"=== {number}\n{done.stdout}")
        assert not missing(done.stdout, shown, int(number)), done.stdout
    rows = [json.loads(line) for line in (tmp_path / "runs" / "ladder" / "metrics.jsonl").read_text().splitlines()]
    assert any(row["pushes"]["applied"] for row in rows) and max(row["lag_mean"] for row in rows) > 0
    assert len({server for row in rows for server in row["servers"]}) == 2

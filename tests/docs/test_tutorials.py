"""docs/tutorials: each page is run whole, as `make tutorial` runs it, and prints what it shows."""

import pathlib
import re
import sys

import pytest

from docs import run_page
from tests.support.paths import ROOT
from tests.support.ports import free_port

FOLDER = pathlib.Path(ROOT) / "docs" / "tutorials"
PORT = re.compile(r"--port=(\d{4,5})\b")  # of servers that a page starts
BLOCK_SECONDS = 900.0  # of a loaded machine


def commands(page: pathlib.Path) -> list[run_page.Command]:
    """Those that are run."""
    steps = run_page.parse(page.read_text())
    return [step for step in steps if isinstance(step, run_page.Command) and step.not_run is None]


PAGES = {page.stem: page for page in sorted(FOLDER.glob("*.md")) if commands(page)}


def free_ports(page: pathlib.Path) -> dict[str, str]:
    """Instead of the page's, so that pages run beside each other and beside whatever has these ports."""
    return {port: str(free_port()) for port in sorted(set(PORT.findall(page.read_text())))}


def test_the_pages_that_run_are_here() -> None:
    assert {"own_data", "own_environment", "own_reward", "chat_model"} <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_its_commands_print(name: str) -> None:
    """A command that shows nothing is compared with nothing: most have to show something."""
    shown = [command for command in commands(PAGES[name]) if command.shown]
    assert 2 * len(shown) > len(commands(PAGES[name]))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_whole(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    page, venv = PAGES[name], pathlib.Path(sys.prefix)
    run = run_page.run_page(page, tmp_path / name, venv=venv, block_seconds=BLOCK_SECONDS, replace=free_ports(page))
    assert run == len(commands(page))

"""Runs a page of the documentation as a reader would: its files, its commands, and whether they print what it shows.

    python docs/run_page.py docs/tutorials/own_data.md --workdir=runs/tutorials/own_data

Standard library only. What a page consists of:

* A block with a title, as in ```python title="my_rewards.py", is a file, written before the command after it.
* A block ```sh is a command: one `bash -euo pipefail` script, in a folder that has links to the clone's `configs` and
  `.venv`, with `.venv/bin` on PATH and the clone importable.
* A block ```text directly after a command is what it prints. Each of its lines must be among those printed, in that
  order. Numbers may differ. A line that ends in `...` is cut there; `...` alone stands for any lines.
* `<!-- not run: REASON -->` on the line before a command says that it is not run, and why.

The run ends at the first command that fails or prints something else. Processes that a command leaves behind, such as
a server, go on until the end of the page, and are ended there.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK_SECONDS = 600.0
LINKS = ("configs", ".venv")
Near = tuple[float, float]  # how far a printed number may be from the page's: by itself, and as a share of it

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*) *(?P<rest>[^`]*)$")
_TITLE = re.compile(r'\btitle="([^"]*)"')
_NOT_RUN = re.compile(r"<!--\s*not run(.*)$")
_REASON = re.compile(r":\s*(\S.*?)\s*-->\s*$")
_SHELLS_NOT_RUN = ("bash", "shell", "console", "shell-session", "zsh")
_ID = re.compile(r"\b[0-9a-f]{32}\b")
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]\d+|[kMG]\b)?")
_SCALES = {"k": 1e3, "M": 1e6, "G": 1e9}
_REST = "..."
_STOPS = (signal.SIGINT, signal.SIGTERM)
_LEFT_SECONDS = 10.0  # that processes which a command left behind get for their end


class PageError(Exception):
    """One line for the terminal: what is wrong with the page, or where the run of it ended."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file that the page has its reader write."""

    line: int  # in the page, from 1, where the block begins
    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A script that the page has its reader run."""

    line: int
    heading: str  # the one it stands under
    script: str
    shown: str | None  # what the page says it prints
    not_run: str | None  # why it is not run


Step = File | Command


# ---- the page


@dataclasses.dataclass(frozen=True)
class _Block:
    line: int  # of the opening fence
    last: int  # of the closing fence
    language: str
    title: str | None
    heading: str
    text: str


def _blocks(lines: list[str]) -> Iterator[_Block]:
    heading, at = "", 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            if lines[at].startswith("#"):
                heading = lines[at].lstrip("#").strip()
            at += 1
            continue
        start, indent = at, len(fence["indent"])
        closing = re.compile(rf" *{fence['ticks']}`* *$")
        at += 1
        inside = []
        while at < len(lines) and not closing.match(lines[at]):
            inside.append(lines[at][indent:] if not lines[at][:indent].strip() else lines[at])
            at += 1
        if at == len(lines):
            raise PageError(f"line {start + 1}: the block that begins here has no end")
        title = _TITLE.search(fence["rest"])
        text = "".join(f"{line}\n" for line in inside)
        yield _Block(start + 1, at + 1, fence["language"], title[1] if title else None, heading, text)
        at += 1


def parse(text: str) -> list[Step]:
    """The files and commands of a page, in its order."""
    lines = text.splitlines()
    steps: list[Step] = []
    blocks = list(_blocks(lines))
    inside = {number for block in blocks for number in range(block.line, block.last + 1)}
    reasons = {}
    for number, line in enumerate(lines, 1):
        said = None if number in inside else _NOT_RUN.search(line)
        if said:
            reason = _REASON.match(said[1])
            if reason is None:
                raise PageError(f"line {number}: a command that is not run needs a reason: <!-- not run: REASON -->")
            reasons[number + 1] = reason[1]
    for index, block in enumerate(blocks):
        if block.title is not None:
            steps.append(File(block.line, _checked(block), block.text))
        elif block.language == "sh":
            after = blocks[index + 1] if index + 1 < len(blocks) else None
            shown = None
            if after is not None and after.language == "text" and after.title is None:
                between = lines[block.last : after.line - 1]
                shown = after.text if not any(line.strip() for line in between) else None
            steps.append(Command(block.line, block.heading, block.text, shown, reasons.pop(block.line, None)))
        elif block.language in _SHELLS_NOT_RUN:
            raise PageError(f"line {block.line}: ```{block.language} is not run; a command is ```sh")
    for after_it in reasons:
        raise PageError(f'line {after_it - 1}: "not run" stands on the line before a command, ```sh')
    return steps


def _checked(block: _Block) -> str:
    name = pathlib.PurePosixPath(block.title or "")
    if not name.name or name.is_absolute() or ".." in name.parts or name.parts[0] in LINKS:
        raise PageError(f'line {block.line}: title="{block.title}" is no file in the folder of the run')
    return str(name)


# ---- what is shown, and what is printed


def parts(line: str) -> list[str]:
    """A line between its numbers; tables are drawn as wide as their rows."""
    return [re.sub(r"[\s─│┌┐└┘]+", "", part) for part in _NUMBER.split(_ID.sub("0", line))]


def numbers(line: str) -> list[float]:
    found = [number.replace(",", "") for number in _NUMBER.findall(_ID.sub("0", line))]
    return [float(number.rstrip("kMG")) * _SCALES.get(number[-1], 1) for number in found]


def says(printed: str, shown: str, near: Near | None = None) -> bool:
    """Whether a printed line is the one that the page shows; "..." at its end stands for the rest."""
    whole = not shown.rstrip().endswith(_REST)
    shown = shown.rstrip().removesuffix(_REST)
    expected, found = parts(shown), parts(printed)
    if (whole and len(found) != len(expected)) or len(found) < len(expected):
        return False
    found, last = found[: len(expected)], found[len(expected) - 1]
    if found[:-1] != expected[:-1] or not (last == expected[-1] or (not whole and last.startswith(expected[-1]))):
        return False
    if near is None:
        return True
    most, share = near
    return all(abs(a - b) <= most + share * abs(a) for a, b in zip(numbers(shown), numbers(printed)))


def missing(printed: str, shown: str, near: Near | None = None) -> list[str]:
    """Lines of the page that are not among the printed ones, in the page's order. near: None lets numbers be any."""
    left = iter(printed.splitlines())
    lines = [line for line in shown.splitlines() if parts(line) not in ([""], [_REST])]
    return [line for line in lines if not any(says(found, line, near) for found in left)]


# ---- the run


class Shell:
    """Runs scripts in one folder, one after the other, and at its end whatever they have left behind is ended."""

    def __init__(self, folder: pathlib.Path, venv: pathlib.Path):
        path = os.pathsep.join([str(folder / ".venv" / "bin"), os.environ.get("PATH", "")])
        importable = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        # Unbuffered, so that what a command says is seen when it says it, though it goes into a file.
        self._environment = {**os.environ, "PATH": path, "PYTHONPATH": importable, "PYTHONUNBUFFERED": "1"}
        self._folder = folder
        self._groups: list[subprocess.Popen] = []
        for name, target in zip(LINKS, (ROOT / "configs", venv)):
            (folder / name).symlink_to(target)

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._groups):
            _end(process)

    def run(self, script: str, seconds: float, terminal: TextIO) -> tuple[int | None, str]:
        """The exit code, None where it did not end in time, and what was printed; `terminal` sees it as it comes.

        Into a file, not a pipe: a pipe stays open for as long as a process in the background has it.
        """
        # Opened by its name, which is gone at once: the folder holds what the page made and nothing else.
        name = self._folder / ".printed"
        with name.open("wb") as into, name.open("rb") as printed:
            name.unlink()
            with _signals_later():  # or a process would be there that no list has
                process = subprocess.Popen(
                    ["bash", "-euo", "pipefail", "-c", script],
                    cwd=self._folder,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=into,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a group of its own, to end it with all that it has started
                )
                self._groups.append(process)
            until, whole, code = time.monotonic() + seconds, b"", None
            while True:
                code = _exit_code(process)
                more = printed.read()
                whole += more
                terminal.write(more.decode(errors="replace"))
                terminal.flush()
                if code is not None or time.monotonic() > until:
                    return code, whole.decode(errors="replace")
                time.sleep(0.05)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come within are sent again after it. Only the main thread has handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)


def _exit_code(process: subprocess.Popen) -> int | None:
    """Without collecting the process: as long as it is not collected, nobody else gets the number of its group."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _end(process: subprocess.Popen) -> None:
    """The process and its group: asked first, then killed."""
    until = time.monotonic() + _LEFT_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < until and _has_members(process):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _has_members(process: subprocess.Popen) -> bool:
    """Whether any of the group still runs; one that has ended and is not yet collected does not."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(group) == process.pid and state not in "ZX":
                return True
    return False


def run_page(
    page: pathlib.Path,
    folder: pathlib.Path,
    *,
    venv: pathlib.Path = ROOT / ".venv",
    block_seconds: float = BLOCK_SECONDS,
    replace: Mapping[str, str] | None = None,
    near: Callable[[Command], Near | None] = lambda command: None,
    terminal: TextIO | None = None,
) -> int:
    """How many commands were run; raises PageError where one fails or prints something else than the page shows.

    folder: made, or empty. replace: texts of files and commands that are others here, such as ports. near: how near
    the page's numbers those of a command must be.
    """
    if not page.is_file():
        raise PageError(f"{page}: no such page")
    try:
        steps = parse(page.read_text())
    except PageError as error:
        raise PageError(f"{page}: {error}") from None
    commands = sum(isinstance(step, Command) and step.not_run is None for step in steps)
    if not commands:
        raise PageError(f"{page}: no command to be run")
    if not (venv / "bin" / "python").exists():
        raise PageError(f"{venv}: no environment; `make setup` makes one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PageError(f"--workdir={folder}: not an empty folder; name another one, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    folder, terminal = folder.resolve(), terminal or sys.stdout

    def here(text: str) -> str:
        for old, new in (replace or {}).items():
            text = text.replace(old, new)
        return text

    with Shell(folder, venv.absolute()) as shell:
        for step in steps:
            at = f"{page}:{step.line}"
            if isinstance(step, File):
                target = folder / step.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(here(step.text))
                print(f"=== {at}: wrote {step.name}", file=terminal, flush=True)
                continue
            if step.not_run is not None:
                print(f"=== {at}: not run: {step.not_run}", file=terminal, flush=True)
                continue
            print(f"=== {at}\n{here(step.script)}---", file=terminal, flush=True)
            code, printed = shell.run(here(step.script), block_seconds, terminal)
            if code is None:
                raise PageError(f"{at}: not over after {block_seconds:g} s")
            if code:
                raise PageError(f"{at}: exit code {code}")
            lines = missing(printed, here(step.shown or ""), near(step))
            if lines:
                raise PageError(f"{at}: did not print, or not in this order: {lines[0].strip()}")
    return commands


def _replacement(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise argparse.ArgumentTypeError(f"{text}: wanted OLD=NEW")
    return old, new


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs a page of the documentation and compares what is printed.")
    parser.add_argument("page", type=pathlib.Path, metavar="PAGE", help="docs/tutorials/own_data.md, for one")
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="where it is run: a new or empty folder")
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / ".venv", help="the environment of its commands")
    parser.add_argument("--block_seconds", type=float, default=BLOCK_SECONDS, help="that one command may take")
    parser.add_argument(
        "--replace",
        type=_replacement,
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="in its commands and files, such as a port that is taken here: 8500=8600",
    )
    given = parser.parse_args(arguments)

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)  # through the Shell's end

    signal.signal(signal.SIGTERM, leave)
    start = time.monotonic()
    try:
        commands = run_page(
            given.page,
            given.workdir,
            venv=given.venv,
            block_seconds=given.block_seconds,
            replace=dict(given.replace),
        )
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    ran = f"{commands} command{'s' if commands > 1 else ''} ran"
    print(f"=== {given.page}: {ran} and printed what the page shows ({time.monotonic() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The progress line of a run: a bar on a terminal, a plain line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

_EVERY_SECONDS = 5.0  # between two plain lines


def _short(number: float) -> str:
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.1f}{letter}"
    return f"{number:.0f}"


def rounded(number: float, sign: str = "") -> str:
    """To a thousandth; from a million on, three significant digits."""
    return f"{number:{sign}.3f}" if abs(number) < 1e6 else f"{number:{sign}.3g}"


# The parts of the line, in this order; parts without a value yet are left out.
_PARTS: dict[str, Callable[[Any], str]] = {
    "pass_rate": "pass {:.3f}".format,  # of the latest batch
    "reward": lambda mean: f"reward {rounded(mean, '+')}",  # in [-1, 1] unless a reward is the user's own
    "staleness": "staleness {:.1f}".format,  # mean of the trained tokens, in updates
    "trained_per_second": lambda tokens: f"train {_short(tokens)} tok/s",
    "sampled_per_second": lambda tokens: f"sample {_short(tokens)} tok/s",  # of all servers
    "note": str,  # the evaluation's result, or another occasional note
    "waiting": str,  # what is waited for, and for how long
}


class ProgressLine:
    """A context manager. `log` prints a line above the bar and leaves it there."""

    def __init__(
        self,
        what: str,
        *,
        updates: int,
        step: int = 0,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = Console(file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._what, self._updates, self._clock = what, updates, clock
        self._shown: dict[str, Any] = {"step": step}
        self._printed_at: float | None = None
        self._printed = ""
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn(f"{what} {{task.completed:.0f}}/{{task.total:.0f}}", markup=False),
                BarColumn(bar_width=16),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
                console=self._console,
                refresh_per_second=2,
            )
            self._task = self._bar.add_task(what, total=updates, completed=step, line="")

    def __enter__(self) -> "ProgressLine":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._text() != self._printed:
            self._print()

    def update(self, **changes: Any) -> None:
        """Changes the step and some parts of the line; the rest stays. `waiting` must be given each time."""
        assert changes.keys() <= {"step", *_PARTS}, changes.keys()
        self._shown |= {"waiting": "", **changes}
        if self._bar is not None:
            self._bar.update(self._task, completed=self._shown["step"], line=self._line())
            return
        due = self._printed_at is None or self._clock() - self._printed_at >= _EVERY_SECONDS
        if due and self._text() != self._printed:
            self._print()

    def log(self, line: str) -> None:
        self._console.print(line)

    def _line(self) -> str:
        return "  ".join(show(self._shown[name]) for name, show in _PARTS.items() if self._shown.get(name, "") != "")

    def _text(self) -> str:
        return f"{self._what} {self._shown['step']}/{self._updates}  {self._line()}".rstrip()

    def _print(self) -> None:
        self._printed_at, self._printed = self._clock(), self._text()
        self._console.print(self._printed)
        self._console.file.flush()

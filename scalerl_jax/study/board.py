"""The processes of a study, and their progress as people see it.

On a terminal it is a table; elsewhere a line when a process starts or ends, and one a minute. The time left is the
steps left times the seconds per step so far: the run's own, else the mean of the others'.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from scalerl_jax.run.jsonl import last_row

WAITING, RUNNING, FINISHED, FAILED = "waiting", "running", "finished", "failed"
EVERY_SECONDS = 60.0  # between two lines where there is no terminal
_READ_SECONDS = 1.0
_AROUND = 6  # lines of the terminal not available to the table's rows
_ORDER = {RUNNING: 0, FAILED: 1, WAITING: 2, FINISHED: 3}  # priority for display if not all fit


@dataclasses.dataclass(eq=False)
class Task:
    """One process of a study: a member with one seed, or a warm start."""

    name: str
    folder: str
    log: str
    steps: int  # total
    command: Callable[[], list[str]]  # evaluated at the start
    needs: "Task | None" = None  # the task that must finish first
    is_run: bool = True  # not a warm start
    state: str = WAITING
    why: str = ""  # why it failed
    began: float = 0.0  # start time, by the same clock as its rows
    step: int = 0
    pass_rate: float | None = None  # of the latest held-out evaluation
    first: tuple[int, float] | None = None  # (step, time in seconds) of the first row seen while it ran
    latest: tuple[int, float] | None = None  # of the last row
    _seen: tuple[int, ...] = ()  # sizes of the files when they were last read

    def read_progress(self) -> None:
        """Reads its progress from the ends of its files, if they have grown."""
        paths = [os.path.join(self.folder, name) for name in ("metrics.jsonl", "evals.jsonl")]
        sizes = tuple(os.path.getsize(path) if os.path.exists(path) else 0 for path in paths)
        if sizes == self._seen:
            return
        self._seen = sizes
        update, evaluation = map(last_row, paths)
        if evaluation is not None and isinstance(evaluation.get("pass_rate"), float):
            self.pass_rate = evaluation["pass_rate"]
        if update is not None:
            self.step = update["step"]
            if self.state == RUNNING and isinstance(update.get("time"), float) and update["time"] > self.began:
                self.latest = (update["step"], update["time"])
                self.first = self.first or self.latest

    @property
    def seconds_per_step(self) -> float | None:
        """Measured since it was started; None if not known yet."""
        if self.first is None or self.latest is None or self.latest[0] <= self.first[0]:
            return None
        return max(0.0, self.latest[1] - self.first[1]) / (self.latest[0] - self.first[0])


class Board:
    """Shows the progress; use it as a context manager."""

    def __init__(self, tasks: Sequence[Task], *, parallel: int):
        self._tasks, self._parallel = tasks, parallel
        self._console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._read_at = self._printed_at = time.monotonic()
        for task in tasks:
            task.read_progress()

    def __enter__(self) -> "Board":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._refresh()
            self._live.stop()

    def log(self, line: str) -> None:
        self._console.print(line, markup=False)

    def started(self, task: Task) -> None:
        task.read_progress()
        if self._live is None:
            self.log(f"{task.name}: " + (f"goes on from step {task.step}" if task.step else "starts"))

    def ended(self, task: Task) -> None:
        task.read_progress()
        if task.state == FAILED:
            self.log(f"{task.name}: failed: {task.why} ({task.log})")
        elif self._live is None:
            rate = "" if task.pass_rate is None else f", held-out pass rate {task.pass_rate:.3f}"
            self.log(f"{task.name}: finished at step {task.step}{rate}")

    def show(self) -> None:
        """Updates the display; call it often. It reads the files once a second."""
        now = time.monotonic()
        if now - self._read_at < _READ_SECONDS:
            return
        self._read_at = now
        for task in self._tasks:
            if task.state == RUNNING:
                task.read_progress()
        if self._live is not None:
            self._refresh()
        elif now - self._printed_at >= EVERY_SECONDS:
            self._printed_at = now
            self.log(self.line())

    def line(self) -> str:
        """The progress in one line."""
        running = [
            f"{task.name} {task.step}/{task.steps}" + ("" if task.pass_rate is None else f" pass {task.pass_rate:.3f}")
            for task in self._tasks
            if task.state == RUNNING
        ]
        return f"{self._counts()}{'; ' * bool(running)}{', '.join(running)}; {_left(self.seconds_left())}"

    def seconds_left(self) -> float | None:
        """Estimated seconds until all have ended; None if not known yet."""
        free = [0.0] * self._parallel
        for task in sorted(self._tasks, key=lambda one: one.state != RUNNING):  # running tasks already have their share
            if task.state in (RUNNING, WAITING):
                left = self._task_left(task)
                if left is None:
                    return None
                free.sort()
                free[0] += left
        return max(free)

    def _task_left(self, task: Task) -> float | None:
        rate = task.seconds_per_step
        if rate is None:
            seen = [
                other.seconds_per_step
                for other in self._tasks
                if other.is_run == task.is_run and other.seconds_per_step is not None
            ]
            if not seen:
                return None if task.is_run else 0.0
            rate = sum(seen) / len(seen)
        return rate * max(0, task.steps - task.step)

    def _counts(self) -> str:
        runs = [task for task in self._tasks if task.is_run]
        failed = sum(task.state == FAILED for task in runs)
        done = f"{sum(task.state == FINISHED for task in runs)} of {len(runs)} runs finished"
        return f"{done}, {failed} failed" if failed else done

    def _refresh(self) -> None:
        assert self._live is not None
        table = Table(box=None, padding=(0, 2, 0, 0))
        for head in ("run", "state", "step", "pass rate", "time left"):
            table.add_column(head, justify="left" if head in ("run", "state") else "right")
        max_rows = max(3, self._console.height - _AROUND)
        shown = sorted(self._tasks, key=lambda task: _ORDER[task.state])[:max_rows]
        for task in (task for task in self._tasks if task in shown):
            left = self._task_left(task) if task.state in (RUNNING, WAITING) else None
            table.add_row(
                escape(task.name),
                task.state,
                f"{task.step}/{task.steps}",
                "" if task.pass_rate is None else f"{task.pass_rate:.3f}",
                "" if left is None else duration(left),
            )
        more = len(self._tasks) - len(shown)
        below = f"and {more} more; " if more else ""
        whole = Text(f"{below}{self._counts()}; {_left(self.seconds_left())}")
        self._live.update(Group(table, whole), refresh=True)


def _left(seconds: float | None) -> str:
    return "time left not known yet" if seconds is None else f"about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Seconds as text: 1 h 05 min, 12 min, 40 s."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"

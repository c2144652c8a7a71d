"""One process of a study: a member with one seed, or a warm start."""

import dataclasses
import os
from collections.abc import Callable

from scalerl_jax.run.jsonl import last_row

WAITING, RUNNING, FINISHED, FAILED = "waiting", "running", "finished", "failed"


@dataclasses.dataclass(eq=False)
class Task:
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

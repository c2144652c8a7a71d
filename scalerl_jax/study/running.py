"""Every run of a study in order, as many at a time as there are shares of the machine, until each has ended.

    waiting -> running -> finished | failed

A run waits for the warm start that it needs, and for a trainer that an earlier start of the study has left in its
folder, which is saving. One that fails holds up no other. A signal is passed on to what runs, once, and waited for.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from scalerl_jax.study.board import Board
from scalerl_jax.study.child import Child
from scalerl_jax.study.finished import is_held
from scalerl_jax.study.shares import Share
from scalerl_jax.study.task import FAILED, FINISHED, RUNNING, WAITING, Task
from scalerl_jax.system import files, signals

HELD_SECONDS = 300.0  # that a trainer of an earlier start may take to save
_POLL_SECONDS = 0.25


@dataclasses.dataclass
class Running:
    """What is under way, and where it runs."""

    tasks: Sequence[Task]
    shares: list[Share]  # free ones
    environment: Mapping[str, str]
    board: Board
    ended: Callable[[Task], str]  # after exit code 0: why it has not finished all the same; "": it has
    children: dict[str, Child] = dataclasses.field(default_factory=dict)  # by the task's name
    since: float = dataclasses.field(default_factory=time.monotonic)

    def until_all_have_ended(self) -> None:
        """Raises signals.Interrupted where a signal has come; what ran has saved and left by then."""
        try:
            while any(task.state in (WAITING, RUNNING) for task in self.tasks):
                signals.look()
                self._settle()
                self._start()
                self.board.show()
                time.sleep(_POLL_SECONDS)
        except BaseException:  # a fault of ours leaves nothing running either
            self._stop()
            raise

    def _settle(self) -> None:
        for task in self.tasks:
            child = self.children.get(task.name)
            if child is None or (code := child.ended()) is None:
                continue
            del self.children[task.name]
            self.shares.append(child.share)
            why = self.ended(task) if code == 0 else child.last_line()
            self._ended(task, why)

    def _ended(self, task: Task, why: str) -> None:
        task.state, task.why = (FAILED, why) if why else (FINISHED, "")
        self.board.ended(task)

    def _start(self) -> None:
        for task in self.tasks:
            if not self.shares:
                return
            if task.state != WAITING or (task.needs is not None and task.needs.state in (WAITING, RUNNING)):
                continue
            if task.needs is not None and task.needs.state == FAILED:
                self._ended(task, f"{task.needs.name} failed, which it starts from")
            elif not is_held(task.folder):
                self._begin(task)
            elif time.monotonic() - self.since > HELD_SECONDS:
                self._ended(task, f"{task.folder}: a trainer is running in it")

    def _begin(self, task: Task) -> None:
        share = self.shares.pop(0)
        try:
            child = Child(task.command(), log=task.log, share=share, environment=self.environment)
        except OSError as error:
            self.shares.insert(0, share)
            self._ended(task, f"cannot be started: {files.reason(error)}")
            return
        self.children[task.name] = child
        task.state, task.began = RUNNING, time.time()
        self.board.started(task)

    def _stop(self) -> None:
        for child in self.children.values():
            child.ask_to_stop()
        for child in self.children.values():
            child.wait()

"""Runs every run of a study in order, as many at a time as there are shares of the machine.

    waiting -> running -> finished | failed

A run waits for the warm start that it needs, and for a trainer of an earlier start of the study that is still saving in
its folder. A failed run does not stop the others. A signal is passed once to the running processes, which are then
waited for.

A share of this machine is what each of N simultaneous members gets: cores, and GPUs if there are any.

All shares are equal, so that device-hours of members can be compared: left-over cores stay idle, and the number of GPUs
must be divisible.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from scalerl_jax.cli.entry import UserError
from scalerl_jax.study.board import FAILED, FINISHED, RUNNING, WAITING, Board, Task
from scalerl_jax.study.plan_file import is_held
from scalerl_jax.system import files, platforms, signals


@dataclasses.dataclass(frozen=True)
class Share:
    cores: frozenset[int]  # empty: those of this process
    environment: dict[str, str]  # added to this process's environment


def shares(parallel: int, environment: Mapping[str, str]) -> list[Share]:
    """A share for each simultaneous member. Raises UserError if there are too few cores or GPUs do not divide."""
    if parallel == 1:
        return [Share(frozenset(), {})]
    asked = f"--parallel={parallel}"
    gpus = platforms.visible_gpus(environment) if platforms.jax_uses_gpus(environment) else []
    if not gpus and platforms.accelerated(environment):
        raise UserError(f"{asked}: a member has all accelerators of this machine to itself")
    if len(gpus) % parallel:
        raise UserError(f"{asked}: {len(gpus)} GPUs do not divide into {parallel} equal shares")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores and len(cores) < parallel:
        raise UserError(f"{asked}: this process has {len(cores)} cores")
    each, cards = len(cores) // parallel, len(gpus) // parallel
    return [
        Share(
            frozenset(cores[n * each : (n + 1) * each]),
            {"CUDA_VISIBLE_DEVICES": ",".join(gpus[n * cards : (n + 1) * cards])} if gpus else {},
        )
        for n in range(parallel)
    ]


_TAIL = 4096  # bytes at the end of a log, which hold its last line


class Child:
    def __init__(self, command: Sequence[str], *, log: str, share: Share, environment: Mapping[str, str]):
        """Starts a process whose output is appended to the file `log`. Raises OSError."""
        self.share = share
        self._log = log
        os.makedirs(os.path.dirname(log), exist_ok=True)
        with open(log, "ab") as output, _on(share.cores):
            self._begin = output.tell()
            self._process = subprocess.Popen(
                [*command, "--exit_with_parent"],
                stdin=subprocess.PIPE,  # never written to; the process stops when it closes
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **share.environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def ended(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        code = self._process.poll()
        if code is not None and self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def ask_to_stop(self) -> None:
        """Asks the process to save and exit."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait()

    def last_line(self) -> str:
        """The last line that this process has written to its log."""
        with open(self._log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, size - _TAIL))
            lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else f"it said nothing (exit code {self._process.poll()})"


@contextlib.contextmanager
def _on(cores: frozenset[int]) -> Iterator[None]:
    """Processes that this thread starts inside run on these cores."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


HELD_SECONDS = 300.0  # for a trainer of an earlier start to save
_POLL_SECONDS = 0.25


@dataclasses.dataclass
class Running:
    """The scheduler: tasks, their processes and the free shares."""

    tasks: Sequence[Task]
    shares: list[Share]  # the free shares
    environment: Mapping[str, str]
    board: Board
    ended: Callable[[Task], str]  # after exit code 0: why the task has failed, or "" if it has finished
    children: dict[str, Child] = dataclasses.field(default_factory=dict)  # by the task's name
    since: float = dataclasses.field(default_factory=time.monotonic)

    def until_all_have_ended(self) -> None:
        """Runs all tasks. Raises signals.Interrupted after a signal, once running processes have saved and ended."""
        try:
            while any(task.state in (WAITING, RUNNING) for task in self.tasks):
                signals.raise_if_interrupted()
                self._settle()
                self._start()
                self.board.show()
                time.sleep(_POLL_SECONDS)
        except BaseException:  # a bug leaves no process running either
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

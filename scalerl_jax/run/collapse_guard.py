"""The collapse alarm of a running trainer, and what config.checkpoint.on_collapse does about it.

The watch (collapse.py) receives every row as it is written. The trainer calls `raise_if_collapsed` where its state is
whole, before it saves; Collapsed ends the run there, and nothing more is saved. collapse.json records it: later starts
end the same way until --from_step has gone back to an earlier checkpoint, or on_collapse=alarm is given.
"""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config import Config
from scalerl_jax.learner.checkpoint import Checkpoints, set_aside, steps_there
from scalerl_jax.run.collapse import COLLAPSE, Collapse, CollapseWatch, follow
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.jsonl import read_rows
from scalerl_jax.system import signals
from scalerl_jax.system.files import read_object, write_whole

_ADVICE = (
    "lower the learning rate or config.pacing.max_off_policy_steps, and go on from a checkpoint of before (--from_step)"
)
_FILE = "collapse.json"


class Collapsed(SystemExit):
    """Ends a run whose policy has collapsed."""

    EXIT_CODE = 3

    def __init__(self, line: str):
        super().__init__(self.EXIT_CODE)
        self.line = line

    def __str__(self) -> str:
        return self.line


def check(workdir: str, *, on_collapse: str) -> str:
    """Called at a start, before checkpoints and rows are read. Returns a line if a stopped run continues.

    Raises Collapsed if the run had stopped and no flag says how to continue, and UserError if the file is damaged.
    """
    path = os.path.join(workdir, _FILE)
    if not os.path.exists(path):
        return ""
    try:
        stopped = read_object(path)
        step, last_good, message = int(stopped["step"]), int(stopped["last_good"]), str(stopped["says"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error!r}); put it back from a copy, or remove it") from None
    if on_collapse != "alarm":
        raise Collapsed(_line(workdir, step, last_good, message))
    os.remove(path)
    newest = max(_steps(workdir), default=0)
    return (
        f"going on from step {newest} as --config.checkpoint.on_collapse=alarm asks: {message} (stopped at step {step})"
    )


def go_back(workdir: str, step: int) -> str:
    """Sets aside the checkpoints after `step` (0: all), so that the next start continues from it. Returns a line on it.

    If it is killed, the same call completes it. Raises UserError if there is no checkpoint of that step.
    """
    there = _steps(workdir)
    if step and step not in there:
        names = ", ".join(map(str, there)) or "none"
        raise UserError(f"--from_step={step}: there is no checkpoint of that step (there are: {names})")
    aside = [set_aside(os.path.join(workdir, "checkpoints"), one, "set-aside") for one in there if one > step]
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(workdir, _FILE))
    kept = f"; kept aside: {', '.join(map(os.path.basename, aside))}" if aside else ""
    return f"back at step {step}{kept}. The same command without --from_step goes on from there"


def _stop(workdir: str, found: Collapse) -> Collapsed:
    record = {"step": found.step, "last_good": found.last_good, "says": str(found)}
    write_whole(os.path.join(workdir, _FILE), json.dumps(record, indent=1) + "\n")
    return Collapsed(_line(workdir, found.step, found.last_good, str(found)))


def _line(workdir: str, step: int, last_good: int, message: str) -> str:
    there = _steps(workdir)
    good = max((one for one in there if one <= last_good), default=0)
    kept = f"the last good checkpoint is that of step {good}" if good else "no checkpoint of before is kept"
    back = f"--from_step={good} goes back to {'it' if good else 'the start'}"
    alarm = f"--config.checkpoint.on_collapse=alarm goes on from step {max(there, default=0)}"
    return f"stopped at step {step}: {message}; {kept}; {back}; {alarm}"


def _steps(workdir: str) -> list[int]:
    return sorted(steps_there(os.path.join(workdir, "checkpoints")))


class CollapseGuard:
    """The collapse alarm of one trainer, for its thread. The folder's logs are open and end at the step to resume
    from."""

    def __init__(self, config: Config, *, folder: RunFolder, checkpoints: Checkpoints, log: Callable[[str], None]):
        self._on_collapse = config.checkpoint.on_collapse
        self._folder, self._checkpoints, self._log = folder, checkpoints, log
        self._watch = CollapseWatch()
        follow(self._watch, read_rows(folder.path("metrics.jsonl")), folder.evaluations())
        self._found: Collapse | None = None
        self._report(self._watch.raised)  # from the rows before a restart

    def updated(self, row: Mapping[str, Any]) -> dict[str, bool]:
        """Takes the next row of metrics.jsonl; returns this alarm by its name if it has been raised, as
        LearningWatch.past has the others."""
        self._report(self._watch.update(row))
        return {COLLAPSE: True} if self._watch.raised is not None else {}

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Takes the next row of evals.jsonl."""
        self._report(self._watch.evaluation(row))

    @contextlib.contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Wraps the update that makes `step`: a gradient that is not finite is a collapse at once.

        The state is lost with it, so with on_collapse=alarm the run still ends, with the FloatingPointError.
        """
        try:
            yield
        except FloatingPointError as error:
            self._report(self._watch.not_finite(step, str(error)))
            self.raise_if_collapsed()
            raise

    def raise_if_collapsed(self) -> None:
        """Raises Collapsed if the run has collapsed, unless on_collapse=alarm."""
        if self._found is None or self._on_collapse == "alarm":
            return
        self._checkpoints.wait()
        end = _stop(self._folder.workdir, self._found)
        signals.expect(end.line)
        raise end

    def kept(self, steps: Sequence[int]) -> Collection[int]:
        """The checkpoint to keep: the newest one that is not after the newest evaluation as good as the best."""
        good = self._watch.good_evaluation
        before = [step for step in steps if good is not None and step <= good]
        return before[-1:] if self._on_collapse != "alarm" else []

    def _report(self, found: Collapse | None) -> None:
        if found is not None:
            self._found = found
            self._log(f"update {found.step}: ALARM: {found}. What to do: {_ADVICE}.")

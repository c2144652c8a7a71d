"""The collapse alarm of a running trainer, and what config.checkpoint.on_collapse does about it.

The watch (collapse.py) is shown every row as it is written; the trainer asks `look` where its state is whole, before it
saves, and is ended there by Collapsed: nothing more is saved of it (going_back.py says how it goes on).
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.run import going_back
from scalerl_jax.run.collapse import COLLAPSE, Collapse, CollapseWatch, follow
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.jsonl import read_rows
from scalerl_jax.system import signals

_ADVICE = (
    "lower the learning rate or config.pacing.max_off_policy_steps, and go on from a checkpoint of before "
    "(config.checkpoint.on_collapse)"
)


class CollapseGuard:
    """Of one trainer; used by its thread. The folder's logs are open, and end at the step that the run goes on from."""

    def __init__(self, config: Config, *, folder: RunFolder, checkpoints: Checkpoints, say: Callable[[str], None]):
        self._on_collapse = config.checkpoint.on_collapse
        self._folder, self._checkpoints, self._say = folder, checkpoints, say
        self._watch = CollapseWatch()
        follow(self._watch, read_rows(folder.path("metrics.jsonl")), folder.evaluations())
        self._found: Collapse | None = None
        self._tell(self._watch.raised)  # of before a restart

    def wrap(
        self, told: Callable[[Mapping[str, Any], Mapping[str, bool]], None]
    ) -> Callable[[Mapping[str, Any], Mapping[str, bool]], None]:
        """`told`, as of StepMetrics, with this alarm among the others; each row is looked at."""

        def row(values: Mapping[str, Any], alarms: Mapping[str, bool]) -> None:
            self._tell(self._watch.update(values))
            told(values, {**alarms, COLLAPSE: True} if self._watch.raised is not None else alarms)

        return row

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """The next row of evals.jsonl."""
        self._tell(self._watch.evaluation(row))

    @contextlib.contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around the update that makes `step`: a gradient that is not finite is a collapse at once.

        The state is lost with it: as an alarm alone it ends the run as what it is, FloatingPointError.
        """
        try:
            yield
        except FloatingPointError as error:
            self._tell(self._watch.not_finite(step, str(error)))
            self.look()
            raise

    def look(self) -> None:
        """Raises Collapsed where the run has collapsed and is to stop or to go back."""
        if self._found is None or self._on_collapse == "alarm":
            return
        self._checkpoints.wait()
        end = going_back.leave(self._folder.workdir, self._found, on_collapse=self._on_collapse)
        signals.expect("interrupted: the same command goes back to the last good checkpoint" if end.again else end.line)
        raise end

    def kept(self, steps: Sequence[int]) -> Collection[int]:
        """Of the steps of all checkpoints that of the newest evaluation which is as good as the best, or one before."""
        good = self._watch.good_evaluation
        before = [step for step in steps if good is not None and step <= good]
        return before[-1:] if self._on_collapse != "alarm" else []

    def _tell(self, found: Collapse | None) -> None:
        if found is not None:
            self._found = found
            self._say(f"update {found.step}: ALARM: {found}. What to do: {_ADVICE}.")

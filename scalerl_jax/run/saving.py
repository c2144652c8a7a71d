"""When a run is saved, what its checkpoints hold, and what is saved when a signal ends it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.learner.trainer import Trainer
from scalerl_jax.run.evaluations import Evaluations
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.system import memory, signals


class Saving:
    """The checkpoints of one trainer, for its thread. `step`: steps made, as in the state; `saved`: steps on disk."""

    def __init__(
        self,
        config: Config,
        *,
        folder: RunFolder,
        checkpoints: Checkpoints,
        trainer: Trainer,
        arrays: Callable[[], Mapping[str, np.ndarray]],
        evaluations: Evaluations,
        ledger: Ledger,
        step: int,
    ):
        """arrays: what is saved besides the trainer's state. step: where the run begins or resumes."""
        self._config, self._folder, self._checkpoints, self._trainer = config, folder, checkpoints, trainer
        self._arrays, self._evaluations, self._ledger = arrays, evaluations, ledger
        self.step = self.saved = step
        self._due = False

    def wait_if_late(self, wait: Callable[[], None]) -> None:
        """Waits for earlier evaluations where they delay a save by the steps between two; `wait` as in Evaluations."""
        if self.step - self.saved >= 2 * self._config.checkpoint.every:
            self._evaluations.finish(wait=wait, before=self.step)

    def save_if_due(self, *, last: bool = False) -> None:
        """Called after the evaluation of `step` was requested. last: no step follows.

        Does not save before the rows of earlier evaluations are written: a run that resumes from the checkpoint would
        lack them.
        """
        every = self._config.checkpoint.every
        self._due |= self.step % every == 0 or self.step == self._config.max_steps or (last and self.step > self.saved)
        if self._due and not self._evaluations.owes(self.step):
            self._save()

    def _save(self) -> None:
        manifest: dict[str, Any] = {"version": self.step, "incarnation": self._folder.incarnation}
        manifest["seed"] = self._config.seed
        with self._ledger.trainer("stalled"):  # until the state is copied, and the previous save is on disk
            self._trainer.save(self._checkpoints, self.step, manifest=manifest, arrays=self._arrays())
        self.saved, self._due = self.step, False
        signals.expect(f"interrupted: the same command goes on from step {self.step}")
        memory.trim()

    @contextlib.contextmanager
    def when_interrupted(self, serve_fleet: Callable[[], None]) -> Iterator[None]:
        """Wraps code that checks for signals only where `step` steps are whole: saves them before leaving."""
        try:
            yield
        except signals.Interrupted as stop:
            raise signals.Interrupted(stop.number, self._save_to_leave(serve_fleet)) from None

    def _save_to_leave(self, serve_fleet: Callable[[], None]) -> str:
        """Saves, if nothing is lost by that; returns the line to print.

        Waits for an evaluation beside training for as long as a signal allows. If it does not finish, the run resumes
        from the checkpoint before it and repeats that evaluation. One of the current version is simply repeated.
        """

        def wait() -> None:
            if signals.overdue():
                signals.raise_if_interrupted()
            serve_fleet()

        if self._evaluations.owes(self.step):
            with contextlib.suppress(signals.Interrupted, ValueError):  # ValueError: the fleet fails now
                self._evaluations.finish(wait=wait, before=self.step)
        owed = self._evaluations.owes(self.step)
        if self.step > self.saved and not owed:
            self._save()
        with self._ledger.trainer("stalled"):
            self._checkpoints.wait()
        if self.saved < self.step:
            return (
                f"interrupted: the same command goes on from step {self.saved}, saved last, not from step {self.step}: "
                f"the evaluation of step {min(owed)} is not done"
            )
        if not self.step:
            return "interrupted before the first update: the same command begins again"
        return f"interrupted: saved at step {self.step}; the same command goes on from there"

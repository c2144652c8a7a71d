"""Evaluations of a run: requested from the fleet, waited for or not, and written when they finish."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.evaluation import EvaluationLost
from scalerl_jax.rollouts.fleet import Fleet
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.pass_rates import evaluation_row, of_groups
from scalerl_jax.run.progress import ProgressLine

# Columns of the ledger that are 0 at step 0, also where a start that was killed before it saved has trained.
_TRAINING = (
    *("device_hours", "trainer_busy_hours", "trainer_idle_hours", "generator_busy_hours", "generator_idle_hours"),
    *("model_flops", "trainer_flops", "generator_flops", "trained_tokens", "sampled_tokens"),
)


@dataclasses.dataclass(frozen=True)
class _PendingEvaluation:
    """An evaluation that is requested and not finished."""

    step: int  # the version evaluated
    began: float  # monotonic seconds
    compute: dict[str, Any]  # the ledger's columns when it was requested
    future: Future[list[FinishedGroup]]


class Evaluations:
    """The evaluations of one trainer; used by its thread."""

    def __init__(
        self,
        config: Config,
        *,
        folder: RunFolder,
        ledger: Ledger,
        fleet: Fleet,
        rows: Sequence[Row],
        line: ProgressLine,
        written: Callable[[], None],
    ):
        """rows: the held-out ones. written: called after a row of evals.jsonl."""
        self._config, self._folder, self._ledger, self._fleet = config, folder, ledger, fleet
        self._rows, self._line, self._written = rows, line, written
        self._asked: list[_PendingEvaluation] = []

    def due(self, step: int) -> bool:
        """Whether version `step` is evaluated: every config.evaluation.every steps, and the last."""
        return step % self._config.evaluation.every == 0 or step == self._config.max_steps

    def ask(self, step: int, *, wait: Callable[[], None], last: bool = False) -> None:
        """Requests the evaluation of version `step`, unless its row exists or it has been requested.

        Waits for earlier ones first, since each keeps its version on the devices. Waits for this one if evaluations
        take all servers, and after the last step; `wait` is called repeatedly meanwhile, and calls `collect`.
        last: no step follows, though config.max_steps is not reached.
        """
        steps = [*(row["step"] for row in self._folder.evaluations()), *(asked.step for asked in self._asked)]
        if step not in steps:
            compute, began = self._ledger.snapshot(), time.monotonic()
            if step == 0:
                compute |= dict.fromkeys(_TRAINING, 0)
            self.finish(wait=wait, before=step)
            future = self._fleet.evaluate(step, self._rows, self._config.evaluation.samples)
            self._asked.append(_PendingEvaluation(step, began, compute, future))
        if self._config.evaluation.servers == 0 or step == self._config.max_steps or last:
            self.finish(wait=wait)

    def owes(self, step: int) -> list[int]:
        """Versions before `step` that are being evaluated: a run that resumes from `step` would lack their rows."""
        return [asked.step for asked in self._asked if asked.step < step]

    def finish(self, *, wait: Callable[[], None], before: float = math.inf) -> None:
        """Waits for the requested evaluations of versions below `before`."""
        with self._ledger.trainer("evaluation"):
            for asked in [asked for asked in self._asked if asked.step < before]:
                with contextlib.suppress(EvaluationLost):  # `collect` reports it
                    self._fleet.result(asked.future, wait=wait)
        self.collect()

    def collect(self) -> None:
        """Writes the rows of finished evaluations."""
        for asked in [asked for asked in self._asked if asked.future.done()]:
            self._asked.remove(asked)
            if isinstance(asked.future.exception(), EvaluationLost):
                self._line.log(f"step {asked.step}: {asked.future.exception()}")
                continue
            self._write(asked, asked.future.result())

    def _write(self, asked: _PendingEvaluation, groups: list[FinishedGroup]) -> None:
        self._ledger.finished_groups(groups, evaluation=True)
        row = self._folder.evaluation(
            step=asked.step,
            found=evaluation_row(of_groups(groups)),
            seconds=time.monotonic() - asked.began,
            compute=asked.compute,
        )
        each = "".join(f", {name} {part['pass_rate']:.3f}" for name, part in row["environments"].items())
        self._line.log(
            f"step {asked.step}: held-out pass rate {row['pass_rate']:.3f}{each} ({len(groups)} prompts x "
            f"{row['samples']}), {asked.compute['device_hours'] * 3600:.0f} device-seconds, "
            f"evaluated in {row['seconds']:.1f} s"
        )
        self._line.update(note=f"held-out {row['pass_rate']:.3f} at {asked.step}")
        self._written()

"""What the training loop works with: one method for each thing that happens to a batch or a version.

`Trainer` is the trainer's thread. `Draws` is shared with the fleet's thread, and holds a lock.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row
from scalerl_jax.environments.curriculum import Curriculum
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.learner.batch import Batch, build, per_token
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.learner.step import Learner, Pending
from scalerl_jax.learner.weight_snapshots import WeightSnapshots
from scalerl_jax.report.writer import ReportWriter
from scalerl_jax.rollouts.errors import EvaluationLost
from scalerl_jax.rollouts.fleet import FinishedGroup, Fleet
from scalerl_jax.rollouts.parity.handshake import Probe
from scalerl_jax.rollouts.parity.scrutiny import Scrutiny
from scalerl_jax.rollouts.weights.sync_stats import SyncStats
from scalerl_jax.run.alarms import LearningWatch
from scalerl_jax.run.folder import RolloutSample, RunFolder
from scalerl_jax.run.ledger import Ledger, ServerCounters
from scalerl_jax.run.live_forecast import LiveForecast
from scalerl_jax.run.progress import ProgressLine
from scalerl_jax.system import memory, signals


class Draws:
    """The curriculum, shared between the fleet's thread, which draws, and the trainer's, which records."""

    def __init__(self, curriculum: Curriculum, rows: Sequence[Row]):
        self._curriculum, self._rows = curriculum, rows
        self._lock = threading.Lock()

    def draw(self, number: int) -> Row:
        with self._lock:
            return self._rows[self._curriculum.draw(number)]

    def record(self, batch: int, outcomes: Sequence[tuple[int, int, int]]) -> None:
        with self._lock:
            self._curriculum.record(batch, outcomes)

    def state(self) -> dict[str, np.ndarray]:
        with self._lock:
            return self._curriculum.state()

    def retired(self) -> int:
        with self._lock:
            return self._curriculum.retired()


class Waits:
    """Whom the trainer waited for, in seconds: what it sees at one look holds until the next one.

    The clock is monotonic seconds. Used by the trainer's thread alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._held_by: Sequence[str] = ()
        self._since = 0.0

    def look(self, held_by: Sequence[str]) -> None:
        """These hold the trainer up now, in equal parts; none: it does not wait."""
        now = self._clock()
        for name in self._held_by:
            self._seconds[name] = self._seconds.get(name, 0.0) + (now - self._since) / len(self._held_by)
        self._held_by, self._since = held_by, now

    def take(self) -> list[tuple[str, float]]:
        """(name, seconds) since the last call, the longest first; the wait ends now."""
        self.look(())
        seconds, self._seconds = self._seconds, {}
        return sorted(seconds.items(), key=lambda item: -item[1])


def observe(ledger: Ledger, status: pb.StatusReply, evaluating: bool, anew: bool) -> None:
    """Books what a server did since its last status; anew: from here on."""
    counters = ServerCounters(
        devices=status.devices,
        up_seconds=status.up_seconds,
        busy_seconds=status.busy_seconds,
        sampled_tokens=status.sampled_tokens,
        forced_tokens=status.forced_tokens,
        prefill_tokens=status.prefill_tokens,
    )
    ledger.observe(status.server_id, counters, evaluating=evaluating, anew=anew)


def by_task(groups: Sequence[FinishedGroup]) -> dict[str, dict[str, float]]:
    """Prompts and pass rate of each part of a mixture, in order of name; empty where there is only one."""
    correct: dict[str, list[list[bool]]] = {}
    for group in groups:
        correct.setdefault(group.row.task, []).append([score.correct for score in group.scores])
    if len(correct) < 2:
        return {}
    return {
        task or "other": {"prompts": len(rows), "pass_rate": float(np.mean(np.concatenate(rows)))}
        for task, rows in sorted(correct.items())
    }


def host_arrays(weights: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in weights.items()}


def score(learner: Learner, samples: Sequence[tuple[np.ndarray, Completion]]) -> list[np.ndarray]:
    """The trainer's log-probs of each completion's tokens after its prompt."""
    scored = learner.score([np.concatenate([prompt, completion.token_ids]) for prompt, completion in samples])
    return [logprobs[len(prompt) :] for (prompt, _), logprobs in zip(samples, scored, strict=True)]


class Trainer:
    """What the loop works with. Each method is one sentence of the module's docstring."""

    def __init__(
        self,
        *,
        config: Config,
        folder: RunFolder,
        ledger: Ledger,
        learner: Learner,
        checkpoints: Checkpoints,
        tokenizer: Tokenizer,
        draws: Draws,
        validation: Sequence[Row],
        fleet: Fleet,
        probe: Probe,
        pushes: SyncStats,
        line: ProgressLine,
        report: ReportWriter,
        forecast: LiveForecast,
        check: Callable[[], None] = lambda: None,
    ):
        """check: called again and again in a wait for the fleet; raises what keeps it from ever coming."""
        self.config, self.folder, self.ledger, self.learner = config, folder, ledger, learner
        self.checkpoints, self.tokenizer, self.draws, self.validation = checkpoints, tokenizer, draws, validation
        self.fleet, self.probe, self.pushes, self.line, self.report = fleet, probe, pushes, line, report
        self.forecast, self._check = forecast, check
        self.scrutiny = Scrutiny(config, learner=learner, fleet=fleet, probe=probe, say=line.say)
        self.step = self.saved = 0  # updates made, and those on disk; from begin() on
        self._evaluations: list[tuple[int, float, dict[str, Any], Future[list[FinishedGroup]]]] = []
        self._waits = Waits()
        self._learning = LearningWatch(config_check.leaves(config))
        # What the thinking of a completion ends with, in tokens; none where there is no thinking.
        thinks = config.rollout.thinking_budget_max > 0
        self._end_of_thinking = tokenizer.encode(config.rollout.end_of_thinking) if thinks else []
        self._copies: WeightSnapshots | None = None
        if config.model.sync_dtype == "bfloat16" and config.fleet.max_delta_density > 0:
            self._copies = WeightSnapshots(learner.decoder, learner.mesh, share=config.fleet.max_delta_density)

    def begin(self, start: int) -> None:
        """The first version goes out; the servers are met; version `start` is evaluated if that is still due."""
        self.step = self.saved = start
        self._version(start)()
        if start % self.config.evaluation.every == 0 or start == self.config.max_steps:
            self.evaluate(start)
        if start == self.config.max_steps:
            self.finish_evaluations()
        self.ledger.begin()

    def wait(self) -> None:
        """What happens again and again in a wait for the fleet. Raises Interrupted: the state is that of `step`."""
        signals.look()
        self._check()
        self.serve_fleet()

    def serve_fleet(self) -> None:
        """What the trainer's thread owes the fleet while it waits: servers are looked at, the line is redrawn."""
        for server, found in self.probe.admit_candidates(self.fleet):
            self.line.say(
                f"{server} joined: |log-prob difference| {found.mean:.1e} on average, {found.p99:.1e} at p99, "
                f"over {found.tokens} tokens"
            )
        self.scrutiny.attend(self.step)
        status = self.fleet.status()
        self._waits.look(status["waits_for"])
        self.line.update(waiting=status["waiting"])
        for step, began, compute, future in [e for e in self._evaluations if e[3].done()]:
            self._evaluations = [e for e in self._evaluations if e[0] != step]
            if isinstance(future.exception(), EvaluationLost):
                self.line.say(f"step {step}: {future.exception()}")
                continue
            self._write_evaluation(step, began, compute, future.result())

    def train_on(self, number: int) -> None:
        """Batch `number`: wait, build, update, publish, write down."""
        waited, seconds, clean = 0.0, 0.0, False
        pending: Pending | None
        waited_for: list[tuple[str, float]] = []
        while not clean:  # a batch with what is not the policy's is asked for again in part, and comes once more
            pending = None  # a gradient that is not applied is as large as the parameters: not beside the next one
            began = time.monotonic()
            groups = self.fleet.batch(number, wait=self.wait)
            waited, waited_for = waited + time.monotonic() - began, [*waited_for, *self._waits.take()]
            began = time.monotonic()
            with self.ledger.trainer("busy"):
                batch = build(groups, self.config.objective, number=number, end_of_thinking=self._end_of_thinking)
                clean, pending = self.scrutiny.look(groups, batch)
                if clean:
                    sums = self.learner.apply(pending) if pending is not None else {}
                    self.ledger.trained([len(segment.tokens) for segment in batch.segments])
                    publish = self._version(number + 1)
            seconds += time.monotonic() - began
        self._book(groups, evaluation=False)
        self.step = step = number + 1
        self.draws.record(number, batch.outcomes)
        publish()
        self.fleet.advance(step)
        self.scrutiny.trained(step)
        self._write_metrics(step, groups, batch, sums, waited=waited, waited_for=waited_for, seconds=seconds)

    def _version(self, step: int) -> Callable[[], None]:
        """Makes the policy version `step` on the device. The function returned lets it go out to the fleet.

        Its bytes come to the host when a server is ready for them, what changed in it at once.
        """
        if self._copies is not None:
            version = self._copies.take(self.learner.state["params"], step)
            return lambda: self.fleet.publish(step, version.tensors, version.delta)
        weights = self.learner.sync_weights()
        return lambda: self.fleet.publish(step, lambda: host_arrays(weights))

    def evaluate(self, step: int) -> None:
        """Asks for the evaluation of version `step`; waits for it where it takes all servers."""
        if any(row["step"] == step for row in self.folder.evaluations()):
            return
        compute = self.ledger.snapshot()
        future = self.fleet.evaluate(step, self.validation, self.config.evaluation.samples)
        self._evaluations.append((step, time.monotonic(), compute, future))
        if self.config.evaluation.servers == 0:
            self.finish_evaluations()

    def owes(self, step: int) -> list[int]:
        """Versions before `step` that are being evaluated: a run that goes on from `step` would lack their rows."""
        return [evaluated for evaluated, *_ in self._evaluations if evaluated < step]

    def finish_evaluations(self) -> None:
        with self.ledger.trainer("evaluation"):
            self._finish_evaluations(self.wait)

    def _finish_evaluations(self, wait: Callable[[], None]) -> None:
        for *_, future in list(self._evaluations):
            with contextlib.suppress(EvaluationLost):  # serve_fleet says so
                self.fleet.result(future, wait=wait)
        self.serve_fleet()

    def save(self, step: int) -> None:
        manifest = {"version": step, "incarnation": self.folder.incarnation, "seed": self.config.seed}
        self.checkpoints.save(step, self.learner.state, manifest=manifest, arrays=self.draws.state())
        self.saved = step
        signals.expect(f"interrupted: the same command goes on from step {step}")
        memory.trim()

    @contextlib.contextmanager
    def saved_when_interrupted(self) -> Iterator[None]:
        """Around code that looks at signals only where `step` updates are whole: saves them before it is left."""
        try:
            yield
        except signals.Interrupted as stop:
            raise signals.Interrupted(stop.number, self._save_to_leave()) from None

    def _save_to_leave(self) -> str:
        """Saves, if nothing is lost by that; returns what is to be said.

        An evaluation beside training is waited for as long as a signal allows. Where it does not come, the run goes on
        from the checkpoint before it, and evaluates that version anew. One of the version reached is simply made again.
        """
        if self.owes(self.step):
            with contextlib.suppress(signals.Interrupted, ValueError):  # of a fleet that fails now
                self._finish_evaluations(self._wait_until_overdue)
        owed = self.owes(self.step)
        if self.step > self.saved and not (owed and min(owed) >= self.saved):
            self.save(self.step)
        self.checkpoints.wait()
        if self.saved < self.step:
            return (
                f"interrupted: the same command goes on from step {self.saved}, saved last, not from step {self.step}: "
                f"the evaluation of step {min(owed)} is not done"
            )
        if not self.step:
            return "interrupted before the first update: the same command begins again"
        return f"interrupted: saved at step {self.step}; the same command goes on from there"

    def _wait_until_overdue(self) -> None:
        if signals.overdue():
            signals.look()
        self.serve_fleet()

    def _book(self, groups: Sequence[FinishedGroup], *, evaluation: bool) -> None:
        for group in groups:
            self.ledger.finished(
                prompt_tokens=len(group.row.token_ids),
                completion_tokens=[len(completion.token_ids) for completion in group.completions],
                evaluation=evaluation,
            )

    def _write_evaluation(self, step: int, began: float, compute: dict[str, Any], groups: list[FinishedGroup]) -> None:
        self._book(groups, evaluation=True)
        cut = [c.finish_reason == "length" for g in groups for c in g.completions]
        row = self.folder.evaluation(
            step=step,
            version=step,
            passes=[sum(score.correct for score in group.scores) for group in groups],
            samples=self.config.evaluation.samples,
            seconds=time.monotonic() - began,
            compute=compute,
            values={
                "truncated": float(np.mean(cut)),
                "length_mean": float(np.mean([len(c.token_ids) for g in groups for c in g.completions])),
                "tasks": by_task(groups),
            },
        )
        self.line.say(
            f"step {step}: held-out pass rate {row['pass_rate']:.3f} ({len(groups)} prompts x "
            f"{self.config.evaluation.samples}), {compute['device_hours'] * 3600:.0f} device-seconds, "
            f"evaluated in {row['seconds']:.1f} s"
        )
        self.line.update(note=f"held-out {row['pass_rate']:.3f} at {step}")
        self.forecast.evaluated(self.folder.evaluations())
        self.report.request()

    def _write_metrics(
        self,
        step: int,
        groups: list[FinishedGroup],
        batch: Batch,
        sums: dict[str, float],
        *,
        waited: float,
        waited_for: list[tuple[str, float]],
        seconds: float,
    ) -> None:
        values: dict[str, Any] = {
            **batch.metrics,
            **(per_token(sums) if sums else {}),
            "groups": [(group.number, group.row.index) for group in groups],
            "lags": {str(lag): count for lag, count in sorted(batch.lags.items())},
            "waited_seconds": waited,
            "waited_for": waited_for,
            "update_seconds": seconds,
            "group_seconds": float(np.mean([g.finished_at - g.asked_at for g in groups])),
            "prompts_retired": self.draws.retired(),
            "optimizer_step": int(self.learner.state["step"]),
            "compute": self.ledger.snapshot(),
            "pushes": self.pushes.take(),
            **self.scrutiny.take(),
        }
        forecast = self.forecast.take()
        if forecast is not None:
            values["forecast"] = forecast
        self.folder.metrics(step, values)
        if remark := self._learning.row({"step": step, **values}):
            self.line.say(remark)
        if self.folder.wants_rollouts(step):
            self.folder.rollouts(step, self._samples(groups, batch))
        elapsed = max(1e-9, waited + seconds)
        self.line.update(
            step=step,
            pass_rate=batch.metrics["pass_rate"],
            reward=batch.metrics["reward"],
            lag=batch.metrics["lag_mean"],
            trained_per_second=batch.prompt_tokens / max(1e-9, seconds),
            sampled_per_second=batch.sampled_tokens / elapsed,
            waiting=self.fleet.waiting(),
        )

    def _samples(self, groups: list[FinishedGroup], batch: Batch) -> list[RolloutSample]:
        """One completion of each group, a different one each time, so that right and wrong ones are seen."""
        out = []
        for p, group in enumerate(groups):
            completion = group.completions[p % len(group.completions)]
            out.append(self._sample(group, completion, float(batch.rewards[p, completion.index])))
        return out

    def _sample(self, group: FinishedGroup, completion: Completion, reward: float) -> RolloutSample:
        ids = completion.token_ids.tolist()
        return RolloutSample(
            group=group.number,
            index=completion.index,
            prompt=group.row.text,
            answer=group.row.answer,
            completion=self.tokenizer.decode(ids),
            token_ids=ids,
            logprobs=completion.logprobs.tolist(),
            versions=completion.versions,
            forced=completion.forced,
            correct=group.scores[completion.index].correct,
            reward=reward,
            finish_reason=completion.finish_reason,
            task=group.row.task,
            pieces=self.tokenizer.pieces(ids),
        )

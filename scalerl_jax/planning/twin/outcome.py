"""What a simulation says: steps per hour, staleness, who was busy for how much of the time, and what a step costs."""

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of a server, in the ledger's classes: an evaluation is neither busy nor idle."""

    busy: float = 0.0
    idle: float = 0.0
    evaluation: float = 0.0


@dataclasses.dataclass(frozen=True)
class Mark:
    """What has been when a step was written down, since the start."""

    now: float
    trainer_busy: float
    trainer_evaluation: float
    servers: tuple[Seconds, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of the steps after the first ones. Shares are of that time; a generator's are the mean over generators."""

    servers: int
    max_off_policy_steps: int
    steps: int
    seconds: float
    trainer_busy: float  # share
    trainer_idle: float
    trainer_evaluation: float
    generator_busy: float
    generator_idle: float
    generator_evaluation: float
    staleness: dict[int, float]  # steps -> share of the tokens, rising
    tokens_per_step: float  # sampled for training
    evaluation_seconds: float  # mean; 0: there was none

    @property
    def steps_per_hour(self) -> float:
        return 3600 * self.steps / self.seconds

    @property
    def mean_staleness(self) -> float:
        return sum(steps * share for steps, share in self.staleness.items())

    @property
    def most_staleness(self) -> int:
        return max(self.staleness)

    def hours_per_step(self, *, trainer_devices: float, server_devices: float) -> float:
        """Device-hours held for a step, whatever they did in that time."""
        return (trainer_devices + self.servers * server_devices) / self.steps_per_hour


def outcome(
    marks: Sequence[Mark],
    *,
    first: int,
    k: int,
    staleness: Sequence[collections.Counter[int]],
    evaluations: Sequence[tuple[int, float]],
) -> Outcome:
    """Of the steps after step `first`.

    marks: of the start and of each step. staleness: of each step, tokens. evaluations: (step, seconds).
    """
    begin, end, steps = marks[first], marks[-1], len(marks) - 1 - first
    seconds = end.now - begin.now
    count = len(end.servers)

    def of_servers(name: str) -> float:
        passed = (getattr(b, name) - getattr(a, name) for a, b in zip(begin.servers, end.servers, strict=True))
        return sum(passed) / count / seconds

    ages: collections.Counter[int] = sum(staleness[first:], collections.Counter())
    busy = (end.trainer_busy - begin.trainer_busy) / seconds
    evaluation = (end.trainer_evaluation - begin.trainer_evaluation) / seconds
    took = [spent for step, spent in evaluations if first <= step < len(marks) - 1]
    return Outcome(
        servers=count,
        max_off_policy_steps=k,
        steps=steps,
        seconds=seconds,
        trainer_busy=busy,
        trainer_idle=1 - busy - evaluation,
        trainer_evaluation=evaluation,
        generator_busy=of_servers("busy"),
        generator_idle=of_servers("idle"),
        generator_evaluation=of_servers("evaluation"),
        staleness={age: ages[age] / ages.total() for age in sorted(ages)},
        tokens_per_step=ages.total() / steps,
        evaluation_seconds=sum(took) / len(took) if took else 0.0,
    )

"""Trainer and generators in simulated time: the loop of train.py around the run's own admission.

What decides who samples what with which version is the real thing: Pacing and GroupBuffer, `dispatch`, Evaluations.
Simulated are the parts that take time: decoding (server.py), updates, versions on their way, completions taken in,
checkpoints; and how they share a machine (clock.py).

    trainer   waits for batch n; update; publishes version n + 1; writes the step down; evaluates; saves
    intake    completions are taken in and scored by the trainer's process, one after another
    version   on its way to each server for push_seconds; one that is overtaken meanwhile is followed by the newest

Nobody dies and nothing is lost: a plan is for a fleet that works. Left out on purpose as well: what attention costs
more at longer contexts (a run's own speeds have its mean in them), the first compilations, the prompts' own difficulty.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from scalerl_jax.contract.codec import Completion, CompletionRequest
from scalerl_jax.environments.base import RIGHT, Row
from scalerl_jax.planning.twin.clock import Clock, Cores
from scalerl_jax.planning.twin.lengths import Lengths
from scalerl_jax.planning.twin.outcome import Mark, Outcome, outcome
from scalerl_jax.planning.twin.server import Sequence, SimulatedServer
from scalerl_jax.planning.twin.speeds import Machine, Recipe, ServerSpeed, TrainerSpeed
from scalerl_jax.rollouts.dispatch import dispatch
from scalerl_jax.rollouts.evaluation import Evaluation, Evaluations
from scalerl_jax.rollouts.group_buffer import GroupBuffer, GroupInFlight

_TOGETHER = 8  # completions: what the trainer takes in before it asks for more
_GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it fall evenly between 0 and 1, however many there are
_TYPICAL = 0.05  # of a completion's seconds in the running mean of the fleet


@dataclasses.dataclass(frozen=True)
class Scenario:
    """All that a simulation is of."""

    recipe: Recipe
    trainer: TrainerSpeed
    server: ServerSpeed
    servers: int
    lengths: Lengths
    evaluation_lengths: Lengths | None = None  # None: as in training
    machine: Machine = dataclasses.field(default_factory=Machine)


def simulate(scenario: Scenario, *, steps: int, first: int, seed: int = 0) -> Outcome:
    """A run of `steps` steps, told of those after step `first`. The same seed gives the same outcome.

    Raises ValueError where the scenario is none that can run.
    """
    if not 0 <= first < steps:
        raise ValueError(f"steps {first} to {steps}: there must be steps after the first ones")
    return Simulation(scenario, steps=steps, seed=seed).run(first)


class _Intake:
    """The trainer's side of completions: one after another, on one core; those that come together go together."""

    def __init__(self, cores: Cores, seconds: float, arrived: Callable[[SimulatedServer, Sequence, Completion], None]):
        self._cores, self._seconds, self._arrived = cores, seconds, arrived
        self._waiting: collections.deque[tuple[SimulatedServer, Sequence, Completion]] = collections.deque()
        self._taking = 0

    def take(self, server: SimulatedServer, sequence: Sequence, completion: Completion) -> None:
        if not self._seconds:
            self._arrived(server, sequence, completion)
            return
        self._waiting.append((server, sequence, completion))
        if not self._taking:
            self._next()

    def _next(self) -> None:
        self._taking = min(_TOGETHER, len(self._waiting))
        if self._taking:
            self._cores.start(self._taking * self._seconds, 1.0, self._taken)

    def _taken(self) -> None:
        for _ in range(self._taking):
            self._arrived(*self._waiting.popleft())
        self._next()


class Simulation:
    """See the module."""

    def __init__(self, scenario: Scenario, *, steps: int, seed: int = 0):
        recipe, machine = scenario.recipe, scenario.machine
        if scenario.servers < 1:
            raise ValueError(f"servers={scenario.servers}: at least one generator is needed")
        self.scenario, self._steps = scenario, steps
        self._random = np.random.default_rng(seed)
        self._turn, self._spread = float(self._random.random()), sorted(scenario.trainer.spread)
        self.clock = Clock()
        alone = not math.isfinite(machine.cores)
        shared = Cores(self.clock, machine.cores, used=machine.used)
        trainer = Cores(self.clock, machine.trainer_cores, used=machine.used) if alone else shared
        pinned = Cores(self.clock, machine.generator_cores, used=machine.used)
        intake = _Intake(trainer, scenario.trainer.completion_seconds, self._arrived)
        self._trainer_cores = trainer
        own = alone and not math.isfinite(machine.generator_cores)
        self.servers = [
            SimulatedServer(
                f"server-{i}", scenario.server, clock=self.clock,
                cores=Cores(self.clock) if own else pinned if alone else shared,
                lengths=self._lengths, deliver=intake.take, changed=self._something, retarget=self._push,
            )
            for i in range(scenario.servers)
        ]  # fmt: skip
        # The run goes on behind the steps that are looked at: its end, with nothing left to sample, is no rate of it.
        self.pacing = recipe.pacing(steps + math.ceil(recipe.max_buffered_batches) + 2 * recipe.max_off_policy_steps)
        self.buffer = GroupBuffer(
            pacing=self.pacing, open_group=self._open_group, group_size=recipe.group_size, trained=0
        )
        self.evaluations = Evaluations()
        self._rows = [Row("", index=i) for i in range(recipe.evaluation_prompts)]
        self._newest = self._latest = 0  # version of the trainer; published
        self._typical_seconds = 0.0
        self._changed = True
        self._working = False  # the trainer's loop computes, or stands still
        self._busy = self._evaluation = 0.0  # seconds of the trainer
        self._evaluated: list[tuple[int, float]] = []  # (version, seconds)
        self.marks: list[Mark] = []
        self._behind = False  # an evaluation was waited for just now
        self.updates: list[tuple[bool, float]] = []  # of each step: behind an evaluation, seconds
        self.staleness: list[collections.Counter[int]] = []  # of each batch, tokens by staleness

    # ---- what happens

    def run(self, first: int) -> Outcome:
        """All steps; tells of those after step `first`."""
        program = self._train()
        while True:
            self._pump()
            if not self._working:
                if next(program, None) is None:
                    break
                if self._changed:
                    continue
            assert self.clock.step(), f"nothing will ever happen again: {self.buffer.trained} steps are made"
        return outcome(self.marks, first=first, k=self.pacing.k, staleness=self.staleness, evaluations=self._evaluated)

    def update_seconds(self, first: int) -> tuple[float, float]:
        """Of a step after `first` with no evaluation before it, and of one right behind an evaluation: means, or 0."""
        found = [[took for after, took in self.updates[first:] if after is behind] for behind in (False, True)]
        plain, behind = (sum(took) / max(1, len(took)) for took in found)
        return plain, behind

    def _work(self, seconds: float, cores: float) -> None:
        """The trainer's loop goes on when that is done."""
        self._working = True
        self._trainer_cores.start(seconds, cores, self._worked)

    def _stand_still(self, seconds: float) -> None:
        self._working = True
        self.clock.at(seconds, self._worked)

    def _worked(self) -> None:
        self._working = False

    def _something(self) -> None:
        self._changed = True

    # ---- the trainer's loop; it yields where it waits, and is asked again whenever something has happened

    def _train(self) -> Iterator[bool]:
        recipe, speed = self.scenario.recipe, self.scenario.trainer
        for server in self.servers:
            self._push(server)
        yield from self._evaluate(0)
        self._write_down()
        for number in range(self._steps):
            self._approve()
            while (groups := self.buffer.take(number)) is None:
                yield True
                self._approve()
            self._something()
            self._count(number, groups)
            began = self.clock.now
            work = speed.update_seconds * self._next_spread()
            self._work(work + speed.behind_seconds * self._behind, speed.cores)
            yield True
            self._busy += self.clock.now - began
            self.updates.append((self._behind, self.clock.now - began))
            self._behind = False
            self._newest = number + 1
            if self.pacing.publishes(number + 1):
                self._publish()
            self.buffer.trained_to(number + 1)
            self._something()
            if speed.between_seconds:
                self._stand_still(speed.between_seconds)
                yield True
            self._write_down()
            yield from self._evaluate(number + 1)
            due = recipe.checkpoint_every and ((number + 1) % recipe.checkpoint_every == 0)
            if due and speed.checkpoint_seconds:
                self._stand_still(speed.checkpoint_seconds)
                yield True

    def _next_spread(self) -> float:
        """Long and short ones take turns, so that the mean of a few steps is that of all."""
        self._turn = (self._turn + _GOLDEN) % 1.0
        return self._spread[int(self._turn * len(self._spread))]

    def _evaluate(self, step: int) -> Iterator[bool]:
        """As run/evaluations.py: waits where that takes all servers."""
        recipe = self.scenario.recipe
        if not recipe.evaluation_every or step % recipe.evaluation_every:
            return
        began = self.clock.now
        self._publish()
        self.evaluations.add(
            Evaluation(
                version=step, rows=self._rows, samples=recipe.evaluation_samples, servers=recipe.evaluation_servers,
                requests=self,
            )
        )  # fmt: skip
        self._something()
        if recipe.evaluation_servers:
            return
        while self.evaluations.current is not None:
            yield True
            self._approve()
        self._evaluation += self.clock.now - began
        self._behind = True
        self._evaluated.append((step, self.clock.now - began))

    def _approve(self) -> None:
        """What an evaluation has sampled is looked at when the trainer waits."""
        current = self.evaluations.current
        if current is not None and not current.approved and current.buffer.is_ready(0):
            current.approved = True
            self._something()

    def _count(self, number: int, groups: list[GroupInFlight]) -> None:
        ages: collections.Counter[int] = collections.Counter()
        for group in groups:
            for completion in group.completions.values():
                for step, start, end in completion.versions:
                    ages[number - step] += end - start
        self.staleness.append(ages)

    def _write_down(self) -> None:
        for server in self.servers:
            server.count()
        servers = tuple(server.seconds for server in self.servers)
        self.marks.append(Mark(self.clock.now, self._busy, self._evaluation, servers))

    # ---- versions

    def _publish(self) -> None:
        self._latest = self._newest
        for server in self.servers:
            self._push(server)

    def _push(self, server: SimulatedServer) -> None:
        """Begins to bring it what it should hold, unless something is on its way."""
        self._something()
        target = server.evaluation.version if server.evaluation is not None else self._latest
        if server.receiving or server.step == target:
            return
        server.receiving = True

        def held() -> None:
            server.receiving = False
            self._push(server)

        self.clock.at(self.scenario.server.push_seconds, lambda: server.stage(target, held))

    # ---- groups

    def _open_group(self, number: int) -> GroupInFlight:
        requests = tuple(CompletionRequest(i, seed=0) for i in range(self.scenario.recipe.group_size))
        return GroupInFlight(number, f"train/{number}", Row("", index=number), requests)

    def evaluation(self, number: int, row: Row, *, version: int, samples: int) -> GroupInFlight:
        """A group of an evaluation: what Evaluation asks of what makes requests."""
        requests = tuple(CompletionRequest(i, seed=0) for i in range(samples))
        return GroupInFlight(number, f"eval/{version}/{row.index}", row, requests)

    def _lengths(self, buffer: GroupBuffer, count: int) -> np.ndarray:
        lengths = self.scenario.lengths
        if buffer is not self.buffer:
            lengths = self.scenario.evaluation_lengths or lengths
        return lengths.draw(self._random, count)

    def _arrived(self, server: SimulatedServer, sequence: Sequence, completion: Completion) -> None:
        server.count()
        rollout, now = sequence.request, self.clock.now
        assert sequence.buffer.arrived(rollout, completion)
        server.calls.delivered(rollout, now=now)
        seconds = now - rollout.group.opened_at
        self._typical_seconds += _TYPICAL * (seconds - self._typical_seconds) if self._typical_seconds else seconds
        sequence.buffer.scored(rollout.group, completion, RIGHT, now=now)
        self._something()

    def _buffer_of(self, server: SimulatedServer) -> GroupBuffer | None:
        """As the fleet's."""
        evaluation = server.evaluation
        if server.step is None:
            return None
        if evaluation is None:
            return self.buffer
        drained = not server.calls.works_on(self.buffer)
        return evaluation.buffer if drained and server.step == evaluation.version else None

    def _pump(self) -> None:
        """As the fleet's: evaluations are advanced, servers with room are asked for more."""
        while self._changed:
            self._changed = False
            self.evaluations.advance(self.servers, latest=self._latest, patience=0.0)
            dispatch(self.servers, self._buffer_of, typical_seconds=self._typical_seconds, now=self.clock.now)

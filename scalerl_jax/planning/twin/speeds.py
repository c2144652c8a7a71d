"""What a simulation is of: how fast each part is, how it shares its machine, and what the run does.

Seconds are those of a part that has its machine to itself. What several processes on one machine do to each other is
the simulation's to find (clock.py).

    a turn of a server = prefills * prefill_seconds + entered * completion_seconds
                         + chunk * (step_seconds + taken * slot_seconds)

entered: completions that get a slot in it. taken: slots. step_seconds is most of a step for a small or memory-bound
model: it reads all weights whether it samples one token or sixty-four.
"""

import dataclasses
import math
from typing import Literal

from scalerl_jax.rollouts.pacing import Pacing, Phased, Pipeline


@dataclasses.dataclass(frozen=True)
class ServerSpeed:
    """Of one generator."""

    slots: int  # completions that it samples at once
    queue: int  # completions that may wait there
    chunk: int  # decode steps between two looks at the queue and at the weights
    step_seconds: float  # of a decode step, however many slots are taken
    slot_seconds: float = 0.0  # more for each slot that is taken
    prefill_seconds: float = 0.0  # of a request: its prompt is computed once per version
    completion_seconds: float = 0.0  # of a completion beside its steps: it gets a slot, is told of, sent
    push_seconds: float = 0.0  # from a version's publication until decoding may go on with it
    cores: float = 1.0  # that it keeps busy while it decodes

    def chunk_seconds(self, taken: int) -> float:
        return self.chunk * (self.step_seconds + taken * self.slot_seconds)

    def tokens_per_second(self, length: float) -> float:
        """With all slots taken, by completions of `length` tokens; without prefills."""
        return 1 / (self.chunk_seconds(self.slots) / (self.slots * self.chunk) + self.completion_seconds / length)


@dataclasses.dataclass(frozen=True)
class TrainerSpeed:
    update_seconds: float  # of a step: batch, gradient, update and the copy that goes out
    spread: tuple[float, ...] = (1.0,)  # of single updates, over the mean: one of these at a time
    between_seconds: float = 0.0  # of a step: what is written down, until it waits for the next batch
    completion_seconds: float = 0.0  # on one core, to take in and score a completion; one after another
    behind_seconds: float = 0.0  # more of the update right behind one: the page is drawn, a checkpoint is written
    checkpoint_seconds: float = 0.0  # the loop stands still for a checkpoint
    cores: float = 1.0  # that an update keeps busy


@dataclasses.dataclass(frozen=True)
class Machine:
    """Who shares cores with whom. inf: nobody does, each process has hardware of its own."""

    cores: float = math.inf  # that all processes share
    # Or pinned: the trainer's part of the cores, and that which all generators share.
    trainer_cores: float = math.inf
    generator_cores: float = math.inf
    used: float = 0.0  # share of every core that programs which are not simulated take

    @property
    def for_trainer(self) -> float:
        """Cores that an update may keep busy at most."""
        return min(self.cores, self.trainer_cores)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the run does, whatever it runs on: the fields of the config that this hangs on."""

    prompts_per_step: int
    group_size: int
    kind: Literal["pipeline", "phased"] = "pipeline"
    max_off_policy_steps: int = 8
    max_buffered_batches: float = 1.0
    evaluation_every: int = 0  # steps; 0: nothing is evaluated
    evaluation_prompts: int = 0
    evaluation_samples: int = 0
    evaluation_servers: int = 0  # 0: all, and training waits
    checkpoint_every: int = 0  # steps; 0: never

    def pacing(self, steps: int) -> Pacing:
        """The trainer's own, of a run of so many steps. Raises ValueError as it does."""
        if self.kind == "phased":
            return Phased(k=self.max_off_policy_steps, groups=self.prompts_per_step, batches=steps)
        return Pipeline(
            k=self.max_off_policy_steps, groups=self.prompts_per_step, batches=steps,
            max_buffered_batches=self.max_buffered_batches,
        )  # fmt: skip

"""How far generators may run ahead of the trainer. Pure: no IO, no clock, no state.

    version v    the policy after v batches
    group n      belongs to batch b = n // groups_per_batch
    staleness    of a token = b - (the version that sampled it)

A group is requested from a server only if the step s that the server has acknowledged satisfies minimum_step(n) <= s.
Within one incarnation a server's step only grows, so every token of the group is sampled at s or later: staleness <= k,
whatever dies or hangs afterwards, because the server that is asked next must pass the same test.

    Pipeline(k)  minimum_step(n) = max(start, b - k); every version is sent at once and sequences in flight continue
    Phased(k)    batches [p k, (p + 1) k) are sampled from version p k alone, and trained when all of them are finished;
                 completions taken back after the phase's first update are sampled from any version since

A group can be in flight again in the middle of its phase, because its completions were taken back. From then on
(trained > minimum_step) it is not pinned: generators may hold a later version by now, for an evaluation or because the
trainer no longer has the phase's, and that only makes the staleness smaller.

Neither deadlocks: batch `trained` is the next to be trained; a version that may sample its groups is at most `trained`,
so it is published by then or can be at any time; and the store bound never holds back a group of that batch.
"""

import abc

from scalerl_jax.config import Config


class Pacing(abc.ABC):
    """Pacing of `batches` batches of `groups` groups each; groups beyond them are never admitted.

    start: the version that the run starts or resumes at.
    """

    def __init__(self, *, k: int, groups: int, batches: int, start: int = 0):
        if k < 1:
            raise ValueError(f"pacing.max_off_policy_steps is {k}: must be at least 1")
        if groups < 1:
            raise ValueError(f"rollout.prompts_per_step is {groups}: must be at least 1")
        assert 0 <= start <= batches
        self.k, self.groups, self.batches, self._start = k, groups, batches, start

    def batch(self, number: int) -> int:
        """The batch that group `number` is trained in."""
        return number // self.groups

    @abc.abstractmethod
    def minimum_step(self, number: int) -> int:
        """The oldest version that may sample any token of the group."""

    def pinned_step(self, number: int) -> int | None:
        """The only version that may sample the group's tokens; None if any from minimum_step on may. See `pinned`."""
        return None

    @abc.abstractmethod
    def admits(self, number: int, *, step: int, trained: int, stored: int) -> bool:
        """Whether the new group `number` may be opened and requested from a server that holds version `step`.

        trained: batches trained so far, so that batch `trained` is in training or waited for.
        stored: groups of later batches than that one that are sampled.
        """

    def last_needed(self, batch: int) -> int:
        """The last group that must be finished before `batch` is trained."""
        return (batch + 1) * self.groups - 1

    def publishes(self, version: int) -> bool:
        """Whether this version is published to generators."""
        return True


def pinned(pacing: Pacing, number: int, *, trained: int) -> int | None:
    """The only version that may sample what is missing of group `number` after `trained` batches; None if any may."""
    return pacing.pinned_step(number) if trained <= pacing.minimum_step(number) else None


def suits(pacing: Pacing, number: int, step: int, *, trained: int) -> bool:
    """Whether a server at version `step` may be asked for group `number`, the first time or again."""
    only = pinned(pacing, number, trained=trained)
    return step == only if only is not None else step >= pacing.minimum_step(number)


class Pipeline(Pacing):
    """Generators run at most k versions behind the batch they sample for.

    max_buffered_batches bounds the finished groups that wait beyond the batch in training (or waited for): with a
    trainer that is the slower side the staleness stays near 2 + (groups in flight) / groups_per_batch and does not
    grow to k.
    """

    def __init__(self, *, k: int, groups: int, batches: int, max_buffered_batches: float = 1.0, start: int = 0):
        super().__init__(k=k, groups=groups, batches=batches, start=start)
        if max_buffered_batches < 0:
            raise ValueError(f"pacing.max_buffered_batches is {max_buffered_batches}: must not be negative")
        self._bound = max_buffered_batches * groups

    def minimum_step(self, number: int) -> int:
        return max(self._start, self.batch(number) - self.k)

    def admits(self, number: int, *, step: int, trained: int, stored: int) -> bool:
        batch = self.batch(number)
        if batch >= self.batches or batch > trained + self.k or step < self.minimum_step(number):
            return False
        # The batch waited for is never held back: with max_buffered_batches 0 the run continues, one batch at a time.
        return batch <= trained or stored < self._bound


class Phased(Pacing):
    """k batches from one frozen version, then k updates: PPO-off-policy-k. The staleness in a phase is 0 .. k-1.

    A run resumed in the middle of a phase no longer has the phase's version: what is left of the phase is sampled from
    the version resumed at (`start`), which only makes the staleness smaller.
    """

    def minimum_step(self, number: int) -> int:
        return max(self._start, self.batch(number) // self.k * self.k)

    def pinned_step(self, number: int) -> int | None:
        return self.minimum_step(number)

    def admits(self, number: int, *, step: int, trained: int, stored: int) -> bool:
        frozen = self.minimum_step(number)
        # From trained == frozen on the version of the phase exists.
        return self.batch(number) < self.batches and trained >= frozen and step == frozen

    def last_needed(self, batch: int) -> int:
        end = min((batch // self.k + 1) * self.k, self.batches)
        return end * self.groups - 1

    def publishes(self, version: int) -> bool:
        return version % self.k == 0 or version == self._start


class Pinned(Pacing):
    """`groups` groups, all sampled from one version, for an evaluation. One batch, number 0."""

    def __init__(self, *, version: int, groups: int):
        super().__init__(k=1, groups=groups, batches=1)
        self._version = version

    def minimum_step(self, number: int) -> int:
        return self._version

    def pinned_step(self, number: int) -> int | None:
        return self._version

    def admits(self, number: int, *, step: int, trained: int, stored: int) -> bool:
        return number < self.groups and step == self._version


def from_config(config: Config, *, start: int) -> Pacing:
    """The pacing of a run from version `start` on."""
    common = {
        "k": config.pacing.max_off_policy_steps,
        "groups": config.rollout.prompts_per_step,
        "batches": config.max_steps,
        "start": start,
    }
    if config.pacing.kind == "phased":
        return Phased(**common)
    return Pipeline(**common, max_buffered_batches=config.pacing.max_buffered_batches)

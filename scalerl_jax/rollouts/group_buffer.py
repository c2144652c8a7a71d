"""Which groups are open, who was asked for which completion, what is finished. Pure: no IO, no clock.

A group is *open* from its admission (its prompt is drawn) until every completion has arrived and is scored; then it
is *finished* and waits in the store for its batch. A *lease* is some completions of one group asked of one server in
one call; when the call ends, completions that did not come are *unasked* again, under the same ids. So are those that
are *taken back*, because what delivered them turned out not to run the policy; a group taken for its batch can be put
back for that until the next one is taken. Whatever happens, every group is handed out whole, and trained once.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import NamedTuple

from scalerl_jax.contract.codec import Completion, CompletionRequest
from scalerl_jax.environments import Row, Score
from scalerl_jax.rollouts import pacing as pacing_lib


class Process(NamedTuple):
    """A server process: who delivered a completion."""

    address: str
    server_id: str


@dataclasses.dataclass(frozen=True)
class FinishedGroup:
    """All completions of a row's prompt and what each is worth.

    With turns, a completion would be the policy's part of one turn; what the environment says are forced spans of it.
    """

    number: int
    row: Row
    completions: tuple[Completion, ...]  # by index
    scores: tuple[Score, ...]  # by index
    asked_at: float  # seconds, time.monotonic()
    finished_at: float
    servers: tuple[Process, ...] = ()  # by index: who delivered each


@dataclasses.dataclass
class OpenGroup:
    """A group being sampled; `group_id` and `requests` never change, whoever is asked."""

    number: int
    group_id: str
    row: Row
    requests: tuple[CompletionRequest, ...]  # by index
    opened_at: float = 0.0  # seconds, as the caller of GroupBuffer counts them
    finished_at: float = 0.0
    unasked: set[int] = dataclasses.field(default_factory=set)
    asked: dict[int, str] = dataclasses.field(default_factory=dict)  # index -> server
    completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
    servers: dict[int, Process] = dataclasses.field(default_factory=dict)  # of the completions
    scores: dict[int, Score] = dataclasses.field(default_factory=dict)
    failed_at: str = ""  # the server that did not deliver the last time


@dataclasses.dataclass(eq=False)
class RolloutRequest:
    """Completions `left` of `group`, asked of `server` in one call."""

    group: OpenGroup
    server: str
    minimum_step: int
    pinned_step: int | None
    left: set[int]
    server_id: str = ""  # of the process there


def finished(group: OpenGroup) -> FinishedGroup:
    """What is handed out of a group that has all its completions and scores."""
    indices = [request.index for request in group.requests]
    return FinishedGroup(
        number=group.number,
        row=group.row,
        completions=tuple(group.completions[i] for i in indices),
        scores=tuple(group.scores[i] for i in indices),
        asked_at=group.opened_at,
        finished_at=group.finished_at,
        servers=tuple(group.servers[i] for i in indices),
    )


class GroupBuffer:
    """The groups of one run (or of one evaluation), in order of number.

    Args:
        pacing: what may be asked when.
        open_group: makes group n; called with consecutive numbers, each once. It may raise ValueError (no prompt is
            left): what is open goes on, and `take` raises the error when it comes to that group.
        group_size: completions of a group.
        first: the number to begin with.
        trained: batches trained before.
    """

    def __init__(
        self,
        *,
        pacing: pacing_lib.Pacing,
        open_group: Callable[[int], OpenGroup],
        group_size: int,
        first: int,
        trained: int,
    ):
        self.pacing, self.group_size = pacing, group_size
        self.trained = trained
        self.open: dict[int, OpenGroup] = {}  # in order of number
        self.finished: dict[int, OpenGroup] = {}
        self.next_number = first
        self._taken: list[OpenGroup] = []  # by the last `take`
        self._open_group = open_group
        self._error: ValueError | None = None

    def stored(self) -> int:
        """Groups of later batches than the one in training or waited for that need no more sampling.

        They count before they are scored: a slow scorer must not let the generators run ahead.
        """
        sampled = [n for n, group in self.open.items() if len(group.completions) == len(group.requests)]
        return sum(self.pacing.batch(number) > self.trained for number in (*self.finished, *sampled))

    def unasked(self) -> int:
        """Completions of open groups that nobody is asked for."""
        return sum(len(group.unasked) for group in self.open.values())

    def lease(
        self, *, server: str, step: int, room: int, split: bool, alone: bool, now: float, server_id: str = ""
    ) -> RolloutRequest | None:
        """What to ask next of a server that holds version `step` and has room for `room` more completions.

        The oldest group first, so that the batch waited for is served before later ones. split: a group larger than
        `room` may be asked for in parts. alone: no other server could be asked, so even what this one failed to deliver
        the last time is asked of it again.
        """
        for group in self.open.values():
            if not group.unasked or (group.failed_at == server and not alone):
                continue
            if pacing_lib.suits(self.pacing, group.number, step, trained=self.trained):
                return self._ask(group, Process(server, server_id), room, split)
        if self._error is not None or room < 1:
            return None
        number = self.next_number
        if not self.pacing.admits(number, step=step, trained=self.trained, stored=self.stored()):
            return None
        try:
            group = self._open_group(number)
        except ValueError as error:
            self._error = error
            return None
        assert group.number == number and len(group.requests) == self.group_size
        self.next_number = number + 1
        group.opened_at = now
        group.unasked = {request.index for request in group.requests}
        self.open[number] = group
        return self._ask(group, Process(server, server_id), room, split)

    def _ask(self, group: OpenGroup, process: Process, room: int, split: bool) -> RolloutRequest | None:
        if room < 1 or (len(group.unasked) > room and not split):
            return None
        indices = set(sorted(group.unasked)[:room])
        group.unasked -= indices
        group.asked.update(dict.fromkeys(indices, process.address))
        pinned = pacing_lib.pinned(self.pacing, group.number, trained=self.trained)
        return RolloutRequest(
            group, process.address, self.pacing.minimum_step(group.number), pinned, indices, process.server_id
        )

    def arrived(self, lease: RolloutRequest, completion: Completion) -> bool:
        """Enters a completion that came on a lease. False: the lease no longer waits for it, it changes nothing."""
        index = completion.index
        if index not in lease.left:
            return False
        lease.left.discard(index)
        del lease.group.asked[index]
        assert index not in lease.group.completions
        lease.group.completions[index] = completion
        lease.group.servers[index] = Process(lease.server, lease.server_id)
        return True

    def returned(self, lease: RolloutRequest, *, failed: bool) -> int:
        """The call has ended: what did not come is to be asked again. Returns how many that is."""
        left = len(lease.left)
        for index in lease.left:
            del lease.group.asked[index]
        lease.group.unasked |= lease.left
        lease.left = set()
        if left and failed:
            lease.group.failed_at = lease.server
        return left

    def scored(self, group: OpenGroup, completion: Completion, score: Score, *, now: float) -> bool:
        """Enters a score. True: the group is finished by it. That of a completion taken back changes nothing."""
        index = completion.index
        if group.completions.get(index) is not completion:
            return False
        assert index not in group.scores
        group.scores[index] = score
        if len(group.scores) < len(group.requests):
            return False
        group.finished_at = now
        self.finished[group.number] = self.open.pop(group.number)
        return True

    def take_back(self, process: Process, numbers: Collection[int] | None = None) -> int:
        """Forgets what a process delivered: to all groups not yet trained, or to those of these numbers.

        It is to be asked for again, elsewhere if there is somebody else. Returns how many completions that is.
        """
        groups = {**self.open, **self.finished, **{group.number: group for group in self._taken}}
        back = 0
        for number, group in groups.items():
            lost = [i for i, by in group.servers.items() if by == process]
            if not lost or (numbers is not None and number not in numbers):
                continue
            for index in lost:
                del group.completions[index], group.servers[index]
                group.scores.pop(index, None)
            group.unasked.update(lost)
            group.failed_at = process.address
            self.finished.pop(number, None)
            self.open[number] = group
            back += len(lost)
        # What was taken and is whole waits in the store again; nothing of that batch has been trained.
        if any(group.number in self.open for group in self._taken):
            whole = [group for group in self._taken if group.number not in self.open]
            self.finished.update({group.number: group for group in whole})
            self._taken = []
        self.open = dict(sorted(self.open.items()))
        return back

    def missing(self, batch: int) -> list[OpenGroup]:
        """The open groups that `batch` waits for, oldest first."""
        last = self.pacing.last_needed(batch)
        return [group for group in self.open.values() if group.number <= last]

    def free_of_pins(self) -> bool:
        """Whether something is to be asked for, and all of that from any version that the trainer has reached."""
        waiting = [group.number for group in self.open.values() if group.unasked]
        return bool(waiting) and all(
            pacing_lib.pinned(self.pacing, number, trained=self.trained) is None for number in waiting
        )

    def ready(self, batch: int) -> bool:
        """Whether all that `batch` waits for is finished."""
        return self.pacing.last_needed(batch) < self.next_number and not self.missing(batch)

    def take(self, batch: int) -> list[OpenGroup] | None:
        """The batch's groups in order of number, out of the store; None while it is not ready.

        Raises ValueError where open_group could not make a group that the batch needs.
        """
        if not self.ready(batch):
            if self._error is not None and not self.missing(batch):
                raise self._error
            return None
        numbers = range(batch * self.pacing.groups, (batch + 1) * self.pacing.groups)
        self._taken = [self.finished.pop(number) for number in numbers]
        return list(self._taken)

    def trained_to(self, version: int) -> None:
        """Batch version - 1 has been trained: it can no longer be put back."""
        assert version == self.trained + 1
        self.trained, self._taken = version, []

"""Tracks which groups are in flight or ready, and which server was asked for which completion. Pure: no IO, no clock.

A group is *in flight* from its admission (its row is drawn) until every completion has arrived and is scored; then it
is *ready*, and waits in the store for its batch. A *request* asks one server for some completions of one group in one
call; when the call ends, completions that did not arrive are *pending* again, under the same ids. So are completions
that are *taken back* because their server turned out not to run the policy; for this a group already popped for its
batch can be put back until that batch has been trained. Every group is handed out whole, and trained once.

A completion of several turns (environments/episode.py) is pending again for each turn, with the same `minimum_step`,
so the staleness bound holds for every token of an episode. An episode that is taken back restarts. A turn goes to the
process that sampled the previous turn and holds its KV cache, as long as that process has capacity.

An agent (environments/episode.py) requests its turns itself. Its group has no completions to request; each turn is a
small separate group in `turns`, with the number of the agent's group, so the same rules apply to it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from scalerl_jax.contract.codec import Completion, CompletionRequest, TeacherScores
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.episode import AgentRun, Reply, SampledPart, Trajectory
from scalerl_jax.rollouts import pacing as pacing_lib


class Process(NamedTuple):
    """A server process that delivers completions."""

    address: str
    server_id: str


_NO_SERVER: Mapping[Process, int] = {}


@dataclasses.dataclass(frozen=True)
class FinishedGroup:
    """All completions of a row's prompt, with their scores."""

    number: int
    row: Row
    completions: tuple[Completion, ...]  # by index
    scores: tuple[Score, ...]  # by index
    asked_at: float  # seconds, time.monotonic()
    finished_at: float
    # By completion index, then by branch: the process that sampled the branch, or each of its turns.
    servers: tuple[tuple[tuple[SampledPart, ...], ...], ...] = ()
    # By completion index, then by branch: scores of the branch's prompt and tokens. None if the row has no teacher.
    teachers: tuple[tuple[TeacherScores, ...], ...] | None = None


class TurnRequest(NamedTuple):
    """A turn that an agent asks for."""

    run: AgentRun
    session: str
    after: Process | None  # the process that sampled the previous turn
    most_tokens: int | None  # token limit requested by the agent
    answer: "Future[tuple[Completion, Process]]"


@dataclasses.dataclass
class GroupInFlight:
    """A group being sampled; `group_id` and `requests` never change, whichever servers are asked."""

    number: int
    group_id: str
    row: Row
    requests: tuple[CompletionRequest, ...]  # by index
    opened_at: float = 0.0  # seconds, on the clock of GroupBuffer's caller
    finished_at: float = 0.0
    pending: set[int] = dataclasses.field(default_factory=set)
    asked: dict[int, str] = dataclasses.field(default_factory=dict)  # index -> server
    # Completions of which a turn has arrived, or whose agent runs, by index.
    trajectories: dict[int, Trajectory | AgentRun] = dataclasses.field(default_factory=dict)
    scores: dict[int, Score] = dataclasses.field(default_factory=dict)
    teachers: dict[int, tuple[TeacherScores, ...]] = dataclasses.field(default_factory=dict)  # of each branch
    with_teacher: dict[int, str] = dataclasses.field(default_factory=dict)  # index -> teacher whose scores are missing
    failed_at: str = ""  # the server that last failed to deliver
    turns: list["GroupInFlight"] = dataclasses.field(default_factory=list)  # its agents' unanswered turns
    call: TurnRequest | None = None  # set if this group is itself such a turn
    begun: Counter[int] = dataclasses.field(default_factory=Counter)  # agents started, by index

    def delivered(self) -> int:
        """Number of completions that do not wait for a server."""
        if self.row.agent:
            return len(self.scores)
        return len(self.requests) - len(self.pending) - len(self.asked)


@dataclasses.dataclass(eq=False)
class RolloutRequest:
    """Completions `left` of `group`, requested from `process` in one call."""

    buffer: "GroupBuffer"  # that the group belongs to
    group: GroupInFlight
    process: Process
    minimum_step: int
    pinned_step: int | None
    left: set[int]
    trajectory: Trajectory | None = None  # of the one completion, if this requests its next turn
    failed: bool = True  # whether completions left at the end are the server's failure; else it may be asked again


def finished(group: GroupInFlight) -> FinishedGroup:
    """The FinishedGroup of a group that has all its completions and scores."""
    indices = [wanted.index for wanted in group.requests]
    return FinishedGroup(
        number=group.number,
        row=group.row,
        completions=tuple(group.trajectories[i].completion for i in indices),
        scores=tuple(group.scores[i] for i in indices),
        asked_at=group.opened_at,
        finished_at=group.finished_at,
        servers=tuple(group.trajectories[i].branch_parts for i in indices),
        teachers=tuple(group.teachers[i] for i in indices) if group.teachers else None,
    )


class GroupBuffer:
    """The groups of one run (or of one evaluation), in order of number.

    Args:
        pacing: decides which group may be requested when.
        open_group: makes group n; called with consecutive numbers, each once. It may raise ValueError (no prompt is
            left): groups in flight continue, and `pop_batch` raises the error when it reaches that group.
        group_size: completions of a group.
        trained: number of batches already trained; group numbers start with the next batch.
        agents: how many may run at once.
    """

    def __init__(
        self,
        *,
        pacing: pacing_lib.Pacing,
        open_group: Callable[[int], GroupInFlight],
        group_size: int,
        trained: int,
        agents: int,
    ):
        self.pacing, self.group_size, self._agents = pacing, group_size, agents
        self.trained = trained
        self.in_flight: dict[int, GroupInFlight] = {}  # in order of number
        self.ready: dict[int, GroupInFlight] = {}
        self.next_number = trained * pacing.groups
        self._last_batch: list[GroupInFlight] = []  # by the last `pop_batch`
        self._open_group = open_group
        self._error: ValueError | None = None

    def stored(self) -> int:
        """Number of groups of batches after the current one (in training or waited for) that need no more sampling.

        Groups count before they are scored: a slow scorer must not let the generators run ahead.
        """
        sampled = [n for n, group in self.in_flight.items() if group.delivered() == len(group.requests)]
        return sum(self.pacing.batch(number) > self.trained for number in (*self.ready, *sampled))

    def pending(self) -> int:
        """Number of completions not assigned to a server."""
        return sum(len(group.pending) for group in self.waiting())

    def waiting(self) -> Iterator[GroupInFlight]:
        """Groups in flight and turns of agents that have pending completions, oldest first."""
        for group in self.in_flight.values():
            group.turns = [call for call in group.turns if call.call and not call.call.answer.cancelled()]
            yield from (one for one in (group.turns if group.row.agent else (group,)) if one.pending)

    def request(
        self,
        process: Process,
        *,
        step: int,
        capacity: int,
        split: bool,
        alone: bool,
        now: float,
        with_capacity: Mapping[Process, int] = _NO_SERVER,
    ) -> RolloutRequest | None:
        """The next request for a server process that holds version `step` and may get `capacity` more completions.

        The oldest group comes first, so that the batch waited for is served before later ones. split: a group larger
        than `capacity` may be requested in parts. alone: no other server could be asked, so this one is asked even for
        what it last failed to deliver. with_capacity: the processes that may get more, and the version that each holds.
        A turn is left to the process that sampled the previous turn and holds its KV cache.
        """
        for group in self.waiting():
            if group.failed_at == process.address and not alone:
                continue
            if not pacing_lib.suits(self.pacing, group.number, step, trained=self.trained):
                continue
            wanted = self._wanted(group, process, with_capacity)
            if wanted:
                return self._ask(group, process, wanted, capacity, split)
        if self._error is not None or capacity < 1:
            return None
        number = self.next_number
        running = sum(len(group.requests) - len(group.scores) for group in self.in_flight.values() if group.row.agent)
        if running and running + self.group_size > self._agents:
            return None
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
        group.pending = {wanted.index for wanted in group.requests}
        self.in_flight[number] = group
        return None if group.row.agent else self._ask(group, process, sorted(group.pending), capacity, split)

    def _wanted(self, group: GroupInFlight, process: Process, with_capacity: Mapping[Process, int]) -> list[int]:
        """The pending completions to request in one call: first turns share a prompt, a later turn has its own."""

        def left_to_another(last: Process | None) -> bool:
            if last is None or last == process or last not in with_capacity or group.failed_at == last.address:
                return False
            return pacing_lib.suits(self.pacing, group.number, with_capacity[last], trained=self.trained)

        def last_of(trajectory: Trajectory | AgentRun) -> Process:
            assert isinstance(trajectory, Trajectory)
            return trajectory.last

        if group.call is not None:
            return [] if left_to_another(group.call.after) else sorted(group.pending)
        going_on = [i for i in sorted(group.pending) if i in group.trajectories]
        mine = [i for i in going_on if not left_to_another(last_of(group.trajectories[i]))]
        return mine[:1] or sorted(group.pending.difference(going_on))

    def _ask(
        self, group: GroupInFlight, process: Process, wanted: list[int], capacity: int, split: bool
    ) -> RolloutRequest | None:
        if capacity < 1 or (len(wanted) > capacity and not split):
            return None
        indices = set(wanted[:capacity])
        trajectory = group.trajectories.get(wanted[0])
        assert not isinstance(trajectory, AgentRun)
        group.pending -= indices
        group.asked.update(dict.fromkeys(indices, process.address))
        pinned = pacing_lib.pinned(self.pacing, group.number, trained=self.trained)
        minimum = self.pacing.minimum_step(group.number)
        return RolloutRequest(self, group, process, minimum, pinned, indices, trajectory)

    def arrived(self, request: RolloutRequest, completion: Completion) -> Trajectory | None:
        """Records a completion that arrived for a request, or a turn of one. Returns None if there is nothing to score:
        the request no longer waits for it, its earlier turns were taken back, or it is an agent's turn."""
        index, group = completion.index, request.group
        if index not in request.left:
            return None
        request.left.discard(index)
        del group.asked[index]
        if group.call is not None:
            self._answer(group, group.call, completion, request.process)
            return None
        trajectory = group.trajectories.get(index)
        assert not isinstance(trajectory, AgentRun)
        if trajectory is not request.trajectory:
            group.pending.add(index)
            return None
        if trajectory is None:
            trajectory = group.trajectories[index] = Trajectory(completion, request.process)
        else:
            trajectory.add_turn(completion, request.process)
        return trajectory

    # ---- agents

    def start_agents(self) -> list[tuple[GroupInFlight, AgentRun]]:
        """The agents to start now; they are recorded as running."""
        found = []
        for group in self.in_flight.values():
            for index in sorted(group.pending if group.row.agent else ()):
                run = group.trajectories[index] = AgentRun(index, attempt=group.begun[index])
                group.begun[index] += 1
                group.pending.discard(index)
                found.append((group, run))
        return found

    def runs(self, group: GroupInFlight, run: AgentRun) -> bool:
        """Whether the agent's result is still wanted."""
        return self.in_flight.get(group.number) is group and group.trajectories.get(run.index) is run

    def add_call(self, group: GroupInFlight, call: TurnRequest, row: Row, name: str, wanted: CompletionRequest) -> None:
        """Adds a turn requested by an agent. Only the prompt of `row` is used."""
        one = GroupInFlight(group.number, f"{group.group_id}/{name}", row, (wanted,), pending={wanted.index}, call=call)
        if self.runs(group, call.run):
            group.turns.append(one)
        else:
            call.answer.cancel()

    def _answer(self, one: GroupInFlight, call: TurnRequest, completion: Completion, process: Process) -> None:
        group = self.in_flight.get(one.number)
        if group is None or not any(other is one for other in group.turns):
            return
        group.turns = [other for other in group.turns if other is not one]
        call.run.processes.add(process)
        if call.answer.set_running_or_notify_cancel():
            call.answer.set_result((completion, process))

    # ---- completions

    def replied(self, group: GroupInFlight, trajectory: Trajectory, reply: Reply) -> None:
        """Records the environment's reply to the last turn and makes another turn pending. Does nothing for a
        trajectory that was taken back."""
        if group.trajectories.get(trajectory.index) is trajectory:
            trajectory.add_reply(reply)
            group.pending.add(trajectory.index)

    def returned(self, request: RolloutRequest) -> None:
        """Ends a call: completions that did not arrive are pending again."""
        if request.left and request.failed:
            request.group.failed_at = request.process.address
        for index in request.left:
            del request.group.asked[index]
        request.group.pending |= request.left
        request.left = set()

    def scored(
        self,
        group: GroupInFlight,
        trajectory: Trajectory | AgentRun,
        score: Score,
        *,
        now: float,
        teacher: tuple[TeacherScores, ...] = (),
    ) -> bool:
        """Records a score. Returns True if it makes the group ready. Ignores a trajectory that was taken back.

        teacher: the teacher's scores of each branch; () if the row has no teacher.
        """
        index = trajectory.index
        if group.trajectories.get(index) is not trajectory:
            return False
        assert index not in group.scores
        group.scores[index] = score
        if teacher:
            group.teachers[index] = teacher
        if len(group.scores) < len(group.requests):
            return False
        group.finished_at = now
        self.ready[group.number] = self.in_flight.pop(group.number)
        return True

    def retract(self, process: Process, numbers: Collection[int] | None = None) -> int:
        """Drops what a process delivered to all groups not yet trained, or only to those with these numbers.

        These completions are requested again, from another server if there is one. Returns their number.
        """
        groups = {**self.in_flight, **self.ready, **{group.number: group for group in self._last_batch}}
        back = 0
        for number, group in groups.items():
            lost = [i for i, one in group.trajectories.items() if process in one.processes]
            if not lost or (numbers is not None and number not in numbers):
                continue
            for index in lost:
                gone = group.trajectories.pop(index)
                group.scores.pop(index, None)
                group.teachers.pop(index, None)
                group.turns = [one for one in group.turns if one.call and one.call.run is not gone]
            # A completion whose next turn is being sampled elsewhere becomes pending when that call ends.
            group.pending.update(set(lost) - group.asked.keys())
            group.failed_at = process.address
            self.ready.pop(number, None)
            self.in_flight[number] = group
            back += len(lost)
        # Complete groups of the popped batch return to the store; nothing of that batch has been trained.
        if any(group.number in self.in_flight for group in self._last_batch):
            whole = [group for group in self._last_batch if group.number not in self.in_flight]
            self.ready.update({group.number: group for group in whole})
            self._last_batch = []
        self.in_flight = dict(sorted(self.in_flight.items()))
        return back

    def missing(self, batch: int) -> list[GroupInFlight]:
        """The groups in flight that `batch` waits for, oldest first."""
        last = self.pacing.last_needed(batch)
        return [group for group in self.in_flight.values() if group.number <= last]

    def free_of_pins(self) -> bool:
        """Whether something is to be requested, and none of it is pinned to a version."""
        waiting = [group.number for group in self.waiting()]
        return bool(waiting) and all(
            pacing_lib.pinned(self.pacing, number, trained=self.trained) is None for number in waiting
        )

    def is_ready(self, batch: int) -> bool:
        """Whether all that `batch` waits for is ready."""
        last = self.pacing.last_needed(batch)
        if self._error is not None:  # a phase ends early, with the last complete batch
            last = min(last, (batch + 1) * self.pacing.groups - 1)
        return last < self.next_number and not self.missing(batch)

    def pop_batch(self, batch: int) -> list[GroupInFlight] | None:
        """Removes the batch's groups from the store and returns them in order of number; None while it is not ready.

        Raises ValueError if open_group could not make a group that the batch needs.
        """
        if not self.is_ready(batch):
            if self._error is not None and not self.missing(batch):
                raise self._error
            return None
        numbers = range(batch * self.pacing.groups, (batch + 1) * self.pacing.groups)
        self._last_batch = [self.ready.pop(number) for number in numbers]
        return list(self._last_batch)

    def trained_to(self, version: int) -> None:
        """Batch version - 1 has been trained: it can no longer be put back."""
        assert version == self.trained + 1
        self.trained, self._last_batch = version, []

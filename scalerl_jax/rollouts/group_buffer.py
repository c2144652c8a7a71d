"""Which groups are in flight, who was asked for which completion, what is ready. Pure: no IO, no clock.

A group is *in flight* from its admission (its row is drawn) until every completion has arrived and is scored; then it
is *ready*, and waits in the store for its batch. A *request* is some completions of one group asked of one server in
one call; when the call ends, completions that did not come are *pending* again, under the same ids. So are those that
are *taken back*, because what delivered them turned out not to run the policy; a group taken for its batch can be put
back for that until the next one is taken. Whatever happens, every group is handed out whole, and trained once.

A completion of several turns (environments/episode.py) is pending again for each of them, with the same `minimum_step`:
so no token of an episode is staler than those of any completion. One that is taken back begins again. A turn goes to
the process that sampled the one before, which has its keys and values, as long as that has room.

An agent (environments/agent.py) asks for its turns itself. Its group has nothing to ask of a server; each of the turns
is a small group of its own, in `turns`, with the number of the agent's group and so under the same rules.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from scalerl_jax.contract.codec import Completion, CompletionRequest, TeacherScores
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.agent import AgentRun
from scalerl_jax.environments.episode import Part, Trajectory
from scalerl_jax.rollouts import pacing as pacing_lib


class Process(NamedTuple):
    """A server process: who delivered a completion."""

    address: str
    server_id: str


_NOBODY: Mapping[Process, int] = {}


@dataclasses.dataclass(frozen=True)
class FinishedGroup:
    """All completions of a row's prompt and what each is worth."""

    number: int
    row: Row
    completions: tuple[Completion, ...]  # by index
    scores: tuple[Score, ...]  # by index
    asked_at: float  # seconds, time.monotonic()
    finished_at: float
    # By index, and of each its branches: which process sampled it, or its turns.
    servers: tuple[tuple[tuple[Part, ...], ...], ...] = ()
    # By index, and of each its branches: of the branch's prompt and tokens. None: the row has no teacher.
    teachers: tuple[tuple[TeacherScores, ...], ...] | None = None


class Call(NamedTuple):
    """A turn that an agent asks for."""

    run: AgentRun
    session: str
    after: Process | None  # who sampled the turn before
    most_tokens: int | None  # that the agent wants
    answer: "Future[tuple[Completion, Process]]"


@dataclasses.dataclass
class GroupInFlight:
    """A group being sampled; `group_id` and `requests` never change, whichever servers are asked."""

    number: int
    group_id: str
    row: Row
    requests: tuple[CompletionRequest, ...]  # by index
    opened_at: float = 0.0  # seconds, as the caller of GroupBuffer counts them
    finished_at: float = 0.0
    pending: set[int] = dataclasses.field(default_factory=set)
    asked: dict[int, str] = dataclasses.field(default_factory=dict)  # index -> server
    # Of which a turn has come, or whose agent runs.
    trajectories: dict[int, Trajectory | AgentRun] = dataclasses.field(default_factory=dict)
    scores: dict[int, Score] = dataclasses.field(default_factory=dict)
    teachers: dict[int, tuple[TeacherScores, ...]] = dataclasses.field(default_factory=dict)  # of each branch
    with_teacher: dict[int, str] = dataclasses.field(default_factory=dict)  # that have all but their teacher's
    failed_at: str = ""  # the server that did not deliver the last time
    turns: list["GroupInFlight"] = dataclasses.field(default_factory=list)  # of its agents, not answered yet
    call: Call | None = None  # it is one of those itself
    begun: Counter[int] = dataclasses.field(default_factory=Counter)  # agents, by index

    def delivered(self) -> int:
        """How many completions wait for no server."""
        if self.row.agent:
            return len(self.scores)
        return len(self.requests) - len(self.pending) - len(self.asked)


@dataclasses.dataclass(eq=False)
class RolloutRequest:
    """Completions `left` of `group`, asked of `process` in one call."""

    buffer: "GroupBuffer"  # which the group belongs to
    group: GroupInFlight
    process: Process
    minimum_step: int
    pinned_step: int | None
    left: set[int]
    trajectory: Trajectory | None = None  # the one completion's, which another turn is asked for of
    failed: bool = True  # what is left when the call ends is the server's failure; False: it may be asked for it again


def finished(group: GroupInFlight) -> FinishedGroup:
    """What is handed out of a group that has all its completions and scores."""
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
        pacing: what may be asked when.
        open_group: makes group n; called with consecutive numbers, each once. It may raise ValueError (no prompt is
            left): what is in flight goes on, and `pop_batch` raises the error when it comes to that group.
        group_size: completions of a group.
        trained: batches trained before; the groups begin with those of the next one.
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
        """Groups of later batches than the one in training or waited for that need no more sampling.

        They count before they are scored: a slow scorer must not let the generators run ahead.
        """
        sampled = [n for n, group in self.in_flight.items() if group.delivered() == len(group.requests)]
        return sum(self.pacing.batch(number) > self.trained for number in (*self.ready, *sampled))

    def pending(self) -> int:
        """Completions that are asked of no server."""
        return sum(len(group.pending) for group in self.waiting())

    def waiting(self) -> Iterator[GroupInFlight]:
        """Groups in flight, and turns of agents, of which something is to be asked of a server; the oldest first."""
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
        with_capacity: Mapping[Process, int] = _NOBODY,
    ) -> RolloutRequest | None:
        """What to ask next of a server process that holds version `step` and may get `capacity` more completions.

        The oldest group first, so that the batch waited for is served before later ones. split: a group larger than
        `capacity` may be asked for in parts. alone: no other server could be asked, so even what this one failed to
        deliver the last time is asked of it again. with_capacity: the processes that may get more, and the version that
        each holds. A turn is left to the one that sampled the turn before, which has its keys and values.
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
        """The pending completions to ask of a process at once: first turns share a prompt, another has its own."""

        def left_to_another(last: Process | None) -> bool:
            if last is None or last == process or last not in with_capacity or group.failed_at == last.address:
                return False
            return pacing_lib.suits(self.pacing, group.number, with_capacity[last], trained=self.trained)

        def last_of(trajectory: Trajectory | AgentRun) -> Process:
            assert isinstance(trajectory, Trajectory)
            return trajectory.parts[-1].process

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
        """Enters a completion that came on a request, or a turn of one. None: the request no longer waits for it, or
        what came before is taken back; it changes nothing."""
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
        """Those to be started now: they are entered."""
        found = []
        for group in self.in_flight.values():
            for index in sorted(group.pending if group.row.agent else ()):
                run = group.trajectories[index] = AgentRun(index, attempt=group.begun[index])
                group.begun[index] += 1
                group.pending.discard(index)
                found.append((group, run))
        return found

    def runs(self, group: GroupInFlight, run: AgentRun) -> bool:
        """Whether the agent is wanted."""
        return self.in_flight.get(group.number) is group and group.trajectories.get(run.index) is run

    def add_call(self, group: GroupInFlight, call: Call, row: Row, name: str, wanted: CompletionRequest) -> None:
        """An agent asks for a turn; row: of which only the prompt counts."""
        one = GroupInFlight(group.number, f"{group.group_id}/{name}", row, (wanted,), pending={wanted.index}, call=call)
        if self.runs(group, call.run):
            group.turns.append(one)
        else:
            call.answer.cancel()

    def _answer(self, one: GroupInFlight, call: Call, completion: Completion, process: Process) -> None:
        group = self.in_flight.get(one.number)
        if group is None or not any(other is one for other in group.turns):
            return
        group.turns = [other for other in group.turns if other is not one]
        call.run.processes.add(process)
        if call.answer.set_running_or_notify_cancel():
            call.answer.set_result((completion, process))

    # ---- what becomes of completions

    def replied(self, group: GroupInFlight, trajectory: Trajectory, token_ids: np.ndarray) -> None:
        """Enters what the environment says behind the last turn: another turn is pending. That of a trajectory taken
        back changes nothing."""
        if group.trajectories.get(trajectory.index) is trajectory:
            trajectory.add_reply(token_ids)
            group.pending.add(trajectory.index)

    def returned(self, request: RolloutRequest) -> None:
        """The call has ended: what did not come is to be asked again."""
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
        """Enters a score. True: the group is ready by it. That of a trajectory taken back changes nothing.

        teacher: its scores of each branch; (): the row has none.
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
        """Forgets what a process delivered: to all groups not yet trained, or to those of these numbers.

        It is asked for again, from another server if there is one. Returns how many completions that is.
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
            # One whose next turn is being sampled elsewhere is pending when that call ends.
            group.pending.update(set(lost) - group.asked.keys())
            group.failed_at = process.address
            self.ready.pop(number, None)
            self.in_flight[number] = group
            back += len(lost)
        # What was taken and is whole waits in the store again; nothing of that batch has been trained.
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
        """Whether something is to be asked for, and all of that from any version that the trainer has reached."""
        waiting = [group.number for group in self.waiting()]
        return bool(waiting) and all(
            pacing_lib.pinned(self.pacing, number, trained=self.trained) is None for number in waiting
        )

    def is_ready(self, batch: int) -> bool:
        """Whether all that `batch` waits for is ready."""
        last = self.pacing.last_needed(batch)
        if self._error is not None:  # a phase ends early: with the last batch that is whole
            last = min(last, (batch + 1) * self.pacing.groups - 1)
        return last < self.next_number and not self.missing(batch)

    def pop_batch(self, batch: int) -> list[GroupInFlight] | None:
        """The batch's groups in order of number, out of the store; None while it is not ready.

        Raises ValueError where open_group could not make a group that the batch needs.
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

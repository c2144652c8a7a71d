"""A discrete-event simulation of trainer and fleet around the real Pacing and GroupBuffer: no process, no wall clock.

    server   slots, a FIFO queue, a speed; plays completions of some chunks, each sampled by the version held then;
             dies, hangs (its calls time out), comes back with weights of nobody, receives versions after a delay;
             with `meetings` it is asked for nothing before a trainer that waits has the version that it holds
    trainer  takes batches by number, trains for a while, publishes what the pacing publishes; the latest version wins
    agent    of every second group, with `agents`: asks for turns one by one, two of them at once, thinks between

Seeded by one random.Random; every chunk of every completion keeps the version that sampled it.
"""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from scalerl_jax.contract.codec import Completion, CompletionRequest
from scalerl_jax.environments import Row
from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.environments.episode import AgentRun, Outcome, Reply, SampledPart, Trajectory
from scalerl_jax.rollouts.group_buffer import GroupBuffer, GroupInFlight, Process, RolloutRequest, TurnRequest
from scalerl_jax.rollouts.pacing import Pacing

CHUNK = 4  # tokens
AGENTS = 6  # at once


@dataclasses.dataclass
class Faults:
    death: float = 0.0  # per completion finished: the server is gone and comes back later
    hang: float = 0.0  # per completion finished: the server stands still until its calls time out
    refuse: float = 0.0  # per request: the server has no room after all
    lie: float = 0.0  # per batch taken: what one process delivered is taken back, of all groups or of some
    evaluate: float = 0.0  # per batch trained: its version goes out, whatever the pacing says


NO_FAULTS = Faults()


@dataclasses.dataclass(eq=False)
class Lane:
    request: RolloutRequest
    index: int
    chunks: int
    steps: list[int] = dataclasses.field(default_factory=list)  # version of each chunk


class Server:
    def __init__(self, name: str, *, slots: int, chunk_seconds: float):
        self.name, self.slots, self.chunk_seconds = name, slots, chunk_seconds
        self.step: int | None = None
        self.alive, self.hanging, self.epoch = True, False, 0
        self.lanes: list[Lane] = []
        self.queue: list[Lane] = []
        self.receiving = False
        self.met = False
        self.idle_slot_seconds = 0.0

    @property
    def in_flight(self) -> int:
        return len(self.lanes) + len(self.queue)


def completions(group: GroupInFlight) -> dict[int, Completion]:
    """By index."""
    return {index: trajectory.completion for index, trajectory in group.trajectories.items()}


def delivered(group: GroupInFlight) -> list[Process]:
    """Who has delivered a part of each of them."""
    return [process for trajectory in group.trajectories.values() for process in trajectory.processes]


class Simulation:
    """Runs until the trainer has trained every batch. `trained` is what it trained: [batch][group] in order."""

    def __init__(
        self,
        *,
        pacing: Pacing,
        seed: int,
        slots: list[int],
        chunk_seconds: list[float],
        update_seconds: float,
        push_seconds: float,
        group_size: int = 2,
        mean_chunks: float = 4.0,
        faults: Faults = NO_FAULTS,
        start: int = 0,
        meetings: bool = False,
        turns: int = 1,
        agents: bool = False,
        maximum_events: int = 400_000,
    ):
        self.random = random.Random(seed)
        self.pacing, self.group_size, self.mean_chunks, self.faults = pacing, group_size, mean_chunks, faults
        self.update_seconds, self.push_seconds, self.maximum_events = update_seconds, push_seconds, maximum_events
        self.turns, self.agents = turns, agents  # turns: of a completion, at the most
        self.servers = [Server(f"s{i}", slots=n, chunk_seconds=s) for i, (n, s) in enumerate(zip(slots, chunk_seconds))]
        self.buffer = GroupBuffer(
            pacing=pacing, open_group=self.open_group, group_size=group_size, trained=start, agents=AGENTS
        )
        self.drawn: list[int] = []
        self.latest, self.meetings = start, meetings
        self.training: int | None = None
        self.trained: list[list[GroupInFlight]] = []
        self.idle_checks = self.taken_back = 0
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), action, args))

    def run(self) -> None:
        for server in self.servers:
            self.receive(server)
        for _ in range(self.maximum_events):
            self.trainer_looks()
            self.pump()
            self.check_slots()
            if self.buffer.trained == self.pacing.batches:
                return
            assert self._events, (
                f"nothing will ever happen again: {self.buffer.trained} of {self.pacing.batches} batches"
            )
            when, _, action, args = heapq.heappop(self._events)
            for server in self.servers:
                server.idle_slot_seconds += (when - self.now) * (server.slots - len(server.lanes))
            self.now = when
            action(*args)
        raise AssertionError(f"only {self.buffer.trained} of {self.pacing.batches} batches after {self.now:.0f} s")

    # ---- trainer

    def open_group(self, number: int) -> GroupInFlight:
        # What the curriculum relies on: consecutive numbers, and batches up to b - k - 1 recorded.
        assert number == (self.drawn[-1] + 1 if self.drawn else self.buffer.next_number)
        assert self.buffer.trained >= self.pacing.batch(number) - self.pacing.k
        self.drawn.append(number)
        requests = tuple(CompletionRequest(i, seed=number * 100 + i) for i in range(self.group_size))
        return GroupInFlight(number, f"train/{number}", Row("", agent=self.agents and number % 2 == 1), requests)

    def trainer_looks(self) -> None:
        if self.training is None:
            for server in self.servers:
                server.met = server.met or (server.alive and server.step == self.buffer.trained)
        if self.training is None and self.buffer.trained < self.pacing.batches:
            groups = self.buffer.pop_batch(self.buffer.trained)
            lied = groups is not None and self.random.random() < self.faults.lie and self.take_back(groups)
            if groups is not None and not lied:
                self.training = self.buffer.trained
                self.trained.append(groups)
                self.at(self.update_seconds * self.random.uniform(0.5, 1.5), self.updated)

    def take_back(self, groups: list[GroupInFlight]) -> bool:
        """Whether that takes the batch away."""
        found = sorted({by for group in groups for by in delivered(group)})
        if not found:
            return False  # agents that have asked for nothing
        process = self.random.choice(found)
        numbers = (
            None if self.random.random() < 0.5 else {group.number for group in groups if self.random.random() < 0.5}
        )
        of_it = sum(by == process for g in groups if numbers is None or g.number in numbers for by in delivered(g))
        back = self.buffer.retract(process, numbers)
        self.taken_back += back
        assert back >= of_it and (numbers is None or back == of_it)
        for server in self.servers:
            if self.meetings and numbers is None and (server.name, str(server.epoch)) == process:
                self.gone(server)  # sent away
                self.at(self.random.uniform(0.1, 20), self.back, server)
        return back > 0 and not self.buffer.is_ready(self.buffer.trained)

    def updated(self) -> None:
        self.training = None
        self.buffer.trained_to(self.buffer.trained + 1)
        if self.pacing.publishes(self.buffer.trained) or self.random.random() < self.faults.evaluate:
            self.publish()

    def publish(self) -> None:
        self.latest = self.buffer.trained
        for server in self.servers:
            self.receive(server)

    # ---- weights

    def receive(self, server: Server) -> None:
        if server.alive and not server.hanging and not server.receiving and server.step != self.latest:
            server.receiving = True
            delay = self.push_seconds * self.random.uniform(0.2, 3.0)
            self.at(delay, self.received, server, server.epoch, self.latest)

    def received(self, server: Server, epoch: int, step: int) -> None:
        if server.epoch == epoch:
            server.receiving, server.step = False, step
            self.receive(server)

    # ---- servers

    def pump(self) -> None:
        live = [s for s in self.servers if s.alive and s.step is not None and (s.met or not self.meetings)]
        # As the fleet does for candidates.
        if not live and self.training is None and self.latest < self.buffer.trained and self.buffer.free_of_pins():
            self.publish()
        ready = list(live)

        def room_of(server: Server) -> int:
            return server.slots + self.group_size + server.slots // 4 - server.in_flight

        with_capacity = {Process(s.name, str(s.epoch)): s.step for s in live if room_of(s) > 0}
        while ready:
            server = min(ready, key=lambda s: s.in_flight / s.slots)
            request = self.buffer.request(
                Process(server.name, str(server.epoch)),
                step=server.step,
                capacity=room_of(server),
                split=False,
                alone=len(live) == 1,
                now=self.now,
                with_capacity=with_capacity,
            )
            if request is None:
                ready.remove(server)
                continue
            if self.random.random() < self.faults.refuse:
                request.failed = False
                self.buffer.returned(request)
                ready.remove(server)
                self.at(0.1, lambda: None)
                continue
            for index in sorted(request.left):
                chunks = 1 + int(self.random.expovariate(1 / self.mean_chunks))
                server.queue.append(Lane(request, index, chunks))
            self.fill(server)

        for group, run in self.buffer.start_agents():
            running = sum(len(g.requests) - len(g.scores) for g in self.buffer.in_flight.values() if g.row.agent)
            assert running <= max(AGENTS, self.group_size) or self.faults.lie
            self.at(self.random.uniform(0, 2), self.agent_asks, group, run, [], self.random.randint(0, self.turns))

    def agent_asks(self, group: GroupInFlight, run: AgentRun, had: list[tuple[Completion, Process]], left: int) -> None:
        """For its next turn, or its last two at once; or it has ended."""
        at_once = min(left, 1 if left != 2 else 2)
        if not at_once:
            branches = tuple(dataclasses.replace(c, prompt=np.ones(1, np.int32)) for c, _ in had)
            parts = tuple((SampledPart(process, len(completion.token_ids)),) for completion, process in had)
            nothing = Completion(0, "", 0, np.zeros(0, np.int32), np.zeros(0, np.float32), (), (), "stop")
            score = run.finish(Outcome(branches or (nothing,), parts or ((),), RIGHT), group_id=group.group_id)
            self.buffer.scored(group, run, score, now=self.now)
            return
        answers = [Future[tuple[Completion, Process]]() for _ in range(at_once)]
        before = len(had)

        def answered(answer: "Future[tuple[Completion, Process]]") -> None:
            if not answer.cancelled():
                had.append(answer.result())
                if len(had) == before + at_once:
                    self.at(self.random.uniform(0, 2), self.agent_asks, group, run, had, left - at_once)

        for place, answer in enumerate(answers):
            answer.add_done_callback(answered)
            call = TurnRequest(run, group.group_id, had[-1][1] if had else None, None, answer)
            name = f"{run.index}/{before + place}"
            self.buffer.add_call(group, call, Row(""), name, CompletionRequest(run.index, before))

    def fill(self, server: Server) -> None:
        while server.alive and not server.hanging and server.queue and len(server.lanes) < server.slots:
            lane = server.queue.pop(0)
            server.lanes.append(lane)
            self.at(self.chunk_time(server), self.chunk, server, server.epoch, lane)

    def chunk_time(self, server: Server) -> float:
        return server.chunk_seconds * self.random.uniform(0.5, 1.5)

    def chunk(self, server: Server, epoch: int, lane: Lane) -> None:
        if server.epoch != epoch:
            return
        lane.steps.append(server.step)
        if len(lane.steps) < lane.chunks:
            self.at(self.chunk_time(server), self.chunk, server, epoch, lane)
            return
        server.lanes.remove(lane)
        completion = self.completion(lane)
        trajectory = self.buffer.arrived(lane.request, completion)
        assert self.buffer.arrived(lane.request, completion) is None, "a late duplicate must change nothing"
        if trajectory is not None:
            self.at(self.random.uniform(0, 0.2), self.score, lane.request.group, trajectory)
        else:
            assert self.turns > 1 or self.agents  # an agent's, or the turns before this one were taken back
        dice = self.random.random()
        if dice < self.faults.death:
            self.gone(server)
            self.at(self.random.uniform(0.1, 20), self.back, server)
        elif dice < self.faults.death + self.faults.hang:
            server.hanging = True
            server.epoch += 1
            self.at(self.random.uniform(1, 10), self.timed_out, server)
        else:
            self.fill(server)

    def score(self, group: GroupInFlight, trajectory: Trajectory) -> None:
        if trajectory.turns < self.random.randint(1, self.turns):
            reply = Reply(np.ones(3, np.int32), new_branch=self.random.random() < 0.3)
            self.buffer.replied(group, trajectory, reply)
            return
        self.buffer.scored(group, trajectory, RIGHT if self.random.random() < 0.5 else WRONG, now=self.now)

    def gone(self, server: Server) -> None:
        server.alive, server.hanging, server.receiving, server.met, server.step = False, False, False, False, None
        server.epoch += 1
        requests = {id(lane.request): lane.request for lane in (*server.lanes, *server.queue)}
        server.lanes, server.queue = [], []
        for request in requests.values():
            self.buffer.returned(request)

    def timed_out(self, server: Server) -> None:
        self.gone(server)
        self.at(self.random.uniform(0.1, 5), self.back, server)

    def back(self, server: Server) -> None:
        server.alive = True
        self.receive(server)

    def completion(self, lane: Lane) -> Completion:
        spans: list[tuple[int, int, int]] = []
        for at, step in enumerate(lane.steps):
            if spans and spans[-1][0] == step:
                spans[-1] = (step, spans[-1][1], (at + 1) * CHUNK)
            else:
                spans.append((step, at * CHUNK, (at + 1) * CHUNK))
        tokens = len(lane.steps) * CHUNK
        return Completion(
            incarnation=1,
            group_id=lane.request.group.group_id,
            index=lane.index,
            token_ids=np.ones(tokens, np.int32),
            logprobs=np.zeros(tokens, np.float32),
            versions=tuple(spans),
            forced=(),
            finish_reason="stop",
        )

    # ---- what must hold

    def check_slots(self) -> None:
        """A server at the latest version has an empty slot only where k, the store bound or the end forbid more."""
        for server in self.servers:
            if server.alive and not server.hanging and server.step == self.latest and len(server.lanes) < server.slots:
                batch = self.buffer.next_number // self.pacing.groups
                self.idle_checks += 1
                self.slot_may_be_empty(server, batch)

    def slot_may_be_empty(self, server: Server, batch: int) -> None:
        """Overridden by tests that claim something."""

    def lags(self) -> list[int]:
        """Of every trained token."""
        return [
            batch - step
            for batch, groups in enumerate(self.trained, start=self.pacing.batches - len(self.trained))
            for group in groups
            for completion in completions(group).values()
            for branch in completion.branches
            for step in branch.token_steps().tolist()
        ]

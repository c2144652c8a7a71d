"""A generator in simulated time: a queue, slots, chunks of decode steps, versions that come in between.

As the embedded engine does it (rollout_server/engines/jax): between two chunks it

    1. takes a version that has come, if nothing pinned to the one it holds is unfinished,
    2. gives free slots to what waits, first come, first served; a request's prompt is computed once per version,
    3. samples a chunk, and delivers what ended in it.

Until somebody ends, asks or sends a version every turn is like the one before, so that many chunks are one job on the
cores; what comes meanwhile is noticed at the end of a chunk, as in the engine. Every token keeps the version that
sampled it.

The trainer's side of a server is the same object: what the fleet's own `dispatch` and `Evaluations` ask of one.
"""

import bisect
import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable

import numpy as np

from scalerl_jax.contract.codec import Completion
from scalerl_jax.planning.twin.clock import Clock, Cores, Job
from scalerl_jax.planning.twin.outcome import Seconds
from scalerl_jax.planning.twin.speeds import ServerSpeed
from scalerl_jax.rollouts.evaluation import Evaluation
from scalerl_jax.rollouts.group_buffer import GroupBuffer, Process, RolloutRequest
from scalerl_jax.rollouts.servers import states
from scalerl_jax.rollouts.servers.room import room

_FINISHES = 4096  # as many as are remembered of a real server


@dataclasses.dataclass(eq=False)
class Sequence:
    """A completion that is asked for."""

    request: RolloutRequest
    buffer: GroupBuffer
    index: int
    tokens: int
    first_chunk: int = 0  # of the server's


class SimulatedCalls:
    """What the server is asked for, as the trainer counts it."""

    def __init__(self, server: "SimulatedServer", lengths: Callable[[GroupBuffer, int], np.ndarray]):
        self._server, self._lengths = server, lengths
        self._open: dict[RolloutRequest, GroupBuffer] = {}
        self.in_flight = 0
        self.finishes: collections.deque[float] = collections.deque(maxlen=_FINISHES)

    @property
    def load(self) -> float:
        return self.in_flight / self._server.speed.slots

    def works_on(self, buffer: GroupBuffer) -> bool:
        return any(other is buffer for other in self._open.values())

    def only(self, buffer: GroupBuffer) -> bool:
        return all(other is buffer for other in self._open.values())

    def room(self, *, group_size: int, typical_seconds: float, now: float) -> tuple[int, bool]:
        """As of a server that has long earned all its places."""
        speed = self._server.speed
        return room(
            slots=speed.slots,
            queue=speed.queue,
            in_flight=self.in_flight,
            finishes=self.finishes,
            typical_seconds=typical_seconds,
            now=now,
            allowance=None,
            group_size=group_size,
        )

    def ask(self, buffer: GroupBuffer, rollout: RolloutRequest) -> None:
        self._open[rollout] = buffer
        self.in_flight += len(rollout.left)
        self._server.submit(buffer, rollout, self._lengths(buffer, len(rollout.left)))

    def delivered(self, rollout: RolloutRequest, *, now: float) -> None:
        """One of its completions has been taken in."""
        self.in_flight -= 1
        self.finishes.append(now)
        if not rollout.left:
            del self._open[rollout]


class SimulatedServer:
    """See the module."""

    state = states.ACTIVE
    free_at = 0.0

    def __init__(
        self,
        name: str,
        speed: ServerSpeed,
        *,
        clock: Clock,
        cores: Cores,
        lengths: Callable[[GroupBuffer, int], np.ndarray],
        deliver: Callable[["SimulatedServer", Sequence, Completion], None],
        changed: Callable[[], None],
        retarget: Callable[["SimulatedServer"], None],
    ):
        """lengths: of so many completions of a buffer's. deliver: a completion is whole. changed: the fleet may have
        something to do. retarget: it should perhaps hold another version."""
        self.process, self.speed, self._clock, self._cores = Process(name, name), speed, clock, cores
        self.calls = SimulatedCalls(self, lengths)
        self.step: int | None = None  # the version held
        self.evaluation: Evaluation | None = None
        self.receiving = False  # a version is on its way
        self._busy = self._idle = self._evaluation = 0.0  # seconds
        self._deliver, self._changed, self._retarget = deliver, changed, retarget
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: list[tuple[int, int, Sequence]] = []  # a heap: (chunk it ends with, order, sequence)
        self._pinned = 0  # sequences here whose request is pinned
        self._order = itertools.count()
        self._chunks = 0  # sampled
        self._swaps: list[tuple[int, int]] = []  # (chunks sampled before, version), rising
        self._staged: tuple[int, Callable[[], None]] | None = None
        self._prefix: tuple[RolloutRequest, int] | None = None  # whose prompt is computed, and by which version
        self._job: Job | None = None
        self._stretch = (0.0, 0.0, 0)  # of the job: seconds until it samples, seconds a chunk, chunks
        self._counted_at = 0.0

    # ---- what the fleet's evaluations do with it

    def assign(self, evaluation: Evaluation) -> None:
        self.count()
        self.evaluation = evaluation
        self._retarget(self)

    def release(self) -> None:
        self.count()
        self.evaluation = None
        self._retarget(self)

    # ---- its time

    def count(self) -> None:
        """Books the time up to now; before anything changes that it depends on."""
        passed, self._counted_at = self._clock.now - self._counted_at, self._clock.now
        if self.evaluation is not None and self.calls.only(self.evaluation.buffer):
            self._evaluation += passed
        elif self._job is not None:
            self._busy += passed
        else:
            self._idle += passed

    @property
    def seconds(self) -> Seconds:
        """Up to the last count."""
        return Seconds(self._busy, self._idle, self._evaluation)

    # ---- requests and versions

    def submit(self, buffer: GroupBuffer, rollout: RolloutRequest, tokens: np.ndarray) -> None:
        for index, length in zip(sorted(rollout.left), tokens.tolist()):
            self._waiting.append(Sequence(rollout, buffer, index, length))
        self._pinned += len(tokens) * (rollout.pinned_step is not None)
        self._look()

    def stage(self, step: int, held: Callable[[], None]) -> None:
        """A version is here and is held from the next chunk on, or when it may be; `held` is called then."""
        assert self._staged is None
        self._staged = step, held
        self._look()

    def _swap_is_due(self) -> bool:
        return self._staged is not None and not self._pinned

    def _look(self) -> None:
        """Something has come: it is seen when the chunk under way ends."""
        if self._job is None:
            # At this moment, but after all that is asked for in it.
            self.count()
            self._begin(0.0, 0)
        elif self._swap_is_due() or (self._waiting and len(self._running) < self.speed.slots):
            entering, chunk, chunks = self._stretch
            begun = math.floor(max(0.0, self._cores.worked(self._job) - entering) / chunk * (1 + 1e-12)) + 1
            if begun < chunks:
                self._stretch = entering, chunk, begun
                self._cores.shorten(self._job, entering + begun * chunk)

    # ---- turns

    def _begin(self, entering: float, chunks: int) -> None:
        seconds = self.speed.chunk_seconds(len(self._running)) if chunks else 1.0
        self._stretch = entering, seconds, chunks
        self._job = self._cores.start(entering + chunks * seconds, self.speed.cores, self._ended)

    def _ended(self) -> None:
        self.count()
        self._job = None
        self._chunks += self._stretch[2]
        while self._running and self._running[0][0] <= self._chunks:
            _, _, sequence = heapq.heappop(self._running)
            self._pinned -= sequence.request.pinned_step is not None
            self._deliver(self, sequence, self._completion(sequence))
        self._turn()

    def _turn(self) -> None:
        if self._staged is not None and not self._pinned:
            step, held = self._staged
            self._staged, self.step = None, step
            self._swaps.append((self._chunks, step))
            held()
            self._changed()
        seconds = 0.0
        while self._waiting and len(self._running) < self.speed.slots:
            sequence = self._waiting.popleft()
            assert self.step is not None and self.step >= sequence.request.minimum_step
            if self._prefix != (sequence.request, self.step):
                self._prefix, seconds = (sequence.request, self.step), seconds + self.speed.prefill_seconds
            seconds += self.speed.completion_seconds
            sequence.first_chunk = self._chunks
            last = self._chunks + math.ceil(sequence.tokens / self.speed.chunk)
            heapq.heappush(self._running, (last, next(self._order), sequence))
        if self._running:
            self._begin(seconds, self._running[0][0] - self._chunks)

    def _completion(self, sequence: Sequence) -> Completion:
        """With the versions that sampled it; its tokens are all the same one."""
        chunk, tokens = self.speed.chunk, sequence.tokens
        first = bisect.bisect_right(self._swaps, sequence.first_chunk, key=lambda swap: swap[0]) - 1
        spans: list[tuple[int, int, int]] = []
        for (since, step), (until, _) in itertools.pairwise([*self._swaps[first:], (self._chunks, 0)]):
            start = max(0, (since - sequence.first_chunk) * chunk)
            end = min(tokens, (until - sequence.first_chunk) * chunk)
            if start < end:
                spans.append((step, start, end))
        return Completion(
            incarnation=1,
            group_id=sequence.request.group.group_id,
            index=sequence.index,
            token_ids=_tokens(tokens),
            logprobs=_logprobs(tokens),
            versions=tuple(spans),
            forced=(),
            finish_reason="stop",
        )


@functools.cache
def _tokens(count: int) -> np.ndarray:
    """[count]; of no memory, however many."""
    return np.broadcast_to(np.int32(0), count)


@functools.cache
def _logprobs(count: int) -> np.ndarray:
    return np.broadcast_to(np.float32(0), count)

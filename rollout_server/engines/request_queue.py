"""Requests of an engine: sequences that wait, sequences in slots, and their callers.

    submit       a request that cannot be served, needs other weights or exceeds the capacity is refused as a whole;
                 an older request for one of its completions ends (AskedAgain), and leaves its places to this one
    admit        waiting sequences take free slots, first come, first served
    finish       a sequence's completion goes to the caller of its request
    cancel       what is left of a request loses its slots and places
    set_version  requests of another incarnation end (WrongVersion)
    close        all of them end

An engine's sampling loop polls `running`: a sequence no longer in it has lost its slot. `changed` tells the loop that
there may be work. An engine that decodes on its own thread passes in the lock that it holds for atomic steps; methods
called from an event loop acquire it themselves.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from rollout_server.engines.engine import AskedAgain, EngineInfo, EngineStatus, QueueFull, WrongVersion, check_request
from rollout_server.engines.sequence import Counters, Sequence
from scalerl_jax.contract.codec import Completion, GroupRequest, Version

Name = tuple[int, str, int]  # (incarnation, group, index) of a completion


class Caller:
    """The caller that waits for the completions of one request, on an event loop."""

    def __init__(self, request: GroupRequest):
        self.names = [(request.incarnation, request.group_id, wanted.index) for wanted in request.completions]
        self._count, self._loop = len(request.completions), asyncio.get_running_loop()
        self._results: asyncio.Queue[Completion | Exception | None] = asyncio.Queue()  # None: the end

    async def completions(self) -> AsyncGenerator[Completion, None]:
        for _ in range(self._count):
            item = await self._results.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                return
            yield item

    def send(self, item: Completion | Exception | None) -> None:
        """Sends a completion, an error or the end (None) to the caller; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._results.put_nowait, item)


class Swap(NamedTuple):
    """A version that waits to replace the engine's."""

    version: Version
    weights: Any
    pause: "concurrent.futures.Future[float]"  # seconds that decoding was paused


class RequestQueue:
    def __init__(
        self,
        info: EngineInfo,
        changed: Callable[[], object],
        lock: contextlib.AbstractContextManager[Any] | None = None,
    ):
        """changed: called (with the lock held) when a sequence arrives, ends or loses its slot, or a swap is staged."""
        self.version = Version(0, 0)  # the version that will sample a new request
        self.counters = Counters()
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: dict[Sequence, None] = {}  # in slots, in the order in which they got them
        self.staged: Swap | None = None
        self.closed = False
        self.info, self._changed, self._lock = info, changed, lock or contextlib.nullcontext()
        self._callers: dict[Sequence, Caller] = {}  # of all unfinished sequences
        self._open: dict[Name, Caller] = {}  # by each completion requested, finished ones included
        self._failure: Exception | None = None

    # ------------------------------------------------------------------------------------------------ callers

    async def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        """See Engine.generate."""
        caller = self.submit(request)
        try:
            async for completion in caller.completions():
                yield completion
        finally:
            self.cancel(caller)

    def submit(self, request: GroupRequest) -> Caller:
        """Queues a request, which must be cancelled in the end.

        Raises as Engine.generate does, or RuntimeError if the engine has ended. Older requests for its completions end
        even if it is refused: a caller that retries has given them up.
        """
        caller, maximum_tokens = Caller(request), self.info.maximum_tokens
        with self._lock:
            self.end_older(request)
            self._check(request)
            self._open |= dict.fromkeys(caller.names, caller)
            for wanted in request.completions:
                sequence = Sequence(request, wanted, counters=self.counters, maximum_tokens=maximum_tokens)
                self._callers[sequence] = caller
                self.waiting.append(sequence)
            self._changed()
            return caller

    def end_older(self, request: GroupRequest) -> None:
        """Ends older requests for one of this request's completions: a caller that retries has given them up."""
        names = ((request.incarnation, request.group_id, wanted.index) for wanted in request.completions)
        with self._lock:
            if older := {self._open[name] for name in names if name in self._open}:
                self._end(older, AskedAgain(f"group {request.group_id!r} was asked for again"))

    def cancel(self, caller: Caller) -> None:
        """Frees the slots and queue places that the caller still holds."""
        with self._lock:
            for name in caller.names:
                if self._open.get(name) is caller:
                    del self._open[name]
            self._end({caller})

    def _check(self, request: GroupRequest) -> None:
        check_request(request, self.info)
        self.raise_if_over()
        held = self.version
        if request.incarnation != held.incarnation:
            raise WrongVersion(f"incarnation {held.incarnation} is held, {request.incarnation} is wanted")
        if held.step < request.minimum_step:
            raise WrongVersion(f"step {held.step} is held, {request.minimum_step} or later is wanted")
        if request.pinned_step is not None and held.step != request.pinned_step:
            raise WrongVersion(f"step {held.step} is held, exactly {request.pinned_step} is wanted")
        # A completion for which a slot is free passes through the queue, but does not wait in it.
        slots, places = self.info.slots, self.info.queue_capacity
        if len(self._callers) + len(request.completions) > places + slots:
            raise QueueFull(
                f"{len(self.waiting)} of {places} places in the queue and {len(self.running)} of {slots} "
                f"slots are taken, {len(request.completions)} completions are asked for"
            )

    def _end(self, callers: Iterable[Caller], why: Exception | None = None) -> None:
        """Removes the unfinished sequences of some callers from queue and slots; `why` is sent to these callers."""
        ending = set(callers)
        lost = [(sequence, caller) for sequence, caller in self._callers.items() if caller in ending]
        for sequence, _ in lost:
            del self._callers[sequence]
            self.running.pop(sequence, None)
        for caller in dict.fromkeys(caller for _, caller in lost):
            caller.send(why)
        self.waiting = collections.deque(sequence for sequence in self.waiting if sequence in self._callers)
        self._changed()

    # --------------------------------------------------------------------------------------------- the engine

    def admit(self, ready: Callable[[Sequence], bool] = lambda sequence: True) -> list[Sequence]:
        """Gives free slots to waiting sequences that are ready, in their order."""
        free = self.info.slots - len(self.running)
        entering = list(itertools.islice(filter(ready, self.waiting), free))
        for sequence in entering:
            self.waiting.remove(sequence)
            sequence.began = time.monotonic()
            self.running[sequence] = None
        return entering

    def put_back(self) -> None:
        """Moves running sequences without a token back to the front of the queue, in their order."""
        empty = [sequence for sequence in self.running if not sequence.length]
        for sequence in empty:
            del self.running[sequence]
        self.waiting.extendleft(reversed(empty))
        self._changed()

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, frees its slot and sends its completion; does nothing if it has lost its slot before."""
        if sequence in self.running:
            del self.running[sequence]
            self._callers.pop(sequence).send(sequence.completion())
            self._changed()

    def may_swap(self, version: Version) -> bool:
        """Whether this version may be swapped in now: requests pinned to the version held are finished first."""
        pinned = any(sequence.request.pinned_step is not None for sequence in self._callers)
        return version.incarnation != self.version.incarnation or not pinned

    def stage(self, version: Version, weights: Any) -> "asyncio.Future[float]":
        """Stages weights for the sampling loop to swap in as soon as allowed; returns the seconds of the pause."""
        with self._lock:
            self.raise_if_over()
            assert self.staged is None or self.staged.pause.cancelled(), "one version at a time"
            self.staged = Swap(version, weights, concurrent.futures.Future())
            self._changed()
            return asyncio.wrap_future(self.staged.pause)

    @property
    def swap_is_due(self) -> bool:
        return self.staged is not None and self.may_swap(self.staged.version)

    @contextlib.contextmanager
    def swap(self) -> Iterator[Any]:
        """Wraps a swap: yields the weights to use from here on, whose version is then held; None if no swap is due."""
        staged = self.staged if self.swap_is_due else None
        self.staged = None if staged else self.staged
        if staged is None or not staged.pause.set_running_or_notify_cancel():
            yield None
            return
        began = time.monotonic()
        # The version changes before the pause: a request that arrives during it is checked against the version that
        # will sample it.
        self.set_version(staged.version)
        yield staged.weights
        pause = time.monotonic() - began
        self.counters.pause_seconds += pause
        staged.pause.set_result(pause)

    def set_version(self, version: Version) -> None:
        self.version = version
        others = [c for sequence, c in self._callers.items() if sequence.request.incarnation != version.incarnation]
        self._end(others, WrongVersion(f"weights of incarnation {version.incarnation} have arrived"))

    def status(self) -> EngineStatus:
        """Raises RuntimeError after a failure."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            counters = dataclasses.asdict(self.counters)
            return EngineStatus(self.version, busy_slots=len(self.running), queued=len(self.waiting), **counters)

    def close(self, failure: RuntimeError | None = None) -> None:
        """Ends every request at once, and accepts no more. failure: raised to every caller, now and later."""
        self.closed, self._failure = True, self._failure or failure
        if self.staged is not None:
            self.staged.pause.cancel()
        self._end(list(self._callers.values()), failure)

    def raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.closed:
            raise RuntimeError("the engine is closed")


class QueuedEngine:
    """The methods that all engines implement by their queue alone; see engines/engine.py for each method."""

    def __init__(self, queue: RequestQueue):
        self._queue, self.info = queue, queue.info

    def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        return self._queue.generate(request)

    def end_older(self, request: GroupRequest) -> None:
        self._queue.end_older(request)

    def weight_buffer(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8)

    def status(self) -> EngineStatus:
        return self._queue.status()

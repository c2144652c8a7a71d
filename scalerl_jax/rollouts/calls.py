"""What one server is asked for: a call for each lease, how it goes and how it ends.

Each completion is handed to the hub as it comes; what did not come is handed back when the call ends, however it ends.
Lives on the fleet's event loop.
"""

import asyncio
import collections
import logging
import time
from collections.abc import Callable
from typing import Protocol

import grpc

from rollout_server.contract import codec
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.rpc import Stub
from scalerl_jax.config import FleetConfig
from scalerl_jax.rollouts.book import Book, Lease
from scalerl_jax.rollouts.hub import Hub
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.sampling import check_whole

_log = logging.getLogger(__name__)

BACKOFF_SECONDS = (0.1, 2.0)  # first and longest wait after a refusal; doubled in between


class Server(Protocol):
    """What a call needs of the connection that it belongs to."""

    address: str
    status: pb.StatusReply

    def lose(self, reason: str) -> None: ...

    def reject(self, reason: str) -> None: ...

    def hurry(self) -> None:
        """The next status is asked for now."""
        ...


class Calls:
    """The calls of one server. `validate` raises ValueError on a completion that breaks the contract."""

    def __init__(
        self,
        server: Server,
        *,
        stub: Stub,
        config: FleetConfig,
        requests: Requests,
        hub: Hub,
        validate: Callable[[codec.Completion, codec.GroupRequest], None],
        finished: Callable[[], None],
    ):
        """finished: called whenever a call has ended."""
        self._server, self._stub, self._config, self._requests, self._hub = server, stub, config, requests, hub
        self._validate, self._finished = validate, finished
        self._tasks: dict[Lease, asyncio.Task] = {}
        self._refusals = 0
        self._repeats = False  # it has sent a completion twice
        self.books: dict[Lease, Book] = {}
        self.free_at = 0.0  # not asked before this time
        self.finishes: collections.deque[float] = collections.deque(maxlen=4096)  # times of the last completions

    @property
    def in_flight(self) -> int:
        """Completions asked of the server and not yet delivered."""
        return sum(len(lease.left) for lease in self._tasks)

    @property
    def load(self) -> float:
        """Completions in flight per slot."""
        return self.in_flight / max(1, self._server.status.slots)

    def works_on(self, book: Book) -> bool:
        return any(self.books[lease] is book for lease in self._tasks)

    def only(self, book: Book) -> bool:
        """Whether all that is asked is of this book."""
        return all(asked is book for asked in self.books.values())

    def room(self, *, group_size: int, typical_seconds: float, now: float) -> tuple[int, bool]:
        """How many completions more to ask of it, and whether a group may be asked for in parts.

        All its slots, and beyond them enough waiting work that no slot stands empty for want of a request: one group,
        and as much more as it finishes in the time that a completion typically takes, at most a quarter of its slots.
        So a slow server does not sit on work that others could begin sooner.
        """
        slots, queue = self._server.status.slots, self._server.status.queue_capacity
        more = slots // 4
        if typical_seconds > 0 and self.finishes:
            more = min(more, sum(at > now - typical_seconds for at in self.finishes))
        ahead = min(queue, group_size + more)
        return slots + ahead - self.in_flight, queue < group_size

    def ask(self, book: Book, lease: Lease) -> None:
        """Asks for the lease's completions; each is handed to the hub as it comes, the rest when the call ends."""
        self.books[lease] = book
        self._tasks[lease] = task = asyncio.create_task(self._serve(lease))
        task.add_done_callback(self._ended)

    def end(self) -> None:
        """Every call ends now; what is left of each is handed back."""
        for task in list(self._tasks.values()):
            if task is not asyncio.current_task():
                task.cancel()
        # Handed back now and not when the tasks end: the fleet looks for somebody else at once.
        for lease in list(self._tasks):
            self._finish(lease, failed=True)
        self._refusals, self.free_at = 0, 0.0
        self.finishes.clear()

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._hub.fail(error)

    def _finish(self, lease: Lease, *, failed: bool) -> None:
        if self._tasks.pop(lease, None) is not None:
            self._hub.returned(self.books.pop(lease), lease, failed)
            self._finished()

    async def _serve(self, lease: Lease) -> None:
        request = self._requests.of_lease(lease)
        began = time.monotonic()
        call = self._stub.Generate(codec.request_to_proto(request), timeout=self._config.completion_seconds)
        failed, told = True, set[int]()
        try:
            async for message in call:
                completion = codec.completion_from_proto(message)
                self._validate(completion, request)
                if lease not in self._tasks:  # given up meanwhile
                    return
                self._refusals = 0
                if completion.index in told:
                    self._say_it_repeats(completion)
                    continue
                told.add(completion.index)
                if completion.finish_reason != "aborted":
                    self.finishes.append(time.monotonic())
                    self._hub.arrived(self.books[lease], lease, completion)
            check_whole(request, told)
        except ValueError as error:
            if lease in self._tasks:
                self._server.reject(f"server {self._server.address} breaks the contract: {error}")
        except grpc.aio.AioRpcError as error:
            if lease in self._tasks:
                failed = self._failed(lease, error, began)
        finally:
            call.cancel()
            self._finish(lease, failed=failed)

    def _say_it_repeats(self, completion: codec.Completion) -> None:
        if not self._repeats:
            name = f"completion {completion.group_id!r}/{completion.index}"
            _log.warning("server %s: %s came twice; what comes twice is dropped", self._server.address, name)
        self._repeats = True

    def _failed(self, lease: Lease, error: grpc.aio.AioRpcError, began: float) -> bool:
        """Acts on the error that ended a call. False: not the server's failure, it may be asked for the same again."""
        code = error.code()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            self._server.reject(f"server {self._server.address} cannot serve this run: {error.details()}")
            return True
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            _log.warning(
                "server %s: %d completions of %s not finished after %.0f s, asked for again elsewhere",
                *(self._server.address, len(lease.left), lease.group.group_id, self._config.completion_seconds),
            )
            if not self.finishes or self.finishes[-1] < began:
                self._server.lose(f"finished nothing for {time.monotonic() - began:.0f} s")
            return True
        self._refusals += 1
        self.free_at = time.monotonic() + backoff(self._refusals)
        asyncio.get_running_loop().call_later(backoff(self._refusals), self._hub.changed)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            # It holds another version than we thought; the status will tell.
            self._server.hurry()
            return False
        self._server.hurry()
        if code is not grpc.StatusCode.UNAVAILABLE:
            _log.warning("server %s: %s failed (%s)", self._server.address, lease.group.group_id, said(error))
        return True


def backoff(refusals: int) -> float:
    first, longest = BACKOFF_SECONDS
    return min(longest, first * 2 ** max(0, refusals - 1))


def said(error: grpc.aio.AioRpcError) -> str:
    """The code and the words that a call ended with."""
    return f"{error.code().name}: {error.details()}"

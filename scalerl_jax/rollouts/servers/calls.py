"""The calls of one server: one for each RolloutRequest, with its progress and its end.

Each completion is yielded when it arrives; the others return to their buffer when the call ends, however it ends.

    progress    a call has no time limit while its server makes progress: completions arrive, tokens are sampled
                (client.py checks that). One completion is bounded by

                    stall_seconds + (its budgets and the phrase) / slowest_tokens_per_second

                from when it has a slot, restarted by each other completion of its call; a later one counts as lost. A
                server is assumed to work on its oldest requested completions, as many as it has slots
    allowance   a server holds as much as it has earned (offences.py), whatever capacity it reports
    end         when all completions have arrived, whatever else the server would send

Lives on the fleet's event loop.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import grpc

from scalerl_jax.contract import codec, peer_text
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.rollouts.group_buffer import GroupBuffer, RolloutRequest
from scalerl_jax.rollouts.servers.context import ClientContext
from scalerl_jax.rollouts.servers.server_state import ServerState

_log = logging.getLogger(__name__)

# How gRPC's own message begins when it rejects an answer; the server sent something else.
NOT_TAKEN_IN = ("received metadata size exceeds", "CLIENT: ")


def free_capacity(
    *,
    slots: int,
    queue: int,
    in_flight: int,
    finishes: Sequence[float],
    typical_seconds: float,
    now: float,
    allowance: int | None,
    group_size: int,
) -> tuple[int, bool]:
    """Number of further completions to request from a server, and whether a group may be requested in parts.

    It may hold one completion for each slot, and enough queued ones that no slot is idle: one group, and as many more
    as it finishes in the time that a completion typically takes, at most a quarter of its slots. So a slow server does
    not queue work that others could begin sooner. It never gets more than it has earned.

    queue: completions that may wait there. in_flight: requested and not delivered. finishes: when the last ones
    finished, rising. typical_seconds: of a completion; 0 if not known. allowance: completions that it may hold at once,
    see offences.py; None: as many as it reports.
    """
    more = slots // 4
    if typical_seconds > 0 and finishes:
        # Called for each completion that arrives: only as many times are read as can matter.
        lately: Iterable[float] = itertools.islice(reversed(finishes), more)
        more = sum(1 for _ in itertools.takewhile(lambda at: at > now - typical_seconds, lately))
    claimed = slots + min(queue, group_size + more)
    earned = claimed if allowance is None else allowance
    return min(claimed, earned) - in_flight, min(queue, earned) < group_size


@dataclasses.dataclass(eq=False)
class _Call:
    patience: float  # seconds for one completion
    waits_since: float | None = None  # since when for its next completion; None: none of them has a slot yet
    task: asyncio.Task | None = None  # that reads the call; None: not begun


class RepeatsError(ValueError):
    """A server sends the same completions again and again."""


class Calls:
    """The calls of one server."""

    def __init__(self, server: ServerState, stub: Stub, context: ClientContext, *, finished: Callable[[], None]):
        """finished: called whenever a call has ended."""
        self._server, self._stub, self._context, self._finished = server, stub, context, finished
        self._calls: dict[RolloutRequest, _Call] = {}  # the oldest first
        self._closed = False
        self._repeats = False  # it has sent a completion twice
        self.scores = 0  # sequences that it is scoring now
        self.finishes: collections.deque[float] = collections.deque(maxlen=4096)  # times of the last completions

    @property
    def in_flight(self) -> int:
        """Completions requested from the server and not yet delivered."""
        return sum(len(rollout.left) for rollout in self._calls)

    @property
    def load(self) -> float:
        """Completions in flight per slot."""
        return self.in_flight / max(1, self._server.status.slots)

    def works_on(self, buffer: GroupBuffer) -> bool:
        return any(rollout.buffer is buffer for rollout in self._calls)

    def only(self, buffer: GroupBuffer) -> bool:
        """Whether all requests in flight are from this buffer."""
        return all(rollout.buffer is buffer for rollout in self._calls)

    def capacity(self, *, group_size: int, typical_seconds: float, now: float) -> tuple[int, bool]:
        """Number of further completions to request, and whether a group may be requested in parts: `free_capacity`."""
        if self._closed:
            return 0, False
        server = self._server
        return free_capacity(
            slots=server.status.slots,
            queue=server.status.queue_capacity,
            in_flight=self.in_flight,
            finishes=self.finishes,
            typical_seconds=typical_seconds,
            now=now,
            allowance=server.record.allowance(group_size),
            group_size=group_size,
        )

    def generate(self, rollout: RolloutRequest) -> AsyncGenerator[codec.Completion]:
        """Requests the completions; yields each as it arrives, until all have arrived or the server stops delivering.

        They count as in flight from now on. What the server does wrong is recorded as an offence.
        """
        config = self._context.config
        patience = self._context.requests.turn_tokens / config.slowest_tokens_per_second + config.stall_seconds
        self._calls[rollout] = _Call(patience)
        return self._completions(rollout)

    async def score(self, request: codec.ScoreRequest, *, seconds: float) -> codec.Scores | None:
        """Scores by the policy that it holds; None if they do not arrive. Rejects a server that breaks the contract."""
        self.scores += 1
        try:
            reply = await self._stub.Score(codec.score_request_to_proto(request), timeout=seconds)
            if reply is None:
                raise ValueError("scores that cannot be decoded")
            return codec.scores_from_proto(reply, request, vocabulary=self._context.servers.vocabulary)
        except ValueError as error:
            self._server.reject(f"server {self._server.address} breaks the contract: {error}")
        except grpc.aio.AioRpcError as error:
            _log.debug("server %s does not score: %s", self._server.address, describe(error))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            # The channel was closed: the server is gone.
        finally:
            self.scores -= 1
        return None

    def excuse(self, seconds: float, *, now: float) -> None:
        """Extends the deadlines by `seconds`: the trainer itself was stalled."""
        for call in self._calls.values():
            if call.waits_since is not None:
                call.waits_since = min(now, call.waits_since + seconds)

    def expire(self, now: float) -> None:
        """Ends the calls that wait too long for their next completion. To be called about once a heartbeat."""
        ahead = 0
        for rollout, call in list(self._calls.items()):
            ahead += len(rollout.left)
            if ahead > self._server.status.slots and ahead > len(rollout.left):
                break  # it and those behind it may still be waiting for a slot
            if call.waits_since is None:
                call.waits_since = now
            if now - call.waits_since > call.patience and rollout in self._calls:
                self._give_up(rollout)
                detail = f"{len(rollout.left)} of {rollout.group.group_id}, none in {now - call.waits_since:.0f} s"
                self._server.offend("does not finish completions that it was asked for", detail)

    def end(self) -> None:
        """Ends every call; its missing completions return to their buffer."""
        for rollout in list(self._calls):
            self._give_up(rollout)
        self.finishes.clear()

    def close(self) -> None:
        """As `end`, and nothing more is requested: the connection is about to be closed."""
        self._closed = True
        self.end()

    def _give_up(self, rollout: RolloutRequest) -> None:
        task = self._calls[rollout].task
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._finish(rollout)  # now and not when the task ends, so that the fleet asks another server at once

    def _finish(self, rollout: RolloutRequest) -> None:
        if self._calls.pop(rollout, None) is not None:
            rollout.buffer.returned(rollout)
            self._context.events.changed()
            self._finished()

    async def read(self, request: codec.GroupRequest, *, seconds: float | None) -> AsyncGenerator[codec.Completion]:
        """Yields the completions of one call as they arrive, each once; unfinished ones have finish_reason "aborted".
        Ends when all have arrived, whatever else the server would send.

        seconds: the call's deadline; None: it has none. Raises grpc.aio.AioRpcError as the call does, and ValueError
        if an answer breaks the contract.
        """
        call = self._stub.Generate(codec.request_to_proto(request), timeout=seconds)
        seen, repeated = set[int](), 0
        try:
            async for message in call:
                completion = self._context.received(message, request)
                if completion.index in seen:
                    repeated += 1
                    self._say_it_repeats(completion)
                    if repeated > len(request.completions):
                        raise RepeatsError(f"{_name(completion)} came again and again")
                    continue
                seen.add(completion.index)
                yield completion
                if len(seen) == len(request.completions):
                    return
        finally:
            call.cancel()
        missing = len(request.completions) - len(seen)
        raise ValueError(f"its answer to {request.group_id!r} ended without {missing} of the completions asked for")

    async def _completions(self, rollout: RolloutRequest) -> AsyncGenerator[codec.Completion]:
        if rollout not in self._calls:  # given up before it began
            return
        call = self._calls[rollout]
        call.task = asyncio.current_task()
        request, aborted = self._context.requests.of(rollout, incarnation=self._context.incarnation.value), 0
        try:
            # Without a deadline: see the module.
            async with contextlib.aclosing(self.read(request, seconds=None)) as completions:
                async for completion in completions:
                    if rollout not in self._calls:  # given up meanwhile
                        return
                    if completion.finish_reason == "aborted":
                        aborted += 1
                        continue
                    now = time.monotonic()
                    call.waits_since = call.waits_since and now
                    self.finishes.append(now)
                    self._server.record.deliver()
                    yield completion
            if aborted:
                self._server.offend("returns unfinished completions", rollout.group.group_id, times=aborted)
        except RepeatsError:
            if rollout in self._calls:
                self._server.offend("sends the same completions again and again", rollout.group.group_id)
        except ValueError as error:
            if rollout in self._calls:
                self._server.reject(f"server {self._server.address} breaks the contract: {error}")
        except grpc.aio.AioRpcError as error:
            if rollout in self._calls:
                rollout.failed = self._failed(rollout, error)
        finally:
            self._finish(rollout)

    def _say_it_repeats(self, completion: codec.Completion) -> None:
        if not self._repeats:
            name = peer_text.printable(_name(completion))
            _log.warning("server %s: %s came twice; what comes twice is dropped", self._server.address, name)
        self._repeats = True

    def _failed(self, rollout: RolloutRequest, error: grpc.aio.AioRpcError) -> bool:
        """Acts on the error that ended a call. False: not the server's failure, the same may be requested again."""
        server, code = self._server, error.code()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            server.reject(f"server {server.address} cannot serve this run: {describe(error)}")
            return True
        if (error.details() or "").startswith(NOT_TAKEN_IN):
            server.offend("answers with more than a message may hold", describe(error))
            return True
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            server.refuse("rejects requests although it reports free slots", describe(error))
            return False
        server.hurry()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            # It holds another version than we thought; the next status shows which.
            server.refuse("does not sample with the version that it says it holds", describe(error))
            return False
        # If it is gone, the next status shows that.
        tell = code is not grpc.StatusCode.UNAVAILABLE
        server.refuse("fails at what it is asked for", f"{rollout.group.group_id}: {describe(error)}", tell=tell)
        return True


def _name(completion: codec.Completion) -> str:
    return f"completion {completion.group_id!r}/{completion.index}"


def describe(error: grpc.aio.AioRpcError) -> str:
    """The code and the message that a call ended with."""
    return peer_text.printable(f"{error.code().name}: {error.details()}")

"""While a server answers: brings it to the version that it should hold, and lets a candidate sample with it.

Lives on the fleet's event loop, in one task for each time that the server is met. A server that has groups may sample
for the probe again; that is a separate task, so that no version waits for it.
"""

import asyncio
import collections
import dataclasses
import itertools
import logging
import operator
import time
from collections.abc import Sequence

import grpc

from scalerl_jax.contract import codec, peer_text
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.loop_thread import watched
from scalerl_jax.rollouts.servers.calls import Calls, describe
from scalerl_jax.rollouts.servers.context import ClientContext
from scalerl_jax.rollouts.servers.server_state import ACTIVE, CANDIDATE, PROBING, UPDATING, Sample, ServerState
from scalerl_jax.rollouts.weights.push import FullSyncNeeded, PushRefused

_log = logging.getLogger(__name__)

TAKES_NOT, SAMPLES_NOT = "weight update failed", "parity probe failed"
BREATH_SECONDS = 0.1  # between two attempts, at least
_REMEMBERED = 64  # versions that a server reported as applied

RowRequest = tuple[Row, codec.GroupRequest]


class Upkeep:
    """Upkeep of one server; `calls` are its calls for training groups and evaluations."""

    def __init__(self, server: ServerState, stub: Stub, context: ClientContext, calls: Calls):
        self._server, self._stub, self._context, self._calls = server, stub, context, calls
        self._task: asyncio.Task | None = None
        self._probing: asyncio.Task | None = None  # of a server that has groups
        self._needs_full_sync = False  # the server's host copy is not the version it reports
        # (time, version) of the last versions that it reported as applied.
        self._applied: collections.deque[tuple[float, int]] = collections.deque(maxlen=_REMEMBERED)

    def begin(self) -> None:
        """Starts; the server has been met."""
        self._applied.clear()
        self._task = watched(self._keep_up(), self._context.events.fail)

    def end(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None
        if self._probing is not None:
            self._probing.cancel()
        self._probing = None

    @property
    def applied_at(self) -> float:
        """When it last applied a version."""
        return self._applied[-1][0] if self._applied else -1.0

    def applied_by(self, now: float) -> int | None:
        """The newest version that it reported as applied before `now`."""
        return max((step for at, step in self._applied if at < now), default=None)

    def probe(self, step: int) -> None:
        """Lets the server, which has groups and holds version `step`, sample for the probe with it or a later one."""
        if self._probing is None or self._probing.done():
            self._probing = watched(self._probe_again(step), self._context.events.fail)

    async def _probe_again(self, step: int) -> None:
        server, capacity = self._server, server_capacity(self._server.status)
        try:
            got = await self._ask(step, pinned=False, capacity=capacity, may_be_full=True)
        except grpc.aio.AioRpcError:
            # It is full, most likely by us: a short queue is kept full. The probe is sent in parts that fit into it;
            # meanwhile the slots continue with what they have.
            capacity = max(1, server.status.queue_capacity)
            server.pause(True)
            try:
                while self._calls.in_flight + capacity > server_capacity(server.status):
                    await asyncio.sleep(BREATH_SECONDS)
                got = await self._ask(step, pinned=False, capacity=capacity)
            finally:
                server.pause(False)
                self._context.events.changed()
        if got is not None and server.state == ACTIVE:
            server.set_samples(got, step)
            self._context.events.event("probed", {"server": server.address})

    async def _keep_up(self) -> None:
        server = self._server
        while self._task is asyncio.current_task() and not server.unlisted:  # until it is given up or rejected
            server.version_changed.clear()
            target = server.target
            if target is not None and server.step != target:
                if server.state in (PROBING, CANDIDATE):
                    server.set_samples((), None)
                    server.enter(UPDATING, "")
                good = await self._push(target)
            elif target is not None and server.state in (UPDATING, PROBING):
                good = await self._sample(target)
            else:
                await server.version_changed.wait()
                good = True
            if not good or server.free_at > time.monotonic():
                await asyncio.sleep(max(BREATH_SECONDS, server.free_at - time.monotonic()))

    async def _push(self, step: int) -> bool:
        server = self._server
        base = None if self._needs_full_sync else server.step
        self._needs_full_sync = False
        try:
            timeout = self._context.config.push_seconds
            report = await self._context.publisher.push(self._stub, step, server.process, base=base, timeout=timeout)
        except PushRefused as error:
            if base is not None and isinstance(error, FullSyncNeeded):
                _log.info("server %s: version %d goes out whole (%s)", server.address, step, peer_text.printable(error))
                self._needs_full_sync = True
                return True  # at once
            why = f"is refused: {error}"
        except TimeoutError:
            why = "did not arrive in time"
        except grpc.aio.AioRpcError as error:
            why = f"did not arrive: {describe(error)}"
        else:
            server.record.forgive(TAKES_NOT)
            self._applied.append((time.monotonic(), report.step))
            self._context.events.event("push", {"server": server.address, **dataclasses.asdict(report)})
            server.set_version(report.step)
            return True
        server.refuse(TAKES_NOT, f"version {step} {why}", tell=True)
        server.hurry()
        return False

    async def _sample(self, step: int) -> bool:
        """Lets the candidate sample a little with version `step`, for the trainer to compare."""
        server = self._server
        if server.state != PROBING:
            server.enter(PROBING, "")
        got = await self._ask(step, pinned=True, capacity=server_capacity(server.status))
        if got is None:
            return False
        server.set_samples(got, step)
        server.enter(CANDIDATE, "")
        return True

    async def _ask(
        self, step: int, *, pinned: bool, capacity: int, may_be_full: bool = False
    ) -> tuple[Sample, ...] | None:
        """Its samples for the probe, with version `step`, or a later one if not pinned; None if that fails.

        capacity: completions requested at once. Raises AioRpcError if it has no capacity now and may_be_full.
        """
        server, context = self._server, self._context
        requests = context.probe_requests(server.address, step, pinned=pinned)
        tokens = max(request.most_tokens(wanted) for _, request in requests for wanted in request.completions)
        # The time limit of any completion, see calls.py; and some of them wait for a slot.
        rounds = -(-sum(len(request.completions) for _, request in requests) // server.status.slots)
        seconds = context.config.stall_seconds + rounds * tokens / context.config.slowest_tokens_per_second
        try:
            got = await self._samples(requests, capacity=capacity, seconds=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                server.reject(f"server {server.address} cannot serve this run: {describe(error)}")
            elif may_be_full and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            else:
                server.refuse(SAMPLES_NOT, describe(error), tell=True)
            return None
        except ValueError as error:
            server.reject(f"server {server.address} breaks the contract: {error}")
            return None
        if any(completion.finish_reason == "aborted" for _, completion in got):
            server.refuse(SAMPLES_NOT, "it returns unfinished completions, as a server does that shuts down", tell=True)
            return None
        server.record.forgive(SAMPLES_NOT)
        return tuple(got)

    async def _samples(self, requests: Sequence[RowRequest], *, capacity: int, seconds: float) -> list[Sample]:
        """The completions of each request, in waves of at most `capacity`. Raises as Calls.read."""
        samples: list[Sample] = []

        async def ask(row: Row, request: codec.GroupRequest) -> list[Sample]:
            return [(row, completion) async for completion in self._calls.read(request, seconds=seconds)]

        for wave in _waves(requests, max(1, capacity)):
            asked = [asyncio.ensure_future(ask(*pair)) for pair in wave]
            try:
                for part in await asyncio.gather(*asked):
                    samples += part
            finally:
                # If one fails, the others must not keep running.
                for call in asked:
                    call.cancel()
        return samples


def _waves(requests: Sequence[RowRequest], capacity: int) -> list[list[RowRequest]]:
    """The same completions in waves of at most `capacity`; in a wave those of one row are one request."""
    wanted = [(number, one) for number, (_, request) in enumerate(requests) for one in request.completions]
    waves = []
    for start in range(0, len(wanted), capacity):
        wave: list[RowRequest] = []
        for number, part in itertools.groupby(wanted[start : start + capacity], key=operator.itemgetter(0)):
            row, request = requests[number]
            wave.append((row, dataclasses.replace(request, completions=tuple(one for _, one in part))))
        waves.append(wave)
    return waves


def server_capacity(status: pb.StatusReply) -> int:
    """Completions that it accepts at once if it has none."""
    return status.slots + status.queue_capacity

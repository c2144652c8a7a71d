"""While a server answers: it is brought to the version that it should hold, and a candidate samples with it.

Lives on the fleet's event loop, in one task for each time that the server is met. A server that has groups may sample
for the probe again; that is a task of its own, so that no version waits for it.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from scalerl_jax.config import FleetConfig
from scalerl_jax.contract import codec, peer_text
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers.calls import said
from scalerl_jax.rollouts.servers.events import ServerEvents
from scalerl_jax.rollouts.servers.offences import Record
from scalerl_jax.rollouts.servers.probe_samples import Sample, sample
from scalerl_jax.rollouts.servers.states import ACTIVE, CANDIDATE, PROBING, UPDATING
from scalerl_jax.rollouts.weights.publisher import FullSyncNeeded, Publisher, PushRefused

_log = logging.getLogger(__name__)

TAKES_NOT, SAMPLES_NOT = "does not take weights", "does not sample for the probe"
BREATH_SECONDS = 0.1  # between two attempts, at least


class Full(Exception):
    """It has no room for the probe now."""


class Server(Protocol):
    """What it needs of the connection that it belongs to."""

    address: str
    status: pb.StatusReply
    state: str
    step: int | None
    leaving: bool
    record: Record
    samples: tuple[Sample, ...]
    samples_step: int | None

    @property
    def free_at(self) -> float: ...

    @property
    def in_flight(self) -> int: ...

    def refuse(self, kind: str, detail: str = "", *, tell: bool = False) -> None: ...

    def enter(self, state: str, reason: str) -> None: ...

    def reject(self, reason: str) -> None: ...

    def hurry(self) -> None: ...

    def holds(self, step: int | None) -> None: ...


class Upkeep:
    """Of one server. `target` gives the version it should hold now."""

    def __init__(
        self,
        server: Server,
        *,
        stub: Stub,
        config: FleetConfig,
        requests: Requests,
        publisher: Publisher,
        events: ServerEvents,
        target: Callable[[], int | None],
        validate: Callable[[codec.Completion, codec.GroupRequest], None],
    ):
        self._server, self._stub, self._config, self._requests = server, stub, config, requests
        self._publisher, self._events, self._target, self._validate = publisher, events, target, validate
        self._wake = asyncio.Event()  # target or version changed
        self._task: asyncio.Task | None = None
        self._probing: asyncio.Task | None = None  # of a server that has groups
        self._needs_full_sync = False  # the server's host copy is not what it says it decodes with
        self.applied_at = -1.0  # when it took a version last

    def begin(self) -> None:
        """The server has been met."""
        self._task = asyncio.create_task(self._keep_up())
        self._task.add_done_callback(self._ended)

    def end(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None
        if self._probing is not None:
            self._probing.cancel()
        self._probing = None

    def probe(self, step: int) -> None:
        """The server, which has groups and holds version `step`, samples for the probe with it or a later one."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe_again(step))
            self._probing.add_done_callback(self._ended)

    async def _probe_again(self, step: int) -> None:
        server, room = self._server, server_room(self._server.status)
        try:
            got = await self._ask(step, pinned=False, room=room, may_be_full=True)
        except Full:
            # By us, most likely: a short queue is kept full. The probe comes in as parts that fit into it; meanwhile
            # the slots go on with what they have.
            room = max(1, server.status.queue_capacity)
            self._events.making_room.add(server.address)
            try:
                while server.in_flight + room > server_room(server.status):
                    await asyncio.sleep(BREATH_SECONDS)
                got = await self._ask(step, pinned=False, room=room)
            finally:
                self._events.making_room.discard(server.address)
                self._events.changed()
        if got is not None and server.state == ACTIVE:
            server.samples, server.samples_step = got, step
            self._events.event("probed", {"server": server.address})

    def wake(self) -> None:
        """The version held, or the one that should be, may have changed."""
        self._wake.set()

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.fail(error)

    async def _keep_up(self) -> None:
        server = self._server
        while self._task is asyncio.current_task() and not server.leaving:  # until it is given up or rejected
            self._wake.clear()
            target = self._target()
            if target is not None and server.step != target:
                if server.state in (PROBING, CANDIDATE):
                    server.samples, server.samples_step = (), None
                    server.enter(UPDATING, "")
                good = await self._push(target)
            elif target is not None and server.state in (UPDATING, PROBING):
                good = await self._sample(target)
            else:
                await self._wake.wait()
                good = True
            if not good:
                await asyncio.sleep(max(BREATH_SECONDS, server.free_at - time.monotonic()))

    async def _push(self, step: int) -> bool:
        server = self._server
        base = None if self._needs_full_sync else server.step
        self._needs_full_sync = False
        try:
            report = await self._publisher.push(
                self._stub,
                step,
                base=base,
                timeout=self._config.push_seconds,
                address=server.address,
                server_id=server.status.server_id,
            )
        except PushRefused as error:
            if base is not None and isinstance(error, FullSyncNeeded):
                _log.info("server %s: version %d goes out whole (%s)", server.address, step, peer_text.said(error))
                self._needs_full_sync = True
                return True  # at once
            server.refuse(TAKES_NOT, f"version {step} is refused: {error}", tell=True)
            server.hurry()
            return False
        except TimeoutError:
            server.refuse(TAKES_NOT, f"version {step} did not arrive in time", tell=True)
            server.hurry()
            return False
        except grpc.aio.AioRpcError as error:
            server.refuse(TAKES_NOT, f"version {step} did not arrive: {said(error)}", tell=True)
            server.hurry()
            return False
        server.record.take(TAKES_NOT)
        self.applied_at = time.monotonic()
        self._events.event("push", {"server": server.address, **dataclasses.asdict(report)})
        server.holds(report.step)
        return True

    async def _sample(self, step: int) -> bool:
        """Lets the candidate sample a little with version `step`, for the trainer to compare."""
        server = self._server
        if server.state != PROBING:
            server.enter(PROBING, "")
        got = await self._ask(step, pinned=True, room=server_room(server.status))
        if got is None:
            return False
        server.samples, server.samples_step = got, step
        server.enter(CANDIDATE, "")
        return True

    async def _ask(self, step: int, *, pinned: bool, room: int, may_be_full: bool = False) -> tuple[Sample, ...] | None:
        """What it samples for the probe, with version `step`, or a later one if not pinned; None: it does not.

        room: completions asked for at once. Raises Full where it has no room now and may_be_full.
        """
        server = self._server
        requests: list[tuple[Any, codec.GroupRequest]] = [
            (prompt, self._requests.probe(server.address, prompt, samples=samples, version=step, pinned=pinned))
            for prompt, samples in self._events.probe_prompts
        ]
        tokens = max(self._requests.most_tokens(request) for _, request in requests)
        # As for any completion, see calls.py; and some of them wait for a slot.
        rounds = -(-sum(len(request.completions) for _, request in requests) // server.status.slots)
        seconds = self._config.stall_seconds + rounds * tokens / self._config.slowest_tokens_per_second
        try:
            got = await sample(self._stub, requests, room=room, seconds=seconds, validate=self._validate)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                server.reject(f"server {server.address} cannot serve this run: {said(error)}")
            elif may_be_full and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Full from None
            else:
                server.refuse(SAMPLES_NOT, said(error), tell=True)
            return None
        except ValueError as error:
            server.reject(f"server {server.address} breaks the contract: {error}")
            return None
        if any(completion.finish_reason == "aborted" for _, completion in got):
            server.refuse(SAMPLES_NOT, "it hands completions back unfinished, as one that is shutting down", tell=True)
            return None
        server.record.take(SAMPLES_NOT)
        return tuple(got)


def server_room(status: pb.StatusReply) -> int:
    """Completions that it takes at once, where it has none."""
    return status.slots + status.queue_capacity

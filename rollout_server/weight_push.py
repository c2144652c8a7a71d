"""PushWeights: receives versions over gRPC and hands them to the engine.

    header -> WeightStore.check -> wait while another version is applied -> chunks -> commit
           -> WeightStore.finish on another thread, while decoding continues -> engine.load
           a version in parts: one push each, at the same time; the push that completes it applies it for all

Every stage has a time limit, so that no client holds up the others: STALL_SECONDS for the header and every later
message; for a whole version RECEIVE_SECONDS plus its bytes / SLOWEST_BYTES; APPLY_SECONDS for a received version to be
applied, after which requests that would delay it further are refused.

Everything but `finish` runs on one event loop, so the state below needs no locks; what matters is that nothing is
awaited between a check and the act that relies on it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import grpc

from rollout_server.activity import Activity
from rollout_server.engines.engine import Engine
from rollout_server.guard import QuietLog
from rollout_server.weight_store import BaseNotHeld, Staging, WeightStore
from scalerl_jax.contract import codec, peer_text
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk

# How long a finished push still reads, and drops, messages of its client.
DRAIN_SECONDS = 10.0

# A push whose client sends nothing for so long is refused.
STALL_SECONDS = 30.0

# Time limit to receive a version: RECEIVE_SECONDS plus its bytes / SLOWEST_BYTES, a speed too slow to be useful.
RECEIVE_SECONDS = 600.0
SLOWEST_BYTES = 2**20  # a second

# A version is late if it is not applied so long after it was received: see WeightReceiver.late.
APPLY_SECONDS = 600.0

log = logging.getLogger(__name__)


class WeightReceiver:
    """Receives one server's weights: owns the host copy, and decides which push may write to it."""

    def __init__(self, engine: Engine, *, server_id: str = "", activity: Activity | None = None):
        """server_id: this server's id, which the `applied` reply carries."""
        self._activity, self._server_id = activity or Activity(), server_id
        self._quiet = QuietLog(log)
        self.store = WeightStore(engine.info, engine.weight_buffer)
        self.versions_applied = 0
        self._engine = engine
        self._receiving: _IncomingVersion | None = None  # the version whose pushes may write to the store
        self._newest_step = 0  # step of the version accepted last
        self._applying: asyncio.Task[tuple[float, float]] | None = None
        self._applying_since = 0.0

    @property
    def late(self) -> bool:
        """Whether a version has waited too long to be applied; requests pinned to the one held are then refused."""
        return self._applying is not None and time.monotonic() - self._applying_since > APPLY_SECONDS

    async def push(self, context: grpc.aio.ServicerContext) -> None:
        """Serves one call, from header to last reply."""
        with contextlib.closing(_IncomingPush(context)) as push:
            await self._push(push)

    async def _push(self, push: "_IncomingPush") -> None:
        try:
            reply = pb.WeightReply(applied=await self._receive(push))
        except BaseNotHeld as error:
            why = peer_text.details(error)
            self._quiet.log("full_sync", logging.WARNING, "a dense version is needed: %s", why)
            reply = pb.WeightReply(full_sync=why)
        except ValueError as error:
            why = peer_text.details(error)
            self._quiet.log("refused", logging.WARNING, "weights refused: %s", why)
            reply = pb.WeightReply(refused=why)
        finally:
            self._left(push)
        await push.write(reply)
        # A call that ends during a client's write loses the reply that explains it, so the client must end the stream.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while await push.next(DRAIN_SECONDS) is not grpc.aio.EOF:
                    pass

    async def _receive(self, push: "_IncomingPush") -> pb.WeightReply.Applied:
        """Receives and applies a version or part. Raises ValueError, with the weights unchanged, if it is refused."""
        message = await push.next_in_time()
        if message is grpc.aio.EOF or isinstance(message, Chunk) or message.WhichOneof("kind") != "header":
            raise ValueError("the first message is not a header")
        header = message.header
        target = codec.version_from_proto(header.target)

        # 1. Check the whole header. Of several versions offered, only the newest is received.
        self.store.check(header, self._engine.status().version)
        version = self._receiving
        if version is not None and version.lacks(header):
            self.store.check_parts([*version.headers, header])
            version.headers.append(header)
        else:
            if version is not None and target < version.target:
                raise ValueError(f"step {version.target.step}, which is newer, is being received")
            if version is not None:
                version.displace()
            version = self._receiving = _IncomingVersion(header)
            self._newest_step = target.step
        version.pushes[header.part] = push
        self._activity.welcome(target.incarnation, push.peer)

        def still_welcome() -> None:
            if self._receiving is not version:
                raise ValueError(version.ended or f"another push of step {self._newest_step} took its place")

        # 2. Wait: the engine uses the host copy until the previous version is applied.
        while self._applying is not None:
            left = self._applying_since + 2 * APPLY_SECONDS - time.monotonic()
            either: set[asyncio.Future[Any]] = {self._applying, push.displaced}
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            still_welcome()
            if self._applying is not None and time.monotonic() - self._applying_since >= 2 * APPLY_SECONDS:
                raise ValueError(f"the version before it is not applied after {2 * APPLY_SECONDS:g} s")
            self.store.check(header, self._engine.status().version)
        if self.store.holds(header):
            del version.pushes[header.part]  # nothing has to be received
            if not version.pushes and self._receiving is version:
                self._receiving = None
            return pb.WeightReply.Applied(version=header.target, server_id=self._server_id)
        self.store.check_base(header)

        # 3. Receive chunks in any order, until the commit and all chunks have arrived.
        staging = version.stagings[header.part] = self.store.stage(header)
        committed = False
        until = time.monotonic() + RECEIVE_SECONDS + header.payload_bytes / SLOWEST_BYTES
        while not (committed and staging.complete):
            message = await push.next_in_time()
            still_welcome()
            if time.monotonic() > until:
                raise ValueError(f"it came too slowly: {staging.waiting} of {staging.chunks} chunks are missing")
            if message is grpc.aio.EOF:
                raise ValueError(f"the stream ended with {staging.waiting} chunks missing, commit {committed}")
            if isinstance(message, Chunk):
                again = [] if staging.put(message) else [message.index]
            elif message.WhichOneof("kind") == "commit":
                committed, again = True, staging.ask()
            else:
                raise ValueError(f"a {message.WhichOneof('kind')} in the middle of a version")
            for index in again:
                await push.write(pb.WeightReply(resend=index))

        # 4. Apply it when all parts are complete. From then on a client's disconnect changes nothing: all tensors are
        # replaced, or none.
        version.parts_missing -= 1
        if not version.parts_missing:
            self._receiving = None
            self._applying_since = time.monotonic()
            self._applying = version.applying = asyncio.create_task(self._apply(list(version.stagings.values())))
            self._applying.add_done_callback(_seen)
            version.all_there.set_result(None)
        while version.applying is None:
            left = until - time.monotonic()
            await asyncio.wait({push.displaced, version.all_there}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if version.applying is None:
                still_welcome()
                if left <= 0:
                    missing = f"{version.parts_missing} of {version.parts} parts are missing"
                    raise ValueError(f"it came too slowly: {missing}")
        checking, pause = await asyncio.shield(version.applying)
        return pb.WeightReply.Applied(
            version=header.target,
            staging_seconds=staging.seconds,
            checking_seconds=checking,
            pause_seconds=pause,
            server_id=self._server_id,
        )

    def _left(self, push: "_IncomingPush") -> None:
        """Handles the end of a push: its version can no longer be completed, unless all parts have arrived."""
        version = self._receiving
        if version is None or push not in version.pushes.values():
            return
        self._receiving = None
        if version.parts > 1:
            part = next(part for part, one in version.pushes.items() if one is push)
            version.ended = f"part {part} of {version.parts} did not come"
        version.displace()

    async def _apply(self, parts: Sequence[Staging]) -> tuple[float, float]:
        """Applies a complete version. Returns seconds: to update and check the host copy; that decoding was paused."""
        staging = parts[0]
        try:
            began = time.monotonic()
            tensors, changes = await asyncio.to_thread(self.store.finish, *parts)
            checking = time.monotonic() - began
            pause = await self._engine.load(staging.target, tensors, changes)
            self.store.held = staging.target
        finally:
            self._applying = None
        self.versions_applied += 1
        self._activity.applied(staging.target.incarnation)
        self._quiet.log(
            "applied",
            logging.INFO,
            "step %d of trainer %d is applied: %s, %d bytes in %.2f s; checked in %.2f s, decoding stood still %.3f s",
            *(staging.target.step, staging.target.incarnation),
            "a delta" if staging.is_delta else "dense",
            sum(part.header.payload_bytes for part in parts),
            max(part.seconds for part in parts),
            *(checking, pause),
        )
        return checking, pause


class _IncomingVersion:
    """A version that is being received: whole by one push, or in parts by one push each."""

    def __init__(self, header: pb.WeightHeader):
        self._header, self.headers = header, [header]
        self.target = codec.version_from_proto(header.target)
        self.parts = self.parts_missing = max(1, header.parts)
        self.pushes: dict[int, _IncomingPush] = {}  # by part
        self.stagings: dict[int, Staging] = {}  # likewise
        self.applying: asyncio.Task[tuple[float, float]] | None = None
        self.ended = ""  # why it can no longer be completed
        self.all_there: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # wakes its pushes

    def lacks(self, header: pb.WeightHeader) -> bool:
        """Whether this header belongs to a part of this version that no other push is sending."""
        ours = (self._header.target, self._header.HasField("base"), self._header.base, self.parts)
        same = ours == (header.target, header.HasField("base"), header.base, header.parts)
        return self.parts > 1 and same and header.part not in self.pushes

    def displace(self) -> None:
        """Ends the reception of this version: wakes its pushes."""
        for push in self.pushes.values():
            push.displace()


class _IncomingPush:
    """One call: the messages of its client, one after another, and whether another push has displaced it.

    A read is never cancelled, since gRPC would refuse the next one: the pending read is kept and awaited later.
    """

    def __init__(self, context: grpc.aio.ServicerContext):
        self._context, self.peer = context, context.peer()
        self._reading: asyncio.Future[Any] | None = None
        self.displaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write(self, reply: pb.WeightReply) -> None:
        await self._context.write(reply)

    def displace(self) -> None:
        """Marks this push as displaced, which wakes a wait for its next message."""
        if not self.displaced.done():
            self.displaced.set_result(None)

    async def next(self, seconds: float, *wakers: "asyncio.Future[None]") -> Any:
        """The next message or EOF; None if a waker finished first. Raises TimeoutError after `seconds`."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._context.read())
        await asyncio.wait({self._reading, *wakers}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._reading.done():
            done, self._reading = self._reading, None
            return done.result()
        if any(waker.done() for waker in wakers):
            return None
        raise TimeoutError

    async def next_in_time(self) -> Any:
        """The next message or EOF; None if the push was displaced. Raises ValueError if the client sends nothing."""
        try:
            return await self.next(STALL_SECONDS, self.displaced)
        except TimeoutError:
            raise ValueError(f"nothing came for {STALL_SECONDS:g} s") from None

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading.add_done_callback(_seen)


def _seen(task: asyncio.Future) -> None:
    """Marks an error as retrieved: a push that still waits for the task reports it."""
    if not task.cancelled():
        task.exception()

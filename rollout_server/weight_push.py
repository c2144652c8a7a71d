"""PushWeights: how versions come in over gRPC and reach the engine.

    header -> WeightStore.check -> wait while another version is applied -> chunks -> commit
           -> WeightStore.finish on a thread of its own, decoding goes on -> engine.load
    a version in parts: one push each, at the same time; the last to be there goes on for all of them

Every stage has its end, so that no client holds up the others: STALL_SECONDS for the header and for every message after
it; for a whole version RECEIVE_SECONDS and what it takes at SLOWEST_BYTES a second; APPLY_SECONDS until what is there
is applied, from when on no more requests are taken that would hold it up.

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
from rollout_server.staging import Staging
from rollout_server.weight_store import FullSyncNeeded, WeightStore
from scalerl_jax.contract import codec, peer_text
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk

# How long a push that is over goes on reading, and dropping, what its client still sends.
DRAIN_SECONDS = 10.0

# A client that has the word and says nothing for so long has lost it.
STALL_SECONDS = 30.0

# What one version may take to come: so long, and as long as its bytes take at a speed that is no use to anybody.
RECEIVE_SECONDS = 600.0
SLOWEST_BYTES = 2**20  # a second

# A version that is not applied so long after it was there: see WeightReceiver.late.
APPLY_SECONDS = 600.0

log = logging.getLogger(__name__)


class WeightReceiver:
    """Of one server: its host copy of the weights, and who may write to it."""

    def __init__(self, engine: Engine, *, server_id: str = "", activity: Activity | None = None):
        """server_id: this server's, which `applied` carries."""
        self._activity, self._server_id = activity or Activity(), server_id
        self._quiet = QuietLog(log)
        self.store = WeightStore(engine.info, engine.weight_buffer)
        self.versions_applied = 0
        self._engine = engine
        self._receiving: _Version | None = None  # whose pushes may write to the store
        self._newest_step = 0  # of those that were received
        self._applying: asyncio.Task[tuple[float, float]] | None = None
        self._applying_since = 0.0

    @property
    def late(self) -> bool:
        """Whether a version has waited too long to be applied: requests pinned to the one held are refused then."""
        return self._applying is not None and time.monotonic() - self._applying_since > APPLY_SECONDS

    async def push(self, context: grpc.aio.ServicerContext) -> None:
        """One call, from header to last reply."""
        with contextlib.closing(_Push(context)) as push:
            await self._push(push)

    async def _push(self, push: "_Push") -> None:
        try:
            reply = pb.WeightReply(applied=await self._receive(push))
        except FullSyncNeeded as error:
            why = peer_text.details(error)
            self._quiet.say("full_sync", logging.WARNING, "a dense version is needed: %s", why)
            reply = pb.WeightReply(full_sync=why)
        except ValueError as error:
            why = peer_text.details(error)
            self._quiet.say("refused", logging.WARNING, "weights refused: %s", why)
            reply = pb.WeightReply(refused=why)
        finally:
            self._left(push)
        await push.write(reply)
        # A call that ends under a client's write loses the reply that explains it, so the client ends it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while await push.next(DRAIN_SECONDS) is not grpc.aio.EOF:
                    pass

    async def _receive(self, push: "_Push") -> pb.WeightReply.Applied:
        """Raises ValueError where the version is refused; the weights are then as they were."""
        message = await push.next_in_time()
        if message is grpc.aio.EOF or isinstance(message, Chunk) or message.WhichOneof("kind") != "header":
            raise ValueError("the first message is not a header")
        header = message.header
        target = codec.version_from_proto(header.target)

        # 1. The whole header is checked, and the newest of those that want to send goes on.
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
            version = self._receiving = _Version(header)
            self._newest_step = target.step
        version.pushes[header.part] = push
        self._activity.welcome(target.incarnation, push.peer)

        def still_welcome() -> None:
            if self._receiving is not version:
                raise ValueError(version.ended or f"another push of step {self._newest_step} took its place")

        # 2. The host copy is the engine's until the version before this one is applied.
        while self._applying is not None:
            left = self._applying_since + 2 * APPLY_SECONDS - time.monotonic()
            either: set[asyncio.Future[Any]] = {self._applying, push.displaced}
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            still_welcome()
            if self._applying is not None and time.monotonic() - self._applying_since >= 2 * APPLY_SECONDS:
                raise ValueError(f"the version before it is not applied after {2 * APPLY_SECONDS:g} s")
            self.store.check(header, self._engine.status().version)
        if self.store.holds(header):
            del version.pushes[header.part]  # nothing is missing without it
            if not version.pushes and self._receiving is version:
                self._receiving = None
            return pb.WeightReply.Applied(version=header.target, server_id=self._server_id)
        self.store.check_base(header)

        # 3. Chunks, in any order, until commit and the last of them are there.
        staging, committed = self.store.stage(header), False
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

        # 4. The engine takes it when all parts are there. From then on the client's going away changes nothing: all
        # tensors or none.
        version.staged[header.part] = staging
        if version.complete:
            self._receiving = None
            self._applying_since = time.monotonic()
            self._applying = version.applying = asyncio.create_task(self._apply(list(version.staged.values())))
            self._applying.add_done_callback(_seen)
            version.news()
        while version.applying is None:
            left = until - time.monotonic()
            await asyncio.wait({push.displaced, version.all_there}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if version.applying is None:
                still_welcome()
                if left <= 0:
                    missing = version.parts - len(version.staged)
                    raise ValueError(f"it came too slowly: {missing} of {version.parts} parts are missing")
        checking, pause = await asyncio.shield(version.applying)
        return pb.WeightReply.Applied(
            version=header.target,
            staging_seconds=staging.seconds,
            checking_seconds=checking,
            pause_seconds=pause,
            server_id=self._server_id,
        )

    def _left(self, push: "_Push") -> None:
        """A push is over: without it its version does not become whole, unless all parts are there."""
        version = self._receiving
        if version is None or push not in version.pushes.values():
            return
        self._receiving = None
        if version.parts > 1:
            part = next(part for part, one in version.pushes.items() if one is push)
            version.ended = f"part {part} of {version.parts} did not come"
        version.displace()

    async def _apply(self, parts: Sequence[Staging]) -> tuple[float, float]:
        """Seconds: until the host copy was the version; that decoding stood still."""
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
        self._quiet.say(
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


class _Version:
    """One that is being received: whole, by one push, or in parts, by one push each."""

    def __init__(self, header: pb.WeightHeader):
        self._header, self.headers = header, [header]
        self.target, self.parts = codec.version_from_proto(header.target), max(1, header.parts)
        self.pushes: dict[int, _Push] = {}
        self.staged: dict[int, Staging] = {}  # those that are there
        self.applying: asyncio.Task[tuple[float, float]] | None = None
        self.ended = ""  # why it never becomes whole
        self.all_there: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lacks(self, header: pb.WeightHeader) -> bool:
        """Whether a push with this header brings a part of it that no other push brings yet."""
        ours = (self._header.target, self._header.HasField("base"), self._header.base, self.parts)
        same = ours == (header.target, header.HasField("base"), header.base, header.parts)
        return self.parts > 1 and same and header.part not in self.pushes

    @property
    def complete(self) -> bool:
        return len(self.staged) == self.parts

    def news(self) -> None:
        """It is complete: those that wait for the other parts are woken."""
        self.all_there.set_result(None)

    def displace(self) -> None:
        """It is not received any more: pushes that wait for a message are woken."""
        for push in self.pushes.values():
            push.displace()


class _Push:
    """One call: what its client sends, one message after another, and whether it still has the word.

    A read is never cancelled: gRPC would refuse the next one. It is left waiting, and gone on with.
    """

    def __init__(self, context: grpc.aio.ServicerContext):
        self._context, self.peer = context, context.peer()
        self._reading: asyncio.Future[Any] | None = None
        self.displaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write(self, reply: pb.WeightReply) -> None:
        await self._context.write(reply)

    def displace(self) -> None:
        """Another push takes its place: who waits for its next message is woken."""
        if not self.displaced.done():
            self.displaced.set_result(None)

    async def next(self, seconds: float, *wakers: "asyncio.Future[None]") -> Any:
        """The next message or EOF. Raises TimeoutError where there is none after so long; None where a waker woke."""
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
        """Raises ValueError where the client says nothing. None where another push has taken its place."""
        try:
            return await self.next(STALL_SECONDS, self.displaced)
        except TimeoutError:
            raise ValueError(f"nothing came for {STALL_SECONDS:g} s") from None

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading.add_done_callback(_seen)


def _seen(task: asyncio.Future) -> None:
    """Marks an error as retrieved: the push that waits for the task reports it, if it is still there."""
    if not task.cancelled():
        task.exception()

"""PushWeights: how versions come in over gRPC and reach the engine.

    header -> WeightStore.check -> wait while another version is applied -> chunks -> commit
           -> WeightStore.finish on a thread of its own, decoding goes on -> engine.load
    and, where the header says so, every chunk to other servers (pass_on.py)

Everything but `finish` runs on one event loop, so the state below needs no locks; what matters is that nothing is
awaited between a check and the act that relies on it.
"""

import asyncio
import contextlib
import logging
import time

import grpc

from rollout_server.contract import codec
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.chunks import Chunk
from rollout_server.contract.security import PLAIN, Credentials
from rollout_server.engines.engine import Engine
from rollout_server.pass_on import PassOn, Reply, lost
from rollout_server.staging import Staging
from rollout_server.weight_store import AnchorNeeded, WeightStore

# How long a push that is over goes on reading, and dropping, what its client still sends.
DRAIN_SECONDS = 10.0

log = logging.getLogger(__name__)


class WeightReceiver:
    """Of one server: its host copy of the weights, and who may write to it."""

    def __init__(self, engine: Engine, credentials: Credentials | None = PLAIN):
        """credentials: what servers that weights are passed on to are shown; None: nothing is passed on."""
        self._credentials = credentials
        self._passing: list[PassOn] = []  # what they send lies in the host copy
        self.store = WeightStore(engine.info, engine.weight_buffer)
        self.versions_applied = 0
        self._engine = engine
        self._receiving: object | None = None  # the ticket of the push that may write to the store
        self._receiving_version = codec.Version(0, 0)  # what it brings
        self._applying: asyncio.Task[tuple[float, float]] | None = None

    async def push(self, context: grpc.aio.ServicerContext) -> None:
        """One call, from header to last reply."""
        ticket = object()  # of this call: the one in self._receiving may go on
        passing: list[PassOn] = []
        writing = asyncio.Lock()

        async def write(reply: pb.WeightReply) -> None:
            async with writing:
                await context.write(reply)

        try:
            await self._push(ticket, context, write, passing)
        finally:
            for one in passing:
                one.task.cancel()

    async def _push(
        self, ticket: object, context: grpc.aio.ServicerContext, write: Reply, passing: list[PassOn]
    ) -> None:
        try:
            reply = pb.WeightReply(applied=await self._receive(ticket, context, write, passing))
        except AnchorNeeded as error:
            log.warning("a dense version is needed: %s", error)
            reply = pb.WeightReply(anchor=str(error))
        except ValueError as error:
            log.warning("weights refused: %s", error)
            reply = pb.WeightReply(refused=str(error))
        finally:
            if self._receiving is ticket:
                self._receiving = None
        await write(reply)
        if reply.WhichOneof("kind") == "applied" and passing:
            await asyncio.wait({one.task for one in passing})
            for one in passing:
                await one.give_up("the server that was to pass it on went on to another version")
        # A call that ends under a client's write loses the reply that explains it, so the client ends it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while await context.read() is not grpc.aio.EOF:
                    pass

    async def _receive(
        self, ticket: object, context: grpc.aio.ServicerContext, write: Reply, passing: list[PassOn]
    ) -> pb.WeightReply.Applied:
        """Raises ValueError where the version is refused; the weights are then as they were."""
        message = await context.read()
        if message is grpc.aio.EOF or isinstance(message, Chunk) or message.WhichOneof("kind") != "header":
            raise ValueError("the first message is not a header")
        header = message.header
        target = codec.version_from_proto(header.target)

        def still_welcome() -> None:
            if self._receiving is not ticket:
                raise ValueError(f"another push of step {self._receiving_version.step} took its place")

        # 1. The whole header is checked, and the newest of those that want to send goes on.
        self.store.check(header, self._engine.status().version)
        if self._receiving is not None and target < self._receiving_version:
            raise ValueError(f"step {self._receiving_version.step}, which is newer, is being received")
        self._receiving, self._receiving_version = ticket, target

        # 2. The host copy is the engine's until the version before this one is applied.
        while self._applying is not None:
            await asyncio.wait({self._applying})
            still_welcome()
        await self._stop_passing()
        still_welcome()
        self.store.check(header, self._engine.status().version)
        if self.store.holds(header):
            await self._tell_lost(header, write, "the version was here already")
            return pb.WeightReply.Applied(version=header.target)
        self.store.check_base(header)

        # 3. Chunks, in any order, until commit and the last of them are there.
        staging, committed = self.store.stage(header), False
        await self._pass_on(staging, context, write, passing)
        while not (committed and staging.complete):
            message = await context.read()
            still_welcome()
            if message is grpc.aio.EOF:
                raise ValueError(f"the stream ended with {staging.waiting} chunks missing, commit {committed}")
            if isinstance(message, Chunk):
                again = [] if staging.put(message) else [message.index]
            elif message.WhichOneof("kind") == "commit":
                committed, again = True, staging.ask()
            else:
                raise ValueError(f"a {message.WhichOneof('kind')} in the middle of a version")
            for index in again:
                await write(pb.WeightReply(resend=index))
            for one in passing:
                one.committed = committed
                one.news()

        # 4. The engine takes it. From here on the client's going away changes nothing: all tensors or none.
        self._receiving = None
        self._applying = asyncio.create_task(self._apply(staging))
        self._applying.add_done_callback(_seen)
        checking, pause = await asyncio.shield(self._applying)
        return pb.WeightReply.Applied(
            version=header.target, staging_seconds=staging.seconds, checking_seconds=checking, pause_seconds=pause
        )

    async def _pass_on(
        self, staging: Staging, context: grpc.aio.ServicerContext, write: Reply, passing: list[PassOn]
    ) -> None:
        if self._credentials is None:
            await self._tell_lost(staging.header, write, "this server cannot show itself to others")
            return
        timeout = context.time_remaining()
        passing += [
            PassOn(hop, staging, reply=write, timeout=timeout, credentials=self._credentials)
            for hop in staging.header.pass_on
        ]
        if not staging.is_patch:  # those have memory of their own
            self._passing = passing

    async def _stop_passing(self) -> None:
        """The host copy, from which a dense version is passed on, is about to be written to."""
        tasks = {one.task for one in self._passing}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._passing = []

    async def _tell_lost(self, header: pb.WeightHeader, write: Reply, why: str) -> None:
        for hop in header.pass_on:
            for reply in lost(hop, why):
                await write(reply)

    async def _apply(self, staging: Staging) -> tuple[float, float]:
        """Seconds: until the host copy was the version; that decoding stood still."""
        try:
            began = time.monotonic()
            tensors, changes = await asyncio.to_thread(self.store.finish, staging)
            checking = time.monotonic() - began
            pause = await self._engine.load(staging.target, tensors, changes)
            self.store.held = staging.target
        finally:
            self._applying = None
        self.versions_applied += 1
        return checking, pause


def _seen(task: asyncio.Task) -> None:
    """What a version turned out to be is told to whoever pushed it, if it is still there."""
    if not task.cancelled():
        task.exception()

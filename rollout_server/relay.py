"""A version on its way through this server to others: each chunk is sent on as soon as it is here and good.

    trainer ─chunks→ this server ─chunks→ those that the header names, and they to those behind them
            ←relayed─             ←relayed─

    meeting   is it one that may be dialled (reach.py)? does its Status tell the server_id that the header names? Only
              then is it sent the header; and `applied` counts from that server_id alone

What is sent comes from where this server stages the version, so passing on costs no memory. A server that cannot be
reached, is another one, or takes nothing for PATIENCE_SECONDS, is reported as lost together with those behind it:
whoever sends the version serves them in another way. Nothing is tried twice here.

A meeting with TLS that fails is told in the same words and after the same time whatever it was that failed: a header
may name any address, and who wrote it is not to learn what listens there. A header without server_id, of an older
trainer, is served all the same, under all other rules.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

import grpc

from rollout_server.quiet_log import QuietLog
from rollout_server.reach import LOOPBACK, Reach
from rollout_server.staging import Staging
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk
from scalerl_jax.contract.peer_text import said
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.security import connect
from scalerl_jax.contract.weight_stream import PushRefused, WeightStream, both

# A server that takes nothing for so long is given up, and so is one that does not answer at the meeting.
PATIENCE_SECONDS = 3.0

# Where more chunks wait here for a server than this, whoever sends the version is read at that server's pace: what has
# left the trainer is then never far from the last server, and the trainer sees whether something still moves. A server
# that takes nothing for HOLD_SECONDS holds up nobody: well under the patience of those that wait for this one.
MOST_BEHIND = 16
HOLD_SECONDS = 1.0

NOT_MET = "not reached, or not the server that it should be"

log = logging.getLogger(__name__)
quiet = QuietLog(log)

Reply = Callable[[pb.WeightReply], Awaitable[None]]


def behind(server: pb.Relay) -> Iterator[str]:
    """The addresses of a server and of all those behind it."""
    yield server.address
    for further in server.relays:
        yield from behind(further)


class Relay:
    """One version to one server.

    staging: its header names nobody to pass it on to; those behind the server are added. own_id: this server's.
    """

    def __init__(
        self,
        server: pb.Relay,
        staging: Staging,
        *,
        reply: Reply,
        timeout: float | None,
        reach: Reach = LOOPBACK,
        own_id: str = "",
    ):
        self._server, self._staging, self._reply, self._timeout = server, staging, reply, timeout
        self._reach, self._own_id = reach, own_id
        self._staged: set[str] = set()  # who has all of it
        self._news = asyncio.Event()
        self._open = set(behind(server))  # whose outcome is not known
        self._written = 0  # chunks, in order
        self._wrote_at, self._wrote = time.monotonic(), asyncio.Event()
        self._committed = False
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._ended)

    def news(self, committed: bool) -> None:
        """There are more chunks, or the commit."""
        self._committed = committed
        self._news.set()

    @property
    def chunks_behind(self) -> int:
        """Chunks that could be sent on now. None where it is over, or waits for one that is not here."""
        if self.task.done() or not self._written < self._staging.chunks or not self._staging.has(self._written):
            return 0
        return self._staging.chunks - self._staging.waiting - self._written

    async def keep_pace(self) -> None:
        """Returns when one more chunk may come: it is not far behind, has written two, writes nothing, or is over."""
        enough = self._written + 2  # so that it catches up, while what comes does not stand still
        while self.chunks_behind > MOST_BEHIND and self._written < enough:
            left = self._wrote_at + HOLD_SECONDS - time.monotonic()
            if left <= 0:
                return
            self._wrote.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wrote.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._wrote.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            why = f"{type(error).__name__}: {said(error)}"
            quiet.say("failed", logging.WARNING, "passing on to %s failed: %s", said(self._server.address), why)

    async def _run(self) -> None:
        if why := self._reach.why_not(self._server.address):
            await self.give_up(why)
            return
        assert self._reach.credentials is not None
        why = "the connection ended"
        async with contextlib.AsyncExitStack() as stack:
            channel = connect(self._server.address, self._reach.credentials)
            stack.push_async_callback(channel.close)
            stub = Stub(channel)
            if not await self._met(stub):
                await self.give_up(NOT_MET)
                return
            call = stub.PushWeights(timeout=self._timeout)
            stack.callback(call.cancel)
            stream = WeightStream(call, self._staging)
            try:
                await both(self._read(stream), self._write(call, stream))
            except TimeoutError:
                why = f"it took nothing for {PATIENCE_SECONDS:g} s"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {said(error.details() or '')}"
            except PushRefused as error:
                why = str(error)
            except Exception:  # noqa: BLE001  whoever sent the version hears that it is over
                pass
        await self.give_up(why)

    async def _met(self, stub: Stub) -> bool:
        """Whether the server there is the one that the header means."""
        began, why = time.monotonic(), ""
        try:
            status = await stub.Status(pb.StatusRequest(), timeout=PATIENCE_SECONDS)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        else:
            if status is None:
                why = "its Status cannot be decoded"
            elif status.server_id == self._own_id:
                why = "it is this server itself"
            elif self._server.server_id and status.server_id != self._server.server_id:
                why = f"it is server {said(status.server_id)}, not {said(self._server.server_id)}"
        if not why:
            return True
        quiet.say("not met", logging.WARNING, "not passed on to %s: %s", said(self._server.address), said(why))
        if self._reach.tls:
            await asyncio.sleep(PATIENCE_SECONDS - (time.monotonic() - began))
        return False

    async def give_up(self, why: str) -> None:
        """Tells who has not got it. To be called once the task has ended: one that was cancelled has told nobody."""
        for address in sorted(self._open):
            await self._tell(pb.WeightReply.Relayed(address=address, lost=why))
        self._open.clear()

    async def _relay(self, relayed: pb.WeightReply.Relayed) -> None:
        kind = relayed.WhichOneof("kind")
        if kind == "staged":
            if relayed.address in self._staged:
                return
            self._staged.add(relayed.address)
        elif kind is None:
            return  # it says nothing of it, or in a way that this server does not know
        else:
            self._open.discard(relayed.address)
            if kind != "applied":
                setattr(relayed, kind, said(getattr(relayed, kind)))
        await self._tell(relayed)

    async def _tell(self, relayed: pb.WeightReply.Relayed) -> None:
        await self._reply(pb.WeightReply(relayed=relayed))

    async def _write(self, call: grpc.aio.StreamStreamCall, stream: WeightStream) -> None:
        """Raises TimeoutError where the other side takes nothing."""
        async with contextlib.aclosing(stream.messages(self._server.relays, self._ready)) as messages:
            async for message in messages:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await call.write(message)
                if isinstance(message, Chunk):
                    self._written, self._wrote_at = max(self._written, message.index + 1), time.monotonic()
                    self._wrote.set()
                elif message.commit:
                    await self._tell(pb.WeightReply.Relayed(address=self._server.address, staged=True))

    async def _ready(self, index: int) -> None:
        """Returns when the chunk is here; after the last of them, the commit."""
        while not (self._committed if index == self._staging.chunks else self._staging.has(index)):
            self._news.clear()
            await self._news.wait()

    async def _read(self, stream: WeightStream) -> None:
        """Returns when the outcome of all is known, or the call is over."""
        async with contextlib.aclosing(stream.replies()) as replies:
            async for kind, reply in replies:
                if kind == "relayed":
                    if reply.relayed.address in self._open:  # else it is not behind it, or is told for the second time
                        await self._relay(reply.relayed)
                elif kind != "resend":
                    if kind == "applied" and self._server.server_id not in ("", reply.applied.server_id):
                        raise PushRefused("another process took it")
                    own = pb.WeightReply.Relayed(address=self._server.address)
                    if kind == "applied":
                        own.applied.CopyFrom(reply.applied)
                    else:
                        setattr(own, kind, getattr(reply, kind))
                    await self._relay(own)
                if not self._open:
                    return

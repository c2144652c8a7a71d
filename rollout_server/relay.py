"""A version on its way through this server to others: each chunk is sent on as soon as it is here and good.

    trainer ─chunks→ this server ─chunks→ those that the header names, and they to those behind them
            ←relayed─             ←relayed─

    meeting   is it one that may be dialled (hops.py)? does its Status tell the server_id that the header names? Only
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

from rollout_server.hops import LOOPBACK, Reach
from rollout_server.quiet_log import QuietLog
from rollout_server.staging import Staging
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk
from scalerl_jax.contract.peer_text import said
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.security import connect

# A server that takes nothing for so long is given up, and so is one that does not answer at the meeting.
PATIENCE_SECONDS = 3.0

# Where more chunks wait here for a server than this, whoever sends the version is read at that server's pace: what has
# left the trainer is then never far from the last server, and the trainer sees whether something still moves. A server
# that takes nothing for HOLD_SECONDS holds up nobody: well under the patience of those that wait for this one.
MOST_BEHIND = 16
HOLD_SECONDS = 1.0

# A chunk is sent again this many times on average before the link counts as broken.
RESENDS = 3

NOT_MET = "not reached, or not the server that it should be"

log = logging.getLogger(__name__)
quiet = QuietLog(log)

Reply = Callable[[pb.WeightReply], Awaitable[None]]


def behind(hop: pb.Relay) -> Iterator[str]:
    """The addresses of a hop and of all those behind it."""
    yield hop.address
    for further in hop.relays:
        yield from behind(further)


def lost(hop: pb.Relay, why: str) -> Iterator[pb.WeightReply]:
    for address in behind(hop):
        yield pb.WeightReply(relayed=pb.WeightReply.Relayed(address=address, lost=why))


class PassOn:
    """One version to one server. `news()` says that there are more chunks, or the commit.

    staging: its header names nobody to pass it on to; those behind the hop are added. own_id: this server's.
    """

    def __init__(
        self,
        hop: pb.Relay,
        staging: Staging,
        *,
        reply: Reply,
        timeout: float | None,
        reach: Reach = LOOPBACK,
        own_id: str = "",
    ):
        self._hop, self._staging, self._reply, self._timeout = hop, staging, reply, timeout
        self._reach, self._own_id = reach, own_id
        self._resends = 0
        self._staged: set[str] = set()  # who has all of it
        self._news = asyncio.Event()
        self._again: asyncio.Queue[int] = asyncio.Queue()
        self._open = set(behind(hop))  # whose outcome is not known
        self._written = 0  # chunks, in order
        self._wrote_at, self._wrote = time.monotonic(), asyncio.Event()
        self.committed = False
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._ended)

    def news(self) -> None:
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
            quiet.say("failed", logging.WARNING, "passing on to %s failed: %s", said(self._hop.address), why)

    async def _run(self) -> None:
        if why := self._reach.why_not(self._hop.address):
            await self.give_up(why)
            return
        assert self._reach.credentials is not None
        why = "the connection ended"
        async with contextlib.AsyncExitStack() as stack:
            channel = connect(self._hop.address, self._reach.credentials)
            stack.push_async_callback(channel.close)
            stub = Stub(channel)
            if not await self._met(stub):
                await self.give_up(NOT_MET)
                return
            header = pb.WeightHeader()
            header.CopyFrom(self._staging.header)
            header.relays.extend(self._hop.relays)
            call = stub.PushWeights(timeout=self._timeout)
            stack.callback(call.cancel)
            reader = asyncio.create_task(self._read(call))
            writer = asyncio.create_task(self._write(call, header))
            try:
                await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_EXCEPTION)
                for task in (writer, reader):
                    error = task.exception() if task.done() else None
                    if isinstance(error, TimeoutError):
                        why = f"it took nothing for {PATIENCE_SECONDS:g} s"
                    elif isinstance(error, grpc.aio.AioRpcError):
                        why = f"{error.code().name}: {said(error.details() or '')}"
                    elif isinstance(error, Over) and str(error):
                        why = str(error)
            finally:
                for task in (reader, writer):
                    task.cancel()
                await asyncio.gather(reader, writer, return_exceptions=True)
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
            elif self._hop.server_id and status.server_id != self._hop.server_id:
                why = f"it is server {said(status.server_id)}, not {said(self._hop.server_id)}"
        if not why:
            return True
        quiet.say("not met", logging.WARNING, "not passed on to %s: %s", said(self._hop.address), said(why))
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

    async def _write(self, call: grpc.aio.StreamStreamCall, header: pb.WeightHeader) -> None:
        """Raises TimeoutError where the other side takes nothing."""

        async def write(message: pb.WeightMessage | Chunk) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await call.write(message)

        await write(pb.WeightMessage(header=header))
        for index in range(self._staging.chunks):
            while not self._staging.has(index):
                self._news.clear()
                await self._news.wait()
            await write(self._staging.chunk(index))
            self._written, self._wrote_at = index + 1, time.monotonic()
            self._wrote.set()
        while not self.committed:
            self._news.clear()
            await self._news.wait()
        await write(pb.WeightMessage(commit=True))
        await self._tell(pb.WeightReply.Relayed(address=self._hop.address, staged=True))
        while True:
            await write(self._staging.chunk(await self._again.get()))

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        """Returns when the outcome of all is known, or the call is over."""
        while self._open and (reply := await call.read()) is not grpc.aio.EOF:
            if reply is None:
                raise Over("it answers what cannot be decoded")
            kind = reply.WhichOneof("kind")
            if kind == "resend":
                self._resends += 1
                if reply.resend >= self._staging.chunks or self._resends > RESENDS * self._staging.chunks:
                    raise Over("it asks for chunks without end, or for one that there is not")
                self._again.put_nowait(reply.resend)
            elif kind == "relayed":
                if reply.relayed.address not in self._open:
                    continue  # it speaks of one that is not behind it, or for the second time
                await self._relay(reply.relayed)
            elif kind is None:
                raise Over("it answers in a way that this server does not know")
            else:
                if kind == "applied" and self._hop.server_id and reply.applied.server_id != self._hop.server_id:
                    raise Over("another process took it")
                self._open.discard(self._hop.address)
                relayed = pb.WeightReply.Relayed(address=self._hop.address)
                if kind == "applied":
                    relayed.applied.CopyFrom(reply.applied)
                else:
                    setattr(relayed, kind, said(getattr(reply, kind)))
                await self._tell(relayed)
        raise Over


class Over(Exception):
    """Nothing more will come; says why where it should have."""

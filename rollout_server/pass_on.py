"""A version on its way through this server to others: each chunk is sent on as soon as it is here and good.

    trainer ─chunks→ this server ─chunks→ those that the header names, and they to those behind them
            ←passed─             ←passed─

What is sent comes from where this server stages the version, so passing on costs no memory. A server that cannot be
reached, or takes nothing for PATIENCE_SECONDS, is reported as lost together with those behind it: whoever sends the
version serves them in another way. Nothing is tried twice here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import grpc

from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.chunks import Chunk
from rollout_server.contract.rpc import Stub
from rollout_server.contract.security import PLAIN, Credentials, connect
from rollout_server.staging import Staging

# A server that takes nothing for so long is given up.
PATIENCE_SECONDS = 3.0

Reply = Callable[[pb.WeightReply], Awaitable[None]]


def behind(hop: pb.Hop) -> Iterator[str]:
    """The addresses of a hop and of all those behind it."""
    yield hop.address
    for further in hop.pass_on:
        yield from behind(further)


def lost(hop: pb.Hop, why: str) -> Iterator[pb.WeightReply]:
    for address in behind(hop):
        yield pb.WeightReply(passed=pb.WeightReply.Passed(address=address, lost=why))


class PassOn:
    """One version to one server. `news()` says that there are more chunks, or the commit."""

    def __init__(
        self,
        hop: pb.Hop,
        staging: Staging,
        *,
        reply: Reply,
        timeout: float | None,
        credentials: Credentials = PLAIN,
    ):
        self._hop, self._staging, self._reply, self._timeout = hop, staging, reply, timeout
        self._credentials = credentials
        self._news = asyncio.Event()
        self._again: asyncio.Queue[int] = asyncio.Queue()
        self._open = set(behind(hop))  # whose outcome is not known
        self.committed = False
        self.task = asyncio.create_task(self._run())

    def news(self) -> None:
        self._news.set()

    async def _run(self) -> None:
        header = pb.WeightHeader()
        header.CopyFrom(self._staging.header)
        del header.pass_on[:]
        header.pass_on.extend(self._hop.pass_on)
        why = "the connection ended"
        async with contextlib.AsyncExitStack() as stack:
            channel = connect(self._hop.address, self._credentials)
            stack.push_async_callback(channel.close)
            call = Stub(channel).PushWeights(timeout=self._timeout)
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
                        why = f"{error.code().name}: {error.details()}"
            finally:
                for task in (reader, writer):
                    task.cancel()
                await asyncio.gather(reader, writer, return_exceptions=True)
        await self.give_up(why)

    async def give_up(self, why: str) -> None:
        """Tells who has not got it. To be called once the task has ended: one that was cancelled has told nobody."""
        for address in sorted(self._open):
            await self._tell(pb.WeightReply.Passed(address=address, lost=why))
        self._open.clear()

    async def _tell(self, passed: pb.WeightReply.Passed) -> None:
        await self._reply(pb.WeightReply(passed=passed))

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
        while not self.committed:
            self._news.clear()
            await self._news.wait()
        await write(pb.WeightMessage(commit=True))
        await self._tell(pb.WeightReply.Passed(address=self._hop.address, staged=True))
        while True:
            await write(self._staging.chunk(await self._again.get()))

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        """Returns when the outcome of all is known, or the call is over."""
        while self._open and (reply := await call.read()) is not grpc.aio.EOF:
            kind = reply.WhichOneof("kind")
            if kind == "resend":
                self._again.put_nowait(reply.resend)
            elif kind == "passed":
                if reply.passed.WhichOneof("kind") != "staged":
                    self._open.discard(reply.passed.address)
                await self._reply(reply)
            else:
                self._open.discard(self._hop.address)
                passed = pb.WeightReply.Passed(address=self._hop.address)
                if kind == "applied":
                    passed.applied.CopyFrom(reply.applied)
                else:
                    setattr(passed, kind, getattr(reply, kind))
                await self._tell(passed)
        raise Over


class Over(grpc.RpcError):
    """Nothing more will come."""

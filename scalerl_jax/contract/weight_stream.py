"""One version of the weights on its way to one server, as its sender sees the call: the trainer, or a server relaying.

    header, chunks, commit ->  <- resend*, then applied | refused | full_sync; relayed* where the header names others

A chunk that is asked for again goes out after the one under way, so often that the link counts as noisy and not broken.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol

import grpc

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk

RESENDS = 3  # of each chunk, on average


class PushRefused(Exception):
    """The server did not take the version; its weights are as they were."""


class FullSyncNeeded(PushRefused):
    """The server's copy is not what a delta starts from: it needs a dense version."""


THEIRS = (PushRefused, TimeoutError, grpc.aio.AioRpcError)  # what a stream fails with by no fault of ours


def refusal(kind: str, reply: pb.WeightReply | pb.WeightReply.Relayed) -> PushRefused:
    """What a reply that is not `applied` says of the version."""
    if kind == "full_sync":
        return FullSyncNeeded(reply.full_sync)
    return PushRefused(reply.refused if kind == "refused" else f"the server answered {kind}")


class Chunked(Protocol):
    """A version in chunks; a chunk may be cut any number of times."""

    header: pb.WeightHeader
    chunks: int

    def chunk(self, index: int) -> Chunk: ...


async def _at_once(index: int) -> None:
    """All chunks are there."""


class WeightStream:
    """Of one call of PushWeights."""

    def __init__(self, call: Any, source: Chunked):
        self._call, self._source = call, source
        self._again: asyncio.Queue[int] = asyncio.Queue()
        self.resent = 0

    async def messages(
        self, relays: Iterable[pb.Relay], ready: Callable[[int], Awaitable[None]] = _at_once
    ) -> AsyncGenerator[pb.WeightMessage | Chunk, None]:
        """What is to be written, without end.

        relays: whom the other side is to pass it on to. ready: returns when chunk n is there, and after the last the
        commit.
        """
        first = pb.WeightMessage(header=self._source.header)
        first.header.relays.extend(relays)
        yield first
        for index in range(self._source.chunks):
            await ready(index)
            yield self._source.chunk(index)
            while not self._again.empty():
                if (again := self._again.get_nowait()) <= index:  # one that has not gone out comes anyway
                    yield self._source.chunk(again)
        await ready(self._source.chunks)
        yield pb.WeightMessage(commit=True)
        while True:
            yield self._source.chunk(await self._again.get())

    async def replies(self) -> AsyncGenerator[tuple[str, pb.WeightReply], None]:
        """(kind, reply), until the call ends well. What is to be sent again, `messages` brings.

        Raises PushRefused where the other side breaks the contract, what the call raises where that fails.
        """
        while (reply := await self._call.read()) is not grpc.aio.EOF:  # with status OK: any other is raised by read()
            kind = None if reply is None else reply.WhichOneof("kind")
            if reply is None:
                raise PushRefused("it answers what cannot be decoded")
            if kind is None:
                raise PushRefused("it answers in a way that is not known here")
            if kind == "resend":
                self.resent += 1
                if reply.resend >= self._source.chunks:
                    raise PushRefused(f"it asks for chunk {reply.resend} of {self._source.chunks}")
                if self.resent > RESENDS * self._source.chunks:
                    raise PushRefused(f"{self.resent} chunks arrived damaged")
                self._again.put_nowait(reply.resend)
            yield kind, reply


async def both(
    reading: Coroutine[Any, Any, None],
    writing: Coroutine[Any, Any, None],
    *,
    left: Callable[[], float] | None = None,
    end: Callable[[], object] = lambda: None,
) -> None:
    """Both ends of a stream, until the reading is through. Raises what either raises.

    left: seconds in which something has to move, or else TimeoutError is raised; None: for ever.
    end: called as soon as the stream is over, before its ends are: a read may not hear that it is cancelled.
    """
    reader, writer = asyncio.create_task(reading), asyncio.create_task(writing)
    try:
        while not reader.done():
            seconds = None if left is None else left()
            if seconds is not None and seconds <= 0:
                raise TimeoutError
            waited_for = {reader} if writer.done() else {reader, writer}
            await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not (reader.done() and isinstance(writer.exception(), THEIRS)):
                writer.result()  # a fault of ours is told first; of theirs, what the reader has heard says more
        reader.result()
    finally:
        end()
        reader.cancel()
        writer.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)

"""Sends one version of the weights to one server.

    header, chunks, commit ->  <- resend*, then applied | refused | full_sync

A chunk that the server requests again is sent after the one being written. A push fails when more than RESENDS times
the number of chunks were damaged, and when nothing moved for `timeout` seconds, whatever the size of the weights.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from typing import Any

import grpc

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk
from scalerl_jax.rollouts.weights.payload import Payload

RESENDS = 3  # of each chunk, on average


class PushRefused(Exception):
    """The server did not apply the version; its weights are unchanged."""


class FullSyncNeeded(PushRefused):
    """The server's copy is not the base of the delta: it needs a dense version."""


@dataclasses.dataclass(frozen=True)
class PushReport:
    """One version applied by one server.

    seconds: of the whole push. transfer_seconds: from the header to the last good chunk. staging_seconds: unpacking and
    checking, while the server continues decoding. pause_seconds: decoding is stopped.
    """

    step: int
    sparse: bool
    payload_bytes: int
    resent_chunks: int
    seconds: float
    transfer_seconds: float
    staging_seconds: float
    pause_seconds: float


class Push:
    """One call of PushWeights."""

    def __init__(self, call: Any, payload: Payload):
        self._call, self._payload = call, payload
        self._again: asyncio.Queue[int] = asyncio.Queue()
        self._resent = 0
        self._began = self._moved_at = time.monotonic()

    async def run(self, *, server_id: str, timeout: float) -> PushReport:
        """Returns when the server decodes with the version.

        server_id: of the process that should receive it; empty: any. Raises PushRefused, FullSyncNeeded, AioRpcError if
        the connection fails, TimeoutError if nothing moved for `timeout` seconds.
        """
        reader, writer = asyncio.create_task(self._read(server_id)), asyncio.create_task(self._write())
        try:
            while not reader.done():
                left = self._moved_at + timeout - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                waited_for: set[asyncio.Task[Any]] = {reader} if writer.done() else {reader, writer}
                await asyncio.wait(waited_for, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if writer.done():
                    writer.result()  # raises our own fault, which takes precedence over the server's answer
            return reader.result()
        finally:
            self._call.cancel()
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, server_id: str) -> PushReport:
        while (reply := await self._call.read()) is not grpc.aio.EOF:  # read() raises where the call ends badly
            self._moved_at = time.monotonic()
            kind = None if reply is None else reply.WhichOneof("kind")
            if kind == "resend":
                self._resend(reply.resend)
            elif kind == "applied":
                if server_id and reply.applied.server_id not in ("", server_id):  # a generator may leave it empty
                    raise PushRefused("another process took it: the server was restarted")
                return self._report(reply.applied)
            elif kind == "full_sync":
                raise FullSyncNeeded(reply.full_sync)
            elif kind == "refused":
                raise PushRefused(reply.refused)
            else:
                raise PushRefused(f"its answer {'cannot be decoded' if reply is None else 'is of an unknown kind'}")
        raise PushRefused("the server ended the push without an answer")

    def _resend(self, index: int) -> None:
        self._resent += 1
        if index >= self._payload.chunks:
            raise PushRefused(f"it asks for chunk {index} of {self._payload.chunks}")
        if self._resent > RESENDS * self._payload.chunks:
            raise PushRefused(f"{self._resent} chunks arrived damaged")
        self._again.put_nowait(index)

    def _report(self, applied: pb.WeightReply.Applied) -> PushReport:
        payload = self._payload
        target = codec.version_from_proto(payload.header.target)
        if codec.version_from_proto(applied.version) != target:
            raise PushRefused(f"the server applied version {applied.version.step} instead of {target.step}")
        timings = (applied.staging_seconds, applied.checking_seconds, applied.pause_seconds)
        if not all(math.isfinite(value) and value >= 0 for value in timings):
            raise PushRefused(f"the server applied it in {timings} s")
        seconds = time.monotonic() - self._began
        return PushReport(target.step, payload.is_delta, payload.bytes, self._resent, seconds, *timings)

    async def _write(self) -> None:
        """Writes until cancelled or until the call is over; the call's last reply or status gives the reason."""
        async with contextlib.aclosing(self.messages()) as messages:
            async for message in messages:
                try:
                    await self._call.write(message)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return
                self._moved_at = time.monotonic()

    async def messages(self) -> AsyncGenerator[pb.WeightMessage | Chunk, None]:
        """The messages to write; never ends."""
        payload = self._payload
        yield pb.WeightMessage(header=payload.header)
        for index in range(payload.chunks):
            yield payload.chunk(index)
            while not self._again.empty():
                if (again := self._again.get_nowait()) <= index:  # a later one is sent anyway
                    yield payload.chunk(again)
        yield pb.WeightMessage(commit=True)
        while True:
            yield payload.chunk(await self._again.get())


async def together(own: Coroutine[Any, Any, PushReport], others: Awaitable[list[PushReport]]) -> PushReport:
    """Combined report of the pushes of all parts. Raises the first failure (FullSyncNeeded first); cancels the rest."""
    ours, asked = asyncio.ensure_future(own), asyncio.ensure_future(others)
    both: set[asyncio.Future[Any]] = {ours, asked}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        faults = [fault for one in (ours, asked) if one.done() and (fault := one.exception()) is not None]
        if faults:
            raise next((fault for fault in faults if isinstance(fault, FullSyncNeeded)), faults[0])
        reports = [ours.result(), *asked.result()]
    finally:
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    return dataclasses.replace(
        reports[0],
        payload_bytes=sum(report.payload_bytes for report in reports),
        resent_chunks=sum(report.resent_chunks for report in reports),
        seconds=max(report.seconds for report in reports),
        transfer_seconds=max(report.transfer_seconds for report in reports),
    )

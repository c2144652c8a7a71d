"""Versions of the weights on their way to the servers.

    payload  = the tensors' bytes one after another, in the header's order, cut into chunks of chunk_bytes
    chunk    = (index, data, crc32(data))
    push     = header, chunks, commit ->  <- resend*, then applied | refused

The latest version wins: a server that is behind gets the newest one, not those between; a transfer that has begun is
finished first. Tensors may be given as a function that brings them to the host: it runs on a thread of its own, while
the trainer is busy with its next update, and not at all where a newer version came before a server asked for it.

Dense only; a patch would be another payload.
"""

import asyncio
import contextlib
import dataclasses
import sys
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from rollout_server.contract import codec
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.rollout_pb2_grpc import RolloutStub

Tensors = Mapping[str, np.ndarray]  # Hugging Face names, complete, in wire dtype
Source = Tensors | Callable[[], Tensors]

RESENDS = (
    3  # a chunk is sent again this many times on average before the push is given up: the link is broken, not noisy
)


class PushRefused(Exception):
    """The server did not take the version; its weights are as they were."""


@dataclasses.dataclass(frozen=True)
class PushReport:
    """One version applied by one server. Seconds: the whole push; the server's staging; decoding stood still."""

    step: int
    payload_bytes: int
    resent_chunks: int
    seconds: float
    staging_seconds: float
    pause_seconds: float


class Payload:
    """One version, ready to be cut into chunks by any number of pushes at once; CRCs are computed once."""

    def __init__(self, *, version: codec.Version, tensors: Tensors, chunk_bytes: int):
        assert sys.byteorder == "little", "weights travel little-endian"
        assert tensors, "a version without tensors"
        flat = {name: np.ascontiguousarray(tensor).reshape(-1).view(np.uint8) for name, tensor in tensors.items()}
        self._pieces = list(flat.values())  # [bytes] uint8 each
        self._starts = np.concatenate([[0], np.cumsum([len(piece) for piece in self._pieces])]).tolist()
        self.bytes, self._chunk_bytes = self._starts[-1], chunk_bytes
        self.chunks = -(-self.bytes // chunk_bytes)
        self._crcs: dict[int, int] = {}
        self.header = pb.WeightHeader(
            target=codec.version_to_proto(version),
            tensors=[
                pb.TensorInfo(name=name, dtype=tensor.dtype.name, shape=tensor.shape)
                for name, tensor in tensors.items()
            ],
            payload_bytes=self.bytes,
            chunk_bytes=chunk_bytes,
        )

    def chunk(self, index: int) -> pb.WeightMessage:
        """Chunk `index` as it goes on the wire; safe to call from several threads."""
        start = index * self._chunk_bytes
        end = min(start + self._chunk_bytes, self.bytes)
        assert 0 <= start < end
        parts = []
        at = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < end:
            piece_end = min(end, self._starts[at + 1])
            offset = self._starts[at]
            parts.append(self._pieces[at][start - offset : piece_end - offset])
            start, at = piece_end, at + 1
        data = b"".join(part.tobytes() for part in parts)
        crc = self._crcs.get(index)
        if crc is None:
            crc = self._crcs[index] = zlib.crc32(data)
        return pb.WeightMessage(chunk=pb.WeightChunk(index=index, data=data, crc32=crc))


class Publisher:
    """Holds the versions that some server may still need. Lives on one event loop; close() ends its threads."""

    def __init__(self, *, incarnation: int, chunk_bytes: int):
        self._incarnation, self._chunk_bytes = incarnation, chunk_bytes
        self._sources: dict[int, Source] = {}
        self._payloads: dict[int, asyncio.Task[Payload]] = {}
        self._retained: dict[int, int] = {}  # step -> how many evaluations need it
        self.latest: int | None = None
        # One thread brings weights to the host, so that two versions are never on their way at once; others cut chunks.
        self._staging = ThreadPoolExecutor(1, thread_name_prefix="publisher-staging")
        self._cutting = ThreadPoolExecutor(4, thread_name_prefix="publisher-chunks")

    def close(self) -> None:
        self._staging.shutdown(wait=False, cancel_futures=True)
        self._cutting.shutdown(wait=False, cancel_futures=True)

    def offer(self, step: int, tensors: Source) -> None:
        """Makes `step` the version that servers are to hold."""
        assert self.latest is None or step > self.latest, f"version {step} offered after version {self.latest}"
        self._sources[step] = tensors
        self.latest = step
        self._forget()

    def holds(self, step: int) -> bool:
        return step in self._sources

    def retain(self, step: int) -> None:
        """Keeps a version beyond the next one, until it is released as often as it was retained."""
        assert step in self._sources, f"version {step} is not held"
        self._retained[step] = self._retained.get(step, 0) + 1

    def release(self, step: int) -> None:
        self._retained[step] -= 1
        if not self._retained[step]:
            del self._retained[step]
        self._forget()

    def _forget(self) -> None:
        # A push that is under way holds the payload itself.
        for step in [s for s in self._sources if s != self.latest and s not in self._retained]:
            del self._sources[step]
            self._payloads.pop(step, None)

    async def push(self, stub: RolloutStub, step: int, *, timeout: float) -> PushReport:
        """Sends version `step` to one server, and returns when the server decodes with it.

        Raises PushRefused, or grpc.RpcError where the connection fails or `timeout` seconds have passed; and whatever
        making the tensors raises.
        """
        payload = await self._payload(step)
        began = time.monotonic()
        call = stub.PushWeights(timeout=timeout)
        again: asyncio.Queue[int] = asyncio.Queue()
        writer = asyncio.create_task(_write(call, self._messages(payload, again)))
        resent = 0
        try:
            while True:
                reply = await call.read()
                if reply is grpc.aio.EOF:  # with status OK: any other is raised by read()
                    raise PushRefused("the server ended the push without a word")
                kind = reply.WhichOneof("kind")
                if kind == "applied":
                    applied = reply.applied
                    if codec.version_from_proto(applied.version) != codec.Version(self._incarnation, step):
                        raise PushRefused(f"the server applied version {applied.version.step} instead of {step}")
                    seconds = time.monotonic() - began
                    return PushReport(
                        step, payload.bytes, resent, seconds, applied.staging_seconds, applied.pause_seconds
                    )
                if kind == "refused":
                    raise PushRefused(reply.refused)
                if kind != "resend" or reply.resend >= payload.chunks:
                    raise PushRefused(f"the server answered {kind} {reply.resend}")
                resent += 1
                if resent > RESENDS * payload.chunks:
                    raise PushRefused(f"{resent} chunks arrived damaged")
                again.put_nowait(reply.resend)
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _payload(self, step: int) -> Payload:
        if step not in self._payloads:
            source = self._sources[step]

            def make() -> Payload:
                tensors = source() if callable(source) else source
                version = codec.Version(self._incarnation, step)
                return Payload(version=version, tensors=tensors, chunk_bytes=self._chunk_bytes)

            loop = asyncio.get_running_loop()
            self._payloads[step] = asyncio.ensure_future(loop.run_in_executor(self._staging, make))
        # Shielded: one server's end must not take the payload from the others.
        return await asyncio.shield(self._payloads[step])

    async def _messages(self, payload: Payload, again: asyncio.Queue[int]) -> AsyncGenerator[pb.WeightMessage, None]:
        loop = asyncio.get_running_loop()
        yield pb.WeightMessage(header=payload.header)
        for index in range(payload.chunks):
            yield await loop.run_in_executor(self._cutting, payload.chunk, index)
            while not again.empty():
                yield await loop.run_in_executor(self._cutting, payload.chunk, again.get_nowait())
        yield pb.WeightMessage(commit=True)
        while True:
            yield await loop.run_in_executor(self._cutting, payload.chunk, await again.get())


async def _write(call, messages: AsyncGenerator[pb.WeightMessage, None]) -> None:
    # The call may be over: its last reply or its status says why.
    async with contextlib.aclosing(messages):
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            async for message in messages:
                await call.write(message)

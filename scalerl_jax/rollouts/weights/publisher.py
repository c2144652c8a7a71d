"""Versions of the weights on their way to the servers.

    version  = dense (all bytes), or a delta from a version that the server holds to the one it should hold
    push     = header, chunks, commit ->  <- resend*, then applied | refused | full_sync

The latest version wins: a server that is behind gets the newest one, not those between; a transfer that has begun is
finished first. A server gets a delta where it holds a version of this trainer from which one is kept (deltas.py), and
a dense version where it does not, or where it answers `full_sync`: its copy is not what we think it is.

Dense tensors may be given as a function that brings them to the host: it runs on a thread of its own, while the trainer
is busy with its next update, and not at all where a newer version came before a server asked for it. What changed is
brought to the host in any case, since the next deltas lead on from it.

Servers that need the same at the same time pass it on to each other (trees.py), so that what leaves the trainer does
not grow with the fleet.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.weight_delta import WeightDelta
from scalerl_jax.rollouts.incarnation import Incarnation
from scalerl_jax.rollouts.weights import payload as payload_lib
from scalerl_jax.rollouts.weights.deltas import DeltaCache
from scalerl_jax.rollouts.weights.payload import Payload, Tensors
from scalerl_jax.rollouts.weights.refusals import FullSyncNeeded, PushRefused
from scalerl_jax.rollouts.weights.relay_tree import NO_TREE, Tree, Trees

_log = logging.getLogger(__name__)

Source = Tensors | Callable[[], Tensors]

# A chunk is sent again this many times on average before the push is given up: the link is broken, not noisy.
RESENDS = 3
# A server whose tree loses its root joins another; after so many it gets a stream of its own.
ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class PushReport:
    """One version applied by one server.

    Seconds: the whole push; its transfer (header to last good chunk); staging (the server unpacks and checks it while
    it goes on decoding); pause (decoding stood still).
    """

    step: int
    sparse: bool
    payload_bytes: int
    resent_chunks: int
    seconds: float
    transfer_seconds: float
    staging_seconds: float
    pause_seconds: float


class Publisher:
    """Holds the versions that some server may still need. Lives on one event loop; close() ends its threads."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        chunk_bytes: int,
        delta_bytes: int = 0,
        event: Callable[[dict[str, Any]], None] = lambda fields: None,
        relay: bool = True,
        fail: Callable[[BaseException], None] | None = None,
    ):
        """delta_bytes: of the deltas kept. event: called on the loop with what each version changed.

        relay: servers send versions on to each other; else each gets them from here. fail: told on the loop of every
        fault of ours, whoever it hits: an exception while a version is made, cut or sent. None: they are logged.
        """
        self._incarnation, self._chunk_bytes = incarnation, chunk_bytes
        self._sources: dict[int, Source] = {}
        self._payloads: dict[tuple[int | None, int], asyncio.Task[Payload]] = {}  # base, step
        self._retained: dict[int, int] = {}  # step -> how many evaluations need it
        self._fail = fail or _log_fault
        self._deltas = DeltaCache(limit=delta_bytes, event=event, fail=self._fail)
        self._relay, self._trees = relay, Trees(fail=self._fail)
        self._streams: set[asyncio.Task[None]] = set()
        self.latest: int | None = None
        self.sent_bytes = 0  # of payloads, to all servers
        # One thread brings weights to the host, so that two versions are never on their way at once.
        self._staging = ThreadPoolExecutor(1, thread_name_prefix="publisher-staging")

    def close(self) -> None:
        self._deltas.close()
        self._staging.shutdown(wait=False, cancel_futures=True)

    def record(self, step: int, find: Callable[[], WeightDelta]) -> None:
        """What version `step` changed; of every version in turn, those that are never published too."""
        self._deltas.record(step, find)

    def publish(self, step: int, tensors: Source) -> None:
        """Makes `step` the version that servers are to hold."""
        assert self.latest is None or step > self.latest, f"version {step} published after version {self.latest}"
        self._incarnation.settle()
        self._sources[step] = tensors
        self.latest = step
        self._drop_unneeded()

    def retain(self, step: int) -> None:
        """Keeps a version beyond the next one, until it is released as often as it was retained."""
        assert step in self._sources, f"version {step} is not held"
        self._retained[step] = self._retained.get(step, 0) + 1

    def release(self, step: int) -> None:
        self._retained[step] -= 1
        if not self._retained[step]:
            del self._retained[step]
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        # A push that is under way holds the payload itself.
        for step in [s for s in self._sources if s != self.latest and s not in self._retained]:
            del self._sources[step]
        for key in [key for key in self._payloads if key[1] not in self._sources]:
            del self._payloads[key]

    async def push(
        self, stub: Stub, step: int, *, base: int | None = None, timeout: float, address: str = "", server_id: str = ""
    ) -> PushReport:
        """Brings one server from version `base` (None: none of ours) to `step`; returns when it decodes with it.

        address: where other servers reach it; those that need the same at the same time then pass it on to each other.
        server_id: of the process that is to take it; what another one took counts for nothing. Empty: not known.
        Raises PushRefused (FullSyncNeeded: try again without a base), grpc.RpcError where the connection fails,
        TimeoutError where nothing of it moves for `timeout` seconds; and whatever making the tensors raises.
        """
        source = self._sources[step]
        if not address or not self._relay:
            payload = await self._payload(base, step, source)
            return await self._send(stub, payload, timeout=timeout, server_id=server_id)
        for _ in range(ATTEMPTS):
            async with self._trees.join((base, step), address, server_id) as place:
                payload = await self._payload(base, step, source)
                if place.tree is not None:
                    return await self._send(stub, payload, timeout=timeout, tree=place.tree, server_id=server_id)
                applied = await place.wait(timeout)
                if applied is not None:
                    return self._report(payload, applied, resent=0, seconds=place.seconds)
            if place.avoid:
                break
        return await self._send(stub, payload, timeout=timeout, server_id=server_id)

    async def _send(
        self, stub: Stub, payload: Payload, *, timeout: float, tree: Tree = NO_TREE, server_id: str = ""
    ) -> PushReport:
        """To one server, and through it to those of the tree. Returns when that one is through.

        The stream goes on until the others are, too: what they wait for must not keep this one from its next version.
        """
        report: asyncio.Future[PushReport] = asyncio.get_running_loop().create_future()
        tree.streaming = True
        streaming = self._stream(stub, payload, timeout=timeout, tree=tree, server_id=server_id, report=report)
        stream = asyncio.create_task(streaming)
        self._streams.add(stream)

        stream.add_done_callback(self._streams.discard)
        stream.add_done_callback(self._ended)
        try:
            return await report
        except asyncio.CancelledError:
            stream.cancel()
            raise

    async def _stream(
        self,
        stub: Stub,
        payload: Payload,
        *,
        timeout: float,
        tree: Tree,
        server_id: str,
        report: asyncio.Future[PushReport],
    ) -> None:
        # Without a deadline: what is bounded is the time in which nothing of it moves, not the size of the weights.
        call, progress = stub.PushWeights(), _Progress(tree)
        again: asyncio.Queue[int] = asyncio.Queue()
        writer = asyncio.create_task(self._write(call, self._messages(payload, again, tree), progress))
        reader = asyncio.create_task(self._read(call, payload, again, progress, server_id=server_id, report=report))
        tasks = (reader, writer)
        try:
            await _both(reader, writer, progress, timeout)
        except (PushRefused, TimeoutError, grpc.aio.AioRpcError) as error:
            if not report.done():  # else the others hear that their stream is over
                report.set_exception(error)
        except Exception as error:  # noqa: BLE001  a fault of ours: it ends the run
            self._fail(error)
            if not report.done():
                report.set_exception(error)
        finally:
            tree.end()
            call.cancel()
            for task in tasks:
                task.cancel()
            for left in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(left, Exception) and not isinstance(left, PushRefused | grpc.RpcError):
                    self._fail(left)

    async def _read(
        self,
        call: Any,
        payload: Payload,
        again: asyncio.Queue[int],
        progress: "_Progress",
        *,
        server_id: str,
        report: asyncio.Future[PushReport],
    ) -> None:
        tree, resent, began = progress.tree, 0, time.monotonic()
        while not (report.done() and tree.over):
            reply = await call.read()
            progress.moved()
            if reply is grpc.aio.EOF:  # with status OK: any other is raised by read()
                raise PushRefused("the server ended the push without a word")
            if reply is None:
                raise PushRefused("the server answered what cannot be decoded")
            kind = reply.WhichOneof("kind")
            if kind == "applied" and not report.done():
                # A server of before that field says nothing; it was dialled, so it is not asked for it.
                if server_id and reply.applied.server_id not in ("", server_id):
                    raise PushRefused("another process took it: the server was started anew")
                seconds = time.monotonic() - began
                report.set_result(self._report(payload, reply.applied, resent=resent, seconds=seconds))
            elif kind == "refused":
                raise PushRefused(reply.refused)
            elif kind == "full_sync":
                raise FullSyncNeeded(reply.full_sync)
            elif kind == "relayed":
                tree.relayed(reply.relayed)
            elif kind != "resend" or reply.resend >= payload.chunks:
                raise PushRefused(f"the server answered {kind} {reply.resend}")
            else:
                resent += 1
                if resent > RESENDS * payload.chunks:
                    raise PushRefused(f"{resent} chunks arrived damaged")
                again.put_nowait(reply.resend)

    def _report(self, payload: Payload, applied: pb.WeightReply.Applied, *, resent: int, seconds: float) -> PushReport:
        target = codec.version_from_proto(payload.header.target)
        if codec.version_from_proto(applied.version) != target:
            raise PushRefused(f"the server applied version {applied.version.step} instead of {target.step}")
        told = (applied.staging_seconds, applied.checking_seconds, applied.pause_seconds)
        if not all(math.isfinite(value) and value >= 0 for value in told):
            raise PushRefused(f"the server applied it in {told} s")
        return PushReport(
            step=target.step,
            sparse=payload.is_delta,
            payload_bytes=payload.bytes,
            resent_chunks=resent,
            seconds=seconds,
            transfer_seconds=applied.staging_seconds,
            staging_seconds=applied.checking_seconds,
            pause_seconds=applied.pause_seconds,
        )

    async def _payload(self, base: int | None, step: int, source: Source) -> Payload:
        key = (base, step)
        if key not in self._payloads:
            make = self._dense(step, source) if base is None else self._sparse(base, step, source)
            self._payloads[key] = asyncio.create_task(make)
            self._payloads[key].add_done_callback(self._ended)
        # Shielded: one server's end must not take the payload from the others.
        return await asyncio.shield(self._payloads[key])

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _sparse(self, base: int, step: int, source: Source) -> Payload:
        """A delta where there is one."""
        delta = await self._deltas.between(base, step)
        if delta is None:
            return await self._payload(None, step, source)
        return payload_lib.sparse(self._incarnation.value, delta, chunk_bytes=self._chunk_bytes)

    async def _dense(self, step: int, source: Source) -> Payload:
        digests = await self._deltas.digests(step)

        def make() -> Payload:
            tensors = source() if callable(source) else source
            version = codec.Version(self._incarnation.value, step)
            return payload_lib.dense(version, tensors, digests, chunk_bytes=self._chunk_bytes)

        return await asyncio.get_running_loop().run_in_executor(self._staging, make)

    async def _messages(
        self, payload: Payload, again: asyncio.Queue[int], tree: Tree
    ) -> AsyncGenerator[pb.WeightMessage | Chunk, None]:
        header = payload.header
        if tree.hops:
            header = pb.WeightHeader()
            header.CopyFrom(payload.header)
            header.relays.extend(tree.hops)
        yield pb.WeightMessage(header=header)
        for index in range(payload.chunks):
            yield payload.chunk(index)
            while not again.empty():
                yield payload.chunk(again.get_nowait())
        yield pb.WeightMessage(commit=True)
        while True:
            yield payload.chunk(await again.get())

    async def _write(self, call: Any, messages: AsyncGenerator[pb.WeightMessage | Chunk, None], progress: "_Progress"):
        """Until cancelled, or until the call is over: its last reply or its status says why."""
        async with contextlib.aclosing(messages):
            async for message in messages:
                try:
                    await call.write(message)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return
                self.sent_bytes += message.size if isinstance(message, Chunk) else 0
                progress.moved()


def _log_fault(error: BaseException) -> None:
    _log.error("a version could not be sent", exc_info=error)


class _Progress:
    """When something of a stream moved last."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.moved()

    def moved(self) -> None:
        self.at = time.monotonic()
        self.tree.moved()


async def _both(reader: asyncio.Task[None], writer: asyncio.Task[None], progress: _Progress, timeout: float) -> None:
    """Returns when the reader does. Raises what either raises, TimeoutError where nothing moves for `timeout` s."""
    while not reader.done():
        left = progress.at + timeout - time.monotonic()
        if left <= 0:
            raise TimeoutError
        waited_for = {reader} if writer.done() else {reader, writer}
        await asyncio.wait(waited_for, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if writer.done():
            writer.result()
    reader.result()

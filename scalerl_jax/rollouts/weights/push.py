"""One version of the weights on its way to one server, and through that one to the others of its tree.

The push is over when that server decodes with the version; the stream goes on until the others do, or have been lost:
what they wait for must not keep this one from its next version. Nothing here has a deadline but this: a stream of which
nothing moves for `timeout` seconds is over, whatever the size of the weights.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.weight_stream import THEIRS, FullSyncNeeded, PushRefused, WeightStream, both, refusal
from scalerl_jax.rollouts.weights.payload import Payload
from scalerl_jax.rollouts.weights.relay_tree import Tree


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


def report_of(payload: Payload, applied: pb.WeightReply.Applied, *, resent: int, seconds: float) -> PushReport:
    """Raises PushRefused where a server says what cannot be."""
    target = codec.version_from_proto(payload.header.target)
    if codec.version_from_proto(applied.version) != target:
        raise PushRefused(f"the server applied version {applied.version.step} instead of {target.step}")
    told = (applied.staging_seconds, applied.checking_seconds, applied.pause_seconds)
    if not all(math.isfinite(value) and value >= 0 for value in told):
        raise PushRefused(f"the server applied it in {told} s")
    return PushReport(target.step, payload.is_delta, payload.bytes, resent, seconds, *told)


async def together(own: "asyncio.Future[PushReport]", others: Coroutine[Any, Any, list[PushReport]]) -> PushReport:
    """Of the pushes of all parts of a version. Raises what the first of them fails with; the others are given up."""
    asked = asyncio.ensure_future(others)
    both: set[asyncio.Future[Any]] = {own, asked}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        faults = [fault for one in (own, asked) if one.done() and (fault := one.exception()) is not None]
        if faults:
            raise next((fault for fault in faults if isinstance(fault, FullSyncNeeded)), faults[0])
        reports = [own.result(), *asked.result()]
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    return dataclasses.replace(
        reports[0],
        payload_bytes=sum(report.payload_bytes for report in reports),
        resent_chunks=sum(report.resent_chunks for report in reports),
        seconds=max(report.seconds for report in reports),
        transfer_seconds=max(report.transfer_seconds for report in reports),
    )


class Push:
    """`report` comes when the server is through; or PushRefused, TimeoutError, AioRpcError, or a fault of ours."""

    def __init__(self, payload: Payload, *, tree: Tree, server_id: str, timeout: float):
        """server_id: of the process that is to take it; empty: not known."""
        self._payload, self._tree, self._server_id, self._timeout = payload, tree, server_id, timeout
        self.report: asyncio.Future[PushReport] = asyncio.get_running_loop().create_future()
        self._began = time.monotonic()
        self._moved()

    def _moved(self) -> None:
        """Something went out, or came back."""
        self._moved_at = time.monotonic()
        self._tree.moved()

    async def run(self, stub: Stub, *, sent: Callable[[int], None], fail: Callable[[BaseException], None]) -> None:
        """sent: told of the bytes of payload that went out. fail: told of a fault of ours."""
        call = stub.PushWeights()
        stream = WeightStream(call, self._payload)

        def over() -> None:
            self._tree.end()
            call.cancel()

        try:
            await both(
                self._read(stream),
                self._write(call, stream, sent),
                left=lambda: self._moved_at + self._timeout - time.monotonic(),
                end=over,
            )
        except Exception as error:  # noqa: BLE001  told to whoever waits; a fault of ours ends the run
            if not isinstance(error, THEIRS):
                fail(error)
            if not self.report.done():  # else the others hear that their stream is over
                self.report.set_exception(error)

    async def _read(self, stream: WeightStream) -> None:
        tree, report = self._tree, self.report
        async with contextlib.aclosing(stream.replies()) as replies:
            async for kind, reply in replies:
                self._moved()
                if kind == "applied" and not report.done():
                    # A server of before that field says nothing; it was dialled, so it is not asked for it.
                    if self._server_id and reply.applied.server_id not in ("", self._server_id):
                        raise PushRefused("another process took it: the server was started anew")
                    seconds = time.monotonic() - self._began
                    report.set_result(report_of(self._payload, reply.applied, resent=stream.resent, seconds=seconds))
                elif kind == "relayed":
                    tree.relayed(reply.relayed)
                elif kind != "resend":
                    raise refusal(kind, reply)
                if report.done() and tree.over:
                    return
        raise PushRefused("the server ended the push without a word")

    async def _write(self, call: Any, stream: WeightStream, sent: Callable[[int], None]) -> None:
        """Until cancelled, or until the call is over: its last reply or its status says why."""
        async with contextlib.aclosing(stream.messages(self._tree.relays)) as messages:
            async for message in messages:
                try:
                    await call.write(message)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return
                sent(message.size if isinstance(message, Chunk) else 0)
                self._moved()

"""Sends calls as they are, bytes for bytes, many at once, and says how each of them ended."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator

import grpc

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.limits import CHANNEL_OPTIONS
from scalerl_jax.contract.rpc import SERVICE
from tests.hostile.rpc_generator import CANCEL, FIRST, REFLECTION, UNREAD, Call

SECONDS = 300.0  # deadline of a call; none of them takes long on a machine that is not loaded
UNREAD_SECONDS = 0.02
# gRPC's client says so by itself where a call was over before the last message was out; no server says it.
CUT_SHORT = "Internal error from Core"
# A push is over with one of these: its client then ends the call.
LAST = ("applied", "refused", "full_sync")


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: grpc.StatusCode
    details: str
    replies: tuple[bytes, ...]


class Sender:
    """On the running event loop."""

    def __init__(self, address: str):
        # No limit here: it is the server's that counts.
        options = [o for o in CHANNEL_OPTIONS if "message_length" not in o[0]]
        self._channel = grpc.aio.insecure_channel(address, options=[*options, ("grpc.max_send_message_length", -1)])

    async def close(self) -> None:
        await self._channel.close()

    async def unary(self, method: str, message: bytes) -> bytes:
        """The reply to a good call."""
        return await self._channel.unary_unary(f"/{SERVICE}/{method}")(message, timeout=SECONDS)

    async def send(self, call: Call) -> Outcome:
        stream = call.path == REFLECTION or call.path.endswith(("/PushWeights", "/ScoreMany"))
        single = call.path.endswith(("/Status", "/Score", "/Check")) or call.path.endswith(("/Nothing", "/a/b"))
        if single:
            going = self._channel.unary_unary(call.path)(call.messages[0], timeout=SECONDS)
        elif stream:
            going = self._channel.stream_stream(call.path)(timeout=SECONDS)
        else:
            going = self._channel.unary_stream(call.path)(call.messages[0], timeout=SECONDS)
        writer = asyncio.create_task(_write(going, call.messages)) if stream else None
        replies: list[bytes] = []
        try:
            if call.then == CANCEL:
                going.cancel()
            elif call.then == UNREAD:
                await asyncio.sleep(UNREAD_SECONDS)
                going.cancel()
            else:
                replies = [reply async for reply in _replies(going, single, call)]
        except grpc.aio.AioRpcError as error:
            return _outcome(error.code(), error.details(), replies)
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.wait({writer})
        with contextlib.suppress(asyncio.CancelledError):
            return _outcome(await going.code(), await going.details(), replies)
        return _outcome(grpc.StatusCode.CANCELLED, "", replies)


def _outcome(code: grpc.StatusCode, details: str | None, replies: list[bytes]) -> Outcome:
    if code is grpc.StatusCode.INTERNAL and details == CUT_SHORT:
        code = grpc.StatusCode.CANCELLED
    return Outcome(code, details or "", tuple(replies))


async def _write(going: grpc.aio.StreamStreamCall, messages: tuple[bytes, ...]) -> None:
    """The call may be over before all is written; what it ended with is read elsewhere."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in messages:
            await going.write(message)
        await going.done_writing()


async def _replies(going: grpc.aio.Call, single: bool, call: Call) -> AsyncIterator[bytes]:
    if single:
        yield await going
        return
    while (reply := await going.read()) is not grpc.aio.EOF:
        yield reply
        ended = call.path.endswith("/PushWeights") and pb.WeightReply.FromString(reply).WhichOneof("kind") in LAST
        if call.then == FIRST or ended:
            going.cancel()
            return


async def send_all(address: str, calls: Iterator[Call], *, at_once: int = 12) -> AsyncIterator[tuple[Call, Outcome]]:
    """In the order in which they end. Three connections, so that no single one orders all of them."""
    senders = [Sender(address) for _ in range(3)]
    done: asyncio.Queue[tuple[Call, Outcome] | None] = asyncio.Queue()

    async def work(sender: Sender) -> None:
        try:
            for call in calls:
                done.put_nowait((call, await sender.send(call)))
        finally:
            done.put_nowait(None)

    workers = [asyncio.create_task(work(senders[n % len(senders)])) for n in range(at_once)]
    try:
        left = at_once
        while left:
            item = await asyncio.wait_for(done.get(), SECONDS * 2)
            if item is None:
                left -= 1
            else:
                yield item
        await asyncio.gather(*workers)  # raises what ended one of them
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for sender in senders:
            await sender.close()

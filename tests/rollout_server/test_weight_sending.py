"""The sender's end of a stream of weights, without a wire."""

import asyncio
import types

import pytest

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.weight_stream import PushRefused, WeightStream, both

CHUNKS = types.SimpleNamespace(
    header=pb.WeightHeader(), chunks=4, chunk=lambda index: types.SimpleNamespace(index=index)
)


class Call:
    """What the other end says, in order; then nothing more."""

    def __init__(self, *resends: int):
        self._replies = [pb.WeightReply(resend=index) for index in resends]

    async def read(self):
        if not self._replies:
            await asyncio.Event().wait()
        return self._replies.pop(0)


async def sent(stream: WeightStream, count: int) -> list[int | str]:
    """The first messages: "header", "commit", or the number of a chunk."""
    found: list[int | str] = []
    async for message in stream.messages([]):
        kind = message.WhichOneof("kind") if isinstance(message, pb.WeightMessage) else message.index
        found.append(kind)
        if len(found) == count:
            break
    return found


async def test_what_is_asked_for_again_comes_in_between_unless_it_has_not_gone_out():
    stream = WeightStream(Call(3, 0), CHUNKS)
    replies = stream.replies()
    for _ in range(2):
        assert (await anext(replies))[0] == "resend"
    assert await sent(stream, 7) == ["header", 0, 0, 1, 2, 3, "commit"]


async def test_a_chunk_that_there_is_not_is_refused():
    with pytest.raises(PushRefused, match="it asks for chunk 4 of 4"):
        await anext(WeightStream(Call(4), CHUNKS).replies())


async def test_a_fault_of_ours_is_told_though_the_reply_comes_at_once():
    ended = []

    async def refused():
        raise PushRefused("theirs")

    async def broken():
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        await both(refused(), broken(), end=lambda: ended.append(True))
    with pytest.raises(PushRefused, match="theirs"):
        await both(refused(), refused())
    assert ended == [True]

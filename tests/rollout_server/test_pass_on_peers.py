"""A version on its way to servers that answer oddly, slowly or not at all, and for clients that do not read."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from rollout_server import pass_on
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.guard import Unread
from scalerl_jax.rollouts import trees
from tests.rollout_server.passing import MakeReplay, fate, fleet, header_to, published


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given up for being slow, which on a loaded machine anybody may be."""
    monkeypatch.setattr(pass_on, "PATIENCE_SECONDS", 60.0)


def sentence(address: str, reply: Callable[[str], list[bytes]], status: bytes) -> grpc.GenericRpcHandler:
    """A server of the same service that answers with these bytes, whatever it is sent."""

    async def say(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for answer in reply(address):
            yield answer
        async for _ in messages:
            pass

    async def meet(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return status

    methods = {
        "Status": grpc.unary_unary_rpc_method_handler(meet),
        "PushWeights": grpc.stream_stream_rpc_method_handler(say),
    }
    return grpc.method_handlers_generic_handler("scalerl.v1.Rollout", methods)


@contextlib.asynccontextmanager
async def saying(reply: Callable[[str], list[bytes]], *, status: bytes = b"") -> AsyncIterator[str]:
    """The address of one that answers a version with these bytes."""
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.add_generic_rpc_handlers((sentence(address, reply, status),))
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@pytest.mark.parametrize("place", ["Status", "PushWeights"])
async def test_one_that_answers_what_cannot_be_decoded_is_lost(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    odd = b"\xff"
    async with fleet(make_replay, 1) as (servers, run):
        await published(run, servers)
        async with saying(lambda _: [odd], status=odd if place == "Status" else b"") as address:
            replies = await header_to(servers[0], run, pb.Hop(address=address))
        said = {"Status": pass_on.NOT_MET, "PushWeights": "it answers what cannot be decoded"}
        assert fate(replies, address).lost == said[place]
        run.compare(servers[0])
    gc.collect()
    assert not unheard


async def test_what_says_nothing_of_a_server_settles_nothing(make_replay: MakeReplay) -> None:
    def reply(address: str) -> list[bytes]:
        passed = pb.WeightReply.Passed(address=address)
        empty = pb.WeightReply(passed=passed)
        passed.refused = "in words"
        return [empty.SerializeToString(), pb.WeightReply(passed=passed).SerializeToString()]

    async with fleet(make_replay, 1) as (servers, run), saying(reply) as address:
        await published(run, servers)
        assert fate(await header_to(servers[0], run, pb.Hop(address=address)), address).refused == "in words"


async def test_a_client_that_reads_nothing_leaves_no_exception_behind(
    make_replay: MakeReplay, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be told who was not reached."""
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))

    async def unread(reply: pb.WeightReply) -> None:
        raise Unread

    async with fleet(make_replay, 1) as (servers, run):
        await published(run, servers)
        one = pass_on.PassOn(pb.Hop(address="192.0.2.1:80"), None, reply=unread, timeout=60)
        await asyncio.wait({one.task})
        del one
    gc.collect()
    assert not unheard
    assert "passing on to 192.0.2.1:80 failed: Unread" in caplog.text


async def test_a_tree_hears_nothing_in_what_says_nothing() -> None:
    places = [trees.Place("a:1"), trees.Place("b:1")]
    tree = trees.Tree(places)
    tree.passed(pb.WeightReply.Passed(address="b:1"))
    assert not tree.over and not places[1].outcome.done()

"""A version on its way to servers that answer oddly, slowly or not at all, and for clients that do not read."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import ml_dtypes
import pytest

from rollout_server import relay
from rollout_server.guard import Unread
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk
from scalerl_jax.contract.codec import Version
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.weights import relay_tree
from tests.rollout_server.client import INCARNATION, SECONDS, Push
from tests.rollout_server.passing import MakeReplay, fate, fleet, header_to, published
from tests.support.ports import nowhere
from tests.support.waiting import eventually_async


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given up for being slow, which on a loaded machine anybody may be."""
    monkeypatch.setattr(relay, "PATIENCE_SECONDS", SECONDS)


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
            replies = await header_to(servers[0], run, pb.Relay(address=address))
        said = {"Status": relay.NOT_MET, "PushWeights": "it answers what cannot be decoded"}
        assert fate(replies, address).lost == said[place]
        run.compare(servers[0])
    gc.collect()
    assert not unheard


async def test_what_says_nothing_of_a_server_settles_nothing(make_replay: MakeReplay) -> None:
    def reply(address: str) -> list[bytes]:
        relayed = pb.WeightReply.Relayed(address=address)
        empty = pb.WeightReply(relayed=relayed)
        relayed.refused = "in words"
        return [empty.SerializeToString(), pb.WeightReply(relayed=relayed).SerializeToString()]

    async with fleet(make_replay, 1) as (servers, run), saying(reply) as address:
        await published(run, servers)
        assert fate(await header_to(servers[0], run, pb.Relay(address=address)), address).refused == "in words"


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
        one = relay.Relay(pb.Relay(address="192.0.2.1:80"), None, reply=unread, timeout=SECONDS)
        await asyncio.wait({one.task})
        del one
    gc.collect()
    assert not unheard
    assert "passing on to 192.0.2.1:80 failed: Unread" in caplog.text


@pytest.mark.parametrize(
    ("address", "server_id"),
    [("dns:foo:7000", ""), ("ipv4:10.0.0.5:7000", ""), ("[fe80::1%eth0]:7000", ""), ("here:7000", "x" * 200)],
)
async def test_one_that_no_header_may_name_is_sent_to_directly(address: str, server_id: str) -> None:
    """Named in a header, it would have the leader refuse the version."""
    gathered = relay_tree.Trees()
    async with contextlib.AsyncExitStack() as stack:
        joining = (Process("a:1", "a"), Process("b:1", "b"), Process(address, server_id), Process("c:1", "c"))
        places = await asyncio.gather(
            *(stack.enter_async_context(gathered.join((0, 1), one)) for one in joining),
            return_exceptions=False,
        )
        alone = places[2]
        assert alone.tree is not None and not alone.tree.relays
        assert [hop.address for hop in places[1].tree.relays] == ["c:1"]  # the first of all had nobody to wait for
        for place in (places[0], places[1]):
            place.tree.end()


async def test_a_tree_hears_nothing_in_what_says_nothing() -> None:
    places = [relay_tree.Member(Process(f"{name}:1", "")) for name in "ab"]
    tree = relay_tree.Tree(places)
    tree.relayed(pb.WeightReply.Relayed(address="b:1"))
    assert not tree.over and not places[1].outcome.done()


class Link:
    """A server's way to those it passes versions on to: each chunk waits for `gate`, and is noted as it leaves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gate: Callable[[int], Awaitable[None]]):
        made = relay.Stub

        class Slow(made):  # type: ignore[misc, valid-type]
            def __init__(self, channel: grpc.aio.Channel):
                super().__init__(channel)
                push = self.PushWeights

                def slowed(**options: Any) -> Any:
                    call = push(**options)
                    write = call.write

                    async def wait_and_write(message: Any) -> None:
                        if isinstance(message, Chunk):
                            await gate(message.index)
                        await write(message)

                    call.write = wait_and_write
                    return call

                self.PushWeights = slowed

        monkeypatch.setattr(relay, "Stub", Slow)


async def test_what_comes_is_read_at_the_pace_of_the_slowest_link(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the sender sees nothing move for as long as those behind still need, and serves them by itself."""
    monkeypatch.setattr(relay, "MOST_BEHIND", 4)
    monkeypatch.setattr(relay, "HOLD_SECONDS", 600.0)
    ahead: list[int] = []  # chunks that are here when one leaves
    async with fleet(make_replay, 2) as (servers, run):
        await published(run, servers)

        async def slow(index: int) -> None:
            await asyncio.sleep(0.005)
            staging = servers[0].server.service._weights.store._staging
            ahead.append(staging.chunks - staging.waiting - index)

        Link(monkeypatch, slow)
        address = f"127.0.0.1:{servers[1].server.port}"
        replies = await header_to(servers[0], run, pb.Relay(address=address))
        assert fate(replies, address).HasField("applied")
        for served in servers:
            run.compare(served)
    assert len(ahead) > 40
    assert max(ahead) <= 5  # and one that is being read


async def test_a_server_that_takes_nothing_holds_up_nobody(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MOST_BEHIND", 4)
    monkeypatch.setattr(relay, "HOLD_SECONDS", 0.2)
    go = asyncio.Event()
    async with fleet(make_replay, 2) as (servers, run):
        await published(run, servers)

        async def stuck(index: int) -> None:
            if index == 10:
                await go.wait()

        Link(monkeypatch, stuck)
        address = f"127.0.0.1:{servers[1].server.port}"
        push = asyncio.create_task(header_to(servers[0], run, pb.Relay(address=address)))
        await eventually_async(
            lambda: servers[0].engine.status().version.step == run.step
            # All of it is here, and applied.
        )
        assert not push.done()
        go.set()
        assert fate(await push, address).HasField("applied")
        run.compare(servers[1])


@pytest.mark.parametrize("over", ["not reached", "refuses"])
async def test_one_that_is_over_is_not_waited_for(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    monkeypatch.setattr(relay, "MOST_BEHIND", 4)
    monkeypatch.setattr(relay, "HOLD_SECONDS", 600.0)
    no = pb.WeightReply(refused="no").SerializeToString()
    async with fleet(make_replay, 1) as (servers, run), saying(lambda _: [no]) as one:
        await published(run, servers)
        with nowhere() as away:
            address = away if over == "not reached" else one
            relayed = fate(await header_to(servers[0], run, pb.Relay(address=address)), address)
        assert (relayed.lost == relay.NOT_MET) if over == "not reached" else (relayed.refused == "no")
        run.compare(servers[0])


async def test_a_chunk_that_comes_late_is_waited_for_by_nobody_but_those_behind(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be sent what is here before it is, so reading goes on."""
    monkeypatch.setattr(relay, "MOST_BEHIND", 4)
    monkeypatch.setattr(relay, "HOLD_SECONDS", 600.0)
    async with fleet(make_replay, 2) as (servers, run):
        await published(run, servers)
        address = f"127.0.0.1:{servers[1].server.port}"
        whole = {name: tensor.view(ml_dtypes.bfloat16) for name, tensor in run.held.items()}
        version, hop = Version(INCARNATION, run.step), pb.Relay(address=address)
        push = Push(
            *(servers[0].stub, version, whole),
            chunk_bytes=500,
            flip_bit_of=frozenset({0, 7}),
            forget=frozenset({3, 50}),
            change=lambda header: header.relays.append(hop),
        )
        await push.send_header()
        await push.send_chunks()
        await push.send_commit()
        while (reply := await push.call.read()).relayed.WhichOneof("kind") != "applied":
            if reply.WhichOneof("kind") == "resend":
                await push.send_chunk(reply.resend)
        for served in servers:
            await eventually_async(lambda served=served: served.engine.status().version.step == run.step)
            run.compare(served)
        push.call.cancel()

"""A fleet is fed by one stream out of the trainer, and by others where a link of it is broken."""

import asyncio
import contextlib
import gc
import itertools
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest

from rollout_server import hops as hops_lib
from rollout_server import pass_on, weight_push
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.codec import Version
from rollout_server.contract.security import PLAIN, Access, Credentials, server_credentials
from rollout_server.contract.weight_patch import Change, Patch, digest, encode
from rollout_server.engines.replay_engine import ReplayEngine
from rollout_server.guard import Unread
from scalerl_jax.rollouts import trees
from scalerl_jax.rollouts.publisher import AnchorNeeded, Publisher, PushRefused, PushReport
from tests.rollout_server.certificates import Authority
from tests.rollout_server.client import INCARNATION, Served, serving
from tests.rollout_server.standstill import hold_loading

MakeReplay = Callable[..., ReplayEngine]
SERVERS = 8


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given up for being slow, which on a loaded machine anybody may be, before a push's deadline."""
    for module in (trees, pass_on):
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(trees, "AVOID_SECONDS", 600.0)


class Run:
    """Versions that differ a little from one to the next, and a publisher of them."""

    def __init__(self, engine: ReplayEngine):
        rng = np.random.default_rng(0)
        self.shapes = dict(engine.info.tensors)
        self.held = {name: rng.integers(0, 2**15, shape).astype(np.uint16) for name, shape in self.shapes.items()}
        self.rng, self.step = rng, -1
        self.publisher = Publisher(incarnation=INCARNATION, chunk_bytes=500, patch_bytes=2**24)

    @property
    def dense_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.held.values())

    def publish(self) -> int:
        """Makes the next version; the bytes of its patch."""
        self.step += 1
        parts = {}
        for name, tensor in self.held.items():
            positions = np.flatnonzero(self.rng.random(tensor.size) < 0.02)
            tensor.reshape(-1)[positions] ^= 1
            parts[name] = encode(Change(positions, tensor.reshape(-1)[positions]))
        base = self.step - 1 if self.step else None
        digests = {name: digest(tensor) for name, tensor in self.held.items()}
        patch = Patch(base, self.step, parts if self.step else {}, digests, self.shapes)
        whole = {name: tensor.copy().view(ml_dtypes.bfloat16) for name, tensor in self.held.items()}
        self.publisher.record(self.step, lambda: patch)
        self.publisher.offer(self.step, whole)
        return patch.nbytes

    async def push(self, served: Served, base: int | None, address: str = "", server_id: str = "") -> PushReport:
        address = address or f"127.0.0.1:{served.server.port}"
        return await self.publisher.push(
            *(served.stub, self.step),
            base=base,
            timeout=30,
            address=address,
            server_id=server_id or served.server.service.server_id,
        )

    def compare(self, served: Served) -> None:
        assert served.engine.status().version == Version(INCARNATION, self.step)
        for name, tensor in self.held.items():
            assert served.engine.weights[name].tobytes() == tensor.tobytes()


@contextlib.asynccontextmanager
async def fleet(make_replay: MakeReplay, count: int = SERVERS, *trust: Any) -> AsyncIterator[tuple[list[Served], Run]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(serving(make_replay(wire_dtype="bfloat16"), *trust)) for _ in range(count)
        ]
        run = Run(servers[0].engine)
        stack.callback(run.publisher.close)
        yield servers, run


async def all_of(run: Run, servers: list[Served], base: int | None) -> list[PushReport]:
    reports = await asyncio.gather(*(run.push(served, base) for served in servers))
    for served in servers:
        run.compare(served)
    return reports


async def test_what_leaves_the_trainer_does_not_grow_with_the_fleet(make_replay: MakeReplay) -> None:
    async with fleet(make_replay) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        assert run.publisher.sent_bytes == 2 * run.dense_bytes  # the first of all had nobody to wait for
        for _ in range(5):
            before = run.publisher.sent_bytes
            size = run.publish()
            reports = await all_of(run, servers, run.step - 1)
            assert run.publisher.sent_bytes - before == size
            assert all(report.sparse and report.payload_bytes == size for report in reports)


@pytest.mark.parametrize("may", [True, False])
async def test_servers_show_each_other_certificate_and_token(
    make_replay: MakeReplay, tmp_path: pathlib.Path, may: bool
) -> None:
    """Without an authority for the others' certificates a server passes nothing on; then each gets its own stream."""
    authority = Authority(tmp_path, "ours")
    certificate, key = (path.read_bytes() for path in authority.sign("server"))
    signed = authority.certificate.read_bytes()
    shown = Credentials(signed, certificate, key, token="a token for this test")
    access = Access(
        server_credentials(certificate, key, signed), True, token=shown.token, passing=shown if may else None
    )
    async with fleet(make_replay, 4, access, shown) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        before, size = run.publisher.sent_bytes, run.publish()
        await all_of(run, servers, 0)
        assert run.publisher.sent_bytes - before == (size if may else 4 * size)


def test_the_tree_has_everyone_once_and_is_not_deep() -> None:
    async def build(count: int) -> tuple[list[str], int]:
        tree = trees.Tree([trees.Place(f"s{i}") for i in range(count)])

        def depth(hop) -> int:
            return 1 + max((depth(further) for further in hop.pass_on), default=0)

        def names(hop) -> list[str]:
            assert len(hop.pass_on) <= trees.FAN_OUT
            return [hop.address, *itertools.chain(*(names(further) for further in hop.pass_on))]

        found = list(itertools.chain(*(names(hop) for hop in tree.hops)))
        return found, max((depth(hop) for hop in tree.hops), default=0)

    for count in (1, 2, 3, 8, 64):
        found, deep = asyncio.run(build(count))
        assert sorted(found) == sorted(f"s{i}" for i in range(1, count))
        assert deep <= np.log2(count)


@pytest.mark.parametrize("broken", [1, 2, 7])
async def test_a_server_that_others_cannot_reach_is_served_directly(make_replay: MakeReplay, broken: int) -> None:
    """In the middle of the tree (1, 2) those behind it are cut off too; at its end (7) nobody else is."""
    async with fleet(make_replay) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        size, before = run.publish(), run.publisher.sent_bytes
        addresses = [f"127.0.0.1:{served.server.port}" for served in servers]
        addresses[broken] = "127.0.0.1:1"  # nobody listens there
        await asyncio.gather(*(run.push(s, run.step - 1, address) for s, address in zip(servers, addresses)))
        for served in servers:
            run.compare(served)
        behind = {1: 4, 2: 3, 7: 1}[broken]  # of eight, with two each
        assert run.publisher.sent_bytes - before == size * (1 + behind)
        # They are left out for a while; the others still make a tree.
        size, before = run.publish(), run.publisher.sent_bytes
        await asyncio.gather(*(run.push(s, run.step - 1, address) for s, address in zip(servers, addresses)))
        assert run.publisher.sent_bytes - before == size * (1 + behind)


async def test_one_that_needs_another_version_does_not_hold_up_the_rest(make_replay: MakeReplay) -> None:
    async with fleet(make_replay, 4) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        servers[1].server.service._weights.store._buffer[77] ^= 1  # a bit flips in its memory
        run.publish()
        results = await asyncio.gather(*(run.push(s, run.step - 1) for s in servers), return_exceptions=True)
        assert [isinstance(result, AnchorNeeded) for result in results] == [False, True, False, False]
        assert not (await run.push(servers[1], None)).sparse
        for served in servers:
            run.compare(served)


async def test_a_root_that_refuses_leaves_the_others_to_another_tree(make_replay: MakeReplay) -> None:
    async with fleet(make_replay, 4) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        servers[0].server.service._weights.store.held = None
        size, before = run.publish(), run.publisher.sent_bytes
        results = await asyncio.gather(*(run.push(s, run.step - 1) for s in servers), return_exceptions=True)
        assert [isinstance(result, AnchorNeeded) for result in results] == [True, False, False, False]
        assert run.publisher.sent_bytes - before <= 2 * size
        for served in servers[1:]:
            run.compare(served)


async def test_a_server_that_is_slow_to_take_it_holds_up_nobody(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(make_replay, 4) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        go = hold_loading(servers[1].engine, monkeypatch)
        run.publish()
        pushes = [asyncio.create_task(run.push(served, 0)) for served in servers]
        await asyncio.wait({pushes[0], pushes[2], pushes[3]})
        run.publish()
        others = [servers[0], *servers[2:]]
        await all_of(run, others, 1)
        assert not pushes[1].done()
        go.set()
        assert (await pushes[1]).step == 1
        await run.push(servers[1], 1)
        run.compare(servers[1])


async def test_one_that_goes_on_to_another_dense_version_says_whom_it_has_left(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was passing on lies where the other version goes, so it stops at once. The end of its call comes late."""
    monkeypatch.setattr(weight_push, "DRAIN_SECONDS", 600.0)
    async with fleet(make_replay, 2) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        go = hold_loading(servers[1].engine, monkeypatch)
        run.publish()
        before = run.publisher.sent_bytes
        pushes = [asyncio.create_task(run.push(served, None)) for served in servers]
        await pushes[0]
        assert run.publisher.sent_bytes - before == run.dense_bytes
        run.publish()
        assert (await run.push(servers[0], None)).step == 2
        go.set()
        assert (await pushes[1]).step == 1  # from the trainer
        await run.push(servers[1], None)
        for served in servers:
            run.compare(served)


async def test_a_frozen_server_in_the_middle_is_routed_around(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and what fits into it, and says nothing."""
    for module in (trees, pass_on):
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 1.0)

    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with fleet(make_replay, 6) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        frozen = await asyncio.start_server(silence, "127.0.0.1", 0)
        port = frozen.sockets[0].getsockname()[1]
        run.publish()
        addresses = [f"127.0.0.1:{served.server.port}" for served in servers]
        addresses[1] = f"127.0.0.1:{port}"
        # A push that waited for the frozen one would fail at its deadline.
        await asyncio.gather(*(run.push(s, run.step - 1, address) for s, address in zip(servers, addresses)))
        for served in servers:
            run.compare(served)
        frozen.close()


async def test_alone_a_server_does_not_wait_for_others() -> None:
    gathered = trees.Trees()
    async with gathered.join((0, 1), "here:1") as place:
        assert place.tree is not None and place.tree.over


async def header_to(served: Served, run: Run, *hops: pb.Hop) -> list[pb.WeightReply]:
    """What a server answers to the newest version, sent whole, that it is to pass on to these; until all is known."""
    payload = await run.publisher._payload(None, run.step, lambda: pytest.fail("it is there already"))
    header = pb.WeightHeader.FromString(payload.header.SerializeToString())
    header.pass_on.extend(hops)
    call = served.stub.PushWeights(timeout=60)
    await call.write(pb.WeightMessage(header=header))
    replies: list[pb.WeightReply] = []
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it may end the call before
        for index in range(payload.chunks):
            await call.write(payload.chunk(index))
        await call.write(pb.WeightMessage(commit=True))
    waiting = len(hops) + 1
    while waiting and (reply := await call.read()) is not grpc.aio.EOF:
        replies.append(reply)
        waiting -= reply.WhichOneof("kind") == "applied"
        waiting -= reply.WhichOneof("kind") == "passed" and not reply.passed.HasField("staged")
        if reply.WhichOneof("kind") in ("refused", "anchor"):
            break
    call.cancel()
    return replies


def fate(replies: list[pb.WeightReply], address: str) -> pb.WeightReply.Passed:
    (passed,) = [r.passed for r in replies if r.passed.address == address and not r.passed.HasField("staged")]
    return passed


async def published(run: Run, servers: list[Served]) -> None:
    run.publish()
    await all_of(run, servers, None)
    run.publish()
    await run.publisher._payload(None, run.step, run.publisher._sources[run.step])


async def test_a_version_is_passed_on_to_the_process_that_is_named_and_to_no_other(make_replay: MakeReplay) -> None:
    async with fleet(make_replay, 3) as (servers, run):
        await published(run, servers)
        addresses = [f"127.0.0.1:{served.server.port}" for served in servers]
        right = pb.Hop(address=addresses[1], server_id=servers[1].server.service.server_id)
        other = pb.Hop(address=addresses[2], server_id="of a process that was there before")
        replies = await header_to(servers[0], run, right, other)
        assert fate(replies, addresses[1]).applied.server_id == right.server_id
        assert fate(replies, addresses[2]).lost == pass_on.NOT_MET
        assert servers[2].engine.status().version.step == run.step - 1
        run.compare(servers[1])


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


async def test_a_server_does_not_pass_a_version_on_to_itself(make_replay: MakeReplay) -> None:
    async with fleet(make_replay, 1) as (servers, run):
        await published(run, servers)
        itself = f"localhost:{servers[0].server.port}"
        replies = await header_to(servers[0], run, pb.Hop(address=itself))
        assert fate(replies, itself).lost == pass_on.NOT_MET
        run.compare(servers[0])


async def test_who_took_it_is_asked_for_by_name(make_replay: MakeReplay) -> None:
    """What the trainer thinks is there has been started anew: neither the stream nor the tree counts for it."""
    async with fleet(make_replay, 3) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        run.publish()
        gone = "of a process that was there before"
        pushes = [run.push(served, None, server_id=gone * (served is servers[2])) for served in servers]
        results = await asyncio.gather(*pushes, return_exceptions=True)
        assert [isinstance(result, PushRefused) for result in results] == [False, False, True]
        assert "another process took it" in str(results[2])


@pytest.mark.parametrize("address", ["192.0.2.1:80", "example.org:443", "[2001:db8::1]:80", "0.0.0.0:80", "127.1:80"])
async def test_without_tls_nobody_beyond_this_machine_is_dialled(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(pass_on, "connect", lambda *_: pytest.fail("dialled"))
    async with fleet(make_replay, 1) as (servers, run):
        await published(run, servers)
        replies = await header_to(servers[0], run, pb.Hop(address=address))
        assert fate(replies, address).lost
        run.compare(servers[0])


@pytest.mark.parametrize("there", ["nobody", "without TLS", "of another authority"])
async def test_with_tls_nobody_learns_what_listens_where(
    make_replay: MakeReplay, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """The same words after the same time; and the token goes to none of them."""
    monkeypatch.setattr(pass_on, "PATIENCE_SECONDS", 3.0)
    authority, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    shown, access = trusted(authority)
    seen = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.read())
        writer.close()

    async with fleet(make_replay, 1, access, shown) as (servers, run), contextlib.AsyncExitStack() as stack:
        await published(run, servers)
        if there == "of another authority":
            theirs = trusted(others)
            there_served = await stack.enter_async_context(serving(make_replay(), theirs[1], theirs[0]))
            address = f"127.0.0.1:{there_served.server.port}"
        else:
            listener = await asyncio.start_server(listen, "127.0.0.1", 0)
            address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            if there == "nobody":
                listener.close()
                await listener.wait_closed()
        began = asyncio.get_running_loop().time()
        replies = await header_to(servers[0], run, pb.Hop(address=address))
        assert fate(replies, address).lost == pass_on.NOT_MET
        assert asyncio.get_running_loop().time() - began >= 2.9
        assert shown.token.encode() not in seen


def trusted(authority: Authority) -> tuple[Credentials, Access]:
    """What a member of the fleet shows, and whom it lets in."""
    certificate, key = (path.read_bytes() for path in authority.sign("member"))
    signed = authority.certificate.read_bytes()
    shown = Credentials(signed, certificate, key, token="a token for this test")
    return shown, Access(server_credentials(certificate, key, signed), True, token=shown.token, passing=shown)


def row(count: int) -> list[pb.Hop]:
    return [pb.Hop(address=f"127.0.0.1:{port + 1}") for port in range(count)]


def chain(depth: int) -> list[pb.Hop]:
    hops: list[pb.Hop] = []
    for port in range(depth):
        hops = [pb.Hop(address=f"127.0.0.1:{port + 1}", pass_on=hops)]
    return hops


def bush(fan_out: int, depth: int) -> list[pb.Hop]:
    below = bush(fan_out, depth - 1) if depth > 1 else []
    return [pb.Hop(address="127.0.0.1:1", pass_on=below) for _ in range(fan_out)]


@pytest.mark.parametrize(
    ("hops", "told"),
    [
        (row(20_000), "20000 servers behind one, at most 8"),
        (row(9), "9 servers behind one, at most 8"),
        ([pb.Hop(address="a:1", pass_on=row(9))], "9 servers behind one"),
        (chain(17), "behind each other, more than 16"),
        (bush(8, 4), "more than 4096 servers"),
        ([pb.Hop(address="unix:///run/docker.sock")], "is not host:port"),
        ([pb.Hop(address="dns:///example.org:80")], "is not host:port"),
        ([pb.Hop(address="a b:80")], "is not host:port"),
        ([pb.Hop(address="host:0")], "is not host:port"),
        ([pb.Hop(address="x" * 300 + ":1")], "is not host:port"),
        ([pb.Hop(address="a:1", server_id="x" * 200)], "server_id of 200"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_header_with_too_many_hops_is_refused_before_anything_is_made_of_it(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch, hops: list[pb.Hop], told: str
) -> None:
    monkeypatch.setattr("rollout_server.weight_push.PassOn", lambda *_, **__: pytest.fail("made"))
    async with fleet(make_replay, 1) as (servers, run):
        await published(run, servers)
        replies = await header_to(servers[0], run, *hops)
        assert told in replies[-1].refused
        assert len(replies[-1].refused) < 1024
        assert servers[0].engine.status().version.step == run.step - 1


def test_the_largest_tree_that_a_trainer_makes_is_within_the_bounds() -> None:
    async def build() -> list[pb.Hop]:
        return trees.Tree([trees.Place(f"server-{i}.fleet.example:8000", "f" * 32) for i in range(4000)]).hops

    hops_lib.check(asyncio.run(build()))
    hops_lib.check(chain(16))
    hops_lib.check(bush(8, 3))


BEYOND = hops_lib.parse_beyond("10.0.0.0/8, fd00::/8, gen.example, .pods.example, 192.0.2.7")
TLS = Credentials(b"an authority", token="a token")


@pytest.mark.parametrize(
    ("credentials", "beyond", "yes", "no"),
    [
        (PLAIN, None, "127.0.0.1:1 127.9.9.9:1 [::1]:1 localhost:1", "10.1.1.1:1 gen.example:1 [fd00::1]:1"),
        (Credentials(token="a token"), None, "127.0.0.1:1", "10.1.1.1:1"),
        (
            PLAIN,
            BEYOND,
            "10.1.1.1:1 gen.example:1 GEN.example:1 a.pods.example:1 192.0.2.7:1",
            "11.1.1.1:1 x.example:1",
        ),
        (Credentials(token="a token"), BEYOND, "127.0.0.1:1", "10.1.1.1:1"),
        (
            TLS,
            None,
            "10.1.1.1:1 gen.example:1 [fd00::1]:1 127.0.0.1:1",
            "0.0.0.0:1 169.254.169.254:1 224.0.0.1:1 [::]:1",
        ),
        (TLS, BEYOND, "10.1.1.1:1 [fd00::1]:1 [::1]:1", "11.1.1.1:1 agen.example:1 pods.example:1 [::ffff:11.1.1.1]:1"),
        (None, BEYOND, "", "127.0.0.1:1 10.1.1.1:1"),
    ],
)
def test_whom_a_server_dials(credentials: Credentials | None, beyond: Any, yes: str, no: str) -> None:
    reach = hops_lib.Reach(credentials, beyond)
    assert [reach.why_not(address) for address in yes.split()] == [""] * len(yes.split())
    assert all(reach.why_not(address) for address in no.split())


@pytest.mark.parametrize("text", ["10.0.0.0/33", "10.0.0.1/8", "a b", "host:80", "1.2.3", "-x", "*.example"])
def test_hosts_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="neither a host name nor a network"):
        hops_lib.parse_beyond(text)

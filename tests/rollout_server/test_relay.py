"""A fleet is fed by one stream out of the trainer, and by others where a link of it is broken."""

import asyncio
import contextlib
import itertools
import pathlib
import time
import types

import numpy as np
import pytest

from rollout_server import reach, relay, weight_push
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.security import Access, Credentials, server_credentials
from scalerl_jax.contract.weight_stream import FullSyncNeeded, PushRefused
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.weights import relay_tree
from tests.rollout_server.certificates import Authority
from tests.rollout_server.client import SECONDS, serving
from tests.rollout_server.passing import MakeReplay, all_of, fate, fleet, header_to, published
from tests.rollout_server.pause_decoding import pause_loading
from tests.support.ports import nowhere


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given up for being slow, which on a loaded machine anybody may be, before a push's deadline."""
    for module in (relay_tree, relay):
        monkeypatch.setattr(module, "PATIENCE_SECONDS", SECONDS)
    monkeypatch.setattr(relay_tree, "AVOID_SECONDS", 600.0)


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
        tree = relay_tree.Tree([relay_tree.Member(Process(f"s{i}", "")) for i in range(count)])

        def depth(hop) -> int:
            return 1 + max((depth(further) for further in hop.relays), default=0)

        def names(hop) -> list[str]:
            assert len(hop.relays) <= relay_tree.FAN_OUT
            return [hop.address, *itertools.chain(*(names(further) for further in hop.relays))]

        found = list(itertools.chain(*(names(hop) for hop in tree.relays)))
        return found, max((depth(hop) for hop in tree.relays), default=0)

    for count in (1, 2, 3, 8, 64):
        found, deep = asyncio.run(build(count))
        assert sorted(found) == sorted(f"s{i}" for i in range(1, count))
        assert deep <= np.log2(count)


@pytest.mark.parametrize("broken", [1, 2, 7])
async def test_a_server_that_others_cannot_reach_is_served_directly(make_replay: MakeReplay, broken: int) -> None:
    """In the middle of the tree (1, 2) those behind it are cut off too; at its end (7) nobody else is."""
    async with fleet(make_replay) as (servers, run), contextlib.AsyncExitStack() as stack:
        run.publish()
        await all_of(run, servers, None)
        size, before = run.publish(), run.publisher.sent_bytes
        addresses = [f"127.0.0.1:{served.server.port}" for served in servers]
        addresses[broken] = stack.enter_context(nowhere())
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
        assert [isinstance(result, FullSyncNeeded) for result in results] == [False, True, False, False]
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
        assert [isinstance(result, FullSyncNeeded) for result in results] == [True, False, False, False]
        assert run.publisher.sent_bytes - before <= 2 * size
        for served in servers[1:]:
            run.compare(served)


async def test_a_server_that_is_slow_to_take_it_holds_up_nobody(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(make_replay, 4) as (servers, run):
        run.publish()
        await all_of(run, servers, None)
        go = pause_loading(servers[1].engine, monkeypatch)
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
        go = pause_loading(servers[1].engine, monkeypatch)
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
    for module in (relay_tree, relay):
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
    gathered = relay_tree.Trees()
    async with gathered.join((0, 1), Process("here:1", "")) as place:
        assert place.tree is not None and place.tree.over


async def test_a_version_is_passed_on_to_the_process_that_is_named_and_to_no_other(make_replay: MakeReplay) -> None:
    async with fleet(make_replay, 3) as (servers, run):
        await published(run, servers)
        addresses = [f"127.0.0.1:{served.server.port}" for served in servers]
        right = pb.Relay(address=addresses[1], server_id=servers[1].server.service.server_id)
        other = pb.Relay(address=addresses[2], server_id="of a process that was there before")
        replies = await header_to(servers[0], run, right, other)
        assert fate(replies, addresses[1]).applied.server_id == right.server_id
        assert fate(replies, addresses[2]).lost == relay.NOT_MET
        assert servers[2].engine.status().version.step == run.step - 1
        run.compare(servers[1])


async def test_a_server_does_not_pass_a_version_on_to_itself(make_replay: MakeReplay) -> None:
    async with fleet(make_replay, 1) as (servers, run):
        await published(run, servers)
        itself = f"localhost:{servers[0].server.port}"
        replies = await header_to(servers[0], run, pb.Relay(address=itself))
        assert fate(replies, itself).lost == relay.NOT_MET
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
    monkeypatch.setattr(relay, "connect", lambda *_: pytest.fail("dialled"))
    async with fleet(make_replay, 1) as (servers, run):
        await published(run, servers)
        replies = await header_to(servers[0], run, pb.Relay(address=address))
        assert fate(replies, address).lost
        run.compare(servers[0])


class Instead:
    """A module, but for some of its names."""

    def __init__(self, module: types.ModuleType, **names: object):
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


@pytest.mark.parametrize("there", ["nobody", "without TLS", "of another authority"])
async def test_with_tls_nobody_learns_what_listens_where(
    make_replay: MakeReplay, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """The same words after the same time; and the token goes to none of them."""
    until: list[float] = []

    async def sleep(seconds: float) -> None:
        until.append(time.monotonic() + seconds)

    monkeypatch.setattr(relay, "asyncio", Instead(asyncio, sleep=sleep))
    authority, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    shown, access = trusted(authority)
    seen = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")  # no TLS at all, and at once
        with contextlib.suppress(ConnectionError):
            seen.extend(await reader.read())
        writer.close()

    async with fleet(make_replay, 1, access, shown) as (servers, run), contextlib.AsyncExitStack() as stack:
        await published(run, servers)
        if there == "of another authority":
            theirs = trusted(others)
            there_served = await stack.enter_async_context(serving(make_replay(), theirs[1], theirs[0]))
            address = f"127.0.0.1:{there_served.server.port}"
        elif there == "nobody":
            address = stack.enter_context(nowhere())
        else:
            listener = await stack.enter_async_context(await asyncio.start_server(listen, "127.0.0.1", 0))
            address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        began = time.monotonic()
        replies = await header_to(servers[0], run, pb.Relay(address=address))
        assert fate(replies, address).lost == relay.NOT_MET
        (told,) = until  # when it was told, had it slept
        assert began + relay.PATIENCE_SECONDS <= told <= time.monotonic() + relay.PATIENCE_SECONDS
        assert shown.token.encode() not in seen


def trusted(authority: Authority) -> tuple[Credentials, Access]:
    """What a member of the fleet shows, and whom it lets in."""
    certificate, key = (path.read_bytes() for path in authority.sign("member"))
    signed = authority.certificate.read_bytes()
    shown = Credentials(signed, certificate, key, token="a token for this test")
    return shown, Access(server_credentials(certificate, key, signed), True, token=shown.token, passing=shown)


def row(count: int) -> list[pb.Relay]:
    return [pb.Relay(address=f"127.0.0.1:{port + 1}") for port in range(count)]


def chain(depth: int) -> list[pb.Relay]:
    hops: list[pb.Relay] = []
    for port in range(depth):
        hops = [pb.Relay(address=f"127.0.0.1:{port + 1}", relays=hops)]
    return hops


def bush(fan_out: int, depth: int) -> list[pb.Relay]:
    below = bush(fan_out, depth - 1) if depth > 1 else []
    return [pb.Relay(address="127.0.0.1:1", relays=below) for _ in range(fan_out)]


@pytest.mark.parametrize(
    ("hops", "told"),
    [
        (row(20_000), "20000 servers behind one, at most 8"),
        (row(9), "9 servers behind one, at most 8"),
        ([pb.Relay(address="a:1", relays=row(9))], "9 servers behind one"),
        (chain(17), "behind each other, more than 16"),
        (bush(8, 4), "more than 4096 servers"),
        ([pb.Relay(address="unix:///run/docker.sock")], "is not host:port"),
        ([pb.Relay(address="dns:///example.org:80")], "is not host:port"),
        ([pb.Relay(address="a b:80")], "is not host:port"),
        ([pb.Relay(address="host:0")], "is not host:port"),
        ([pb.Relay(address="x" * 300 + ":1")], "is not host:port"),
        ([pb.Relay(address="a:1", server_id="x" * 200)], "server_id of 200"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_header_with_too_many_hops_is_refused_before_anything_is_made_of_it(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch, hops: list[pb.Relay], told: str
) -> None:
    monkeypatch.setattr("rollout_server.weight_push.Relay", lambda *_, **__: pytest.fail("made"))
    async with fleet(make_replay, 1) as (servers, run):
        await published(run, servers)
        replies = await header_to(servers[0], run, *hops)
        assert told in replies[-1].refused
        assert len(replies[-1].refused) < 1024
        assert servers[0].engine.status().version.step == run.step - 1


def test_the_largest_tree_that_a_trainer_makes_is_within_the_bounds() -> None:
    async def build() -> list[pb.Relay]:
        return relay_tree.Tree(
            [relay_tree.Member(Process(f"server-{i}.fleet.example:8000", "f" * 32)) for i in range(4000)]
        ).relays

    reach.check(asyncio.run(build()))
    reach.check(chain(16))
    reach.check(bush(8, 3))

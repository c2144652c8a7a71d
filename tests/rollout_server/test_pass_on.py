"""A fleet is fed by one stream out of the trainer, and by others where a link of it is broken."""

import asyncio
import contextlib
import itertools
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rollout_server import pass_on, weight_push
from rollout_server.contract.codec import Version
from rollout_server.contract.security import Access, Credentials, server_credentials
from rollout_server.contract.weight_patch import Change, Patch, digest, encode
from rollout_server.engines.replay_engine import ReplayEngine
from scalerl_jax.rollouts import trees
from scalerl_jax.rollouts.publisher import AnchorNeeded, Publisher, PushReport
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

    async def push(self, served: Served, base: int | None, address: str = "") -> PushReport:
        address = address or f"127.0.0.1:{served.server.port}"
        return await self.publisher.push(served.stub, self.step, base=base, timeout=30, address=address)

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

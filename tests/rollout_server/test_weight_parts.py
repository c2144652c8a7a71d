"""A version in parts, from several hosts of one trainer: it becomes whole when all are there, or nothing changes."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.weight_store import BaseNotHeld, WeightStore
from scalerl_jax.contract.codec import Version
from scalerl_jax.contract.weight_delta import Change, WeightDelta, encode
from scalerl_jax.contract.weight_parts import Block, Blocks, Part, check_cover
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.weights import payload as payload_lib
from scalerl_jax.rollouts.weights.host_parts import PartPublisher, PartPush, Parts
from scalerl_jax.rollouts.weights.payload import Payload
from scalerl_jax.rollouts.weights.publisher import Incarnation, Publisher
from scalerl_jax.rollouts.weights.push import Push, PushRefused, PushReport
from tests.rollout_server.client import INCARNATION, SECONDS, Served, serving
from tests.rollout_server.test_weight_store import SHAPES, bits, info, new_buffer
from tests.support.replay.engine import ReplayEngine
from tests.support.waiting import eventually_async

Tensors = dict[str, np.ndarray]


# ------------------------------------------------------------------------------------------ how hosts hold a tensor


def cut(shape: tuple[int, ...], luck: random.Random, pieces: int) -> list[tuple[slice, ...]]:
    """Boxes that are the tensor: one is cut in two, again and again."""
    boxes = [tuple(slice(0, size) for size in shape)] if all(shape) else []
    for _ in range(pieces - 1):
        divisible = [(i, d) for i, box in enumerate(boxes) for d, part in enumerate(box) if part.stop - part.start > 1]
        if not divisible:
            break
        i, d = luck.choice(divisible)
        box = boxes.pop(i)
        at = luck.randrange(box[d].start + 1, box[d].stop)
        boxes += [(*box[:d], slice(*ends), *box[d + 1 :]) for ends in ((box[d].start, at), (at, box[d].stop))]
    return boxes


def terms(tensor: np.ndarray) -> np.ndarray:
    """Of each element, what it adds to the digest: rollout.proto, to the letter."""

    def f(x: np.ndarray) -> np.ndarray:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return x ^ (x >> 16)

    if not tensor.size:
        return np.zeros(tensor.shape, np.uint64)
    values = tensor.view(np.uint16).astype(np.uint64)
    columns = tensor.shape[-1] if tensor.ndim else 1
    place = np.arange(tensor.size, dtype=np.uint64).reshape(tensor.shape)
    a, b = f((place // columns) ^ 0x9E3779B9) | 1, f((place % columns) ^ 0x7F4A7C15)
    x = (values * a + b) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    return x ^ (x >> 15)


@dataclasses.dataclass
class Hosts:
    """Which boxes of each tensor each host holds."""

    boxes: list[dict[str, list[tuple[slice, ...]]]]

    @classmethod
    def drawn(cls, shapes: dict[str, tuple[int, ...]], count: int, luck: random.Random, pieces: int = 5) -> "Hosts":
        every: list[dict[str, list[tuple[slice, ...]]]] = [{name: [] for name in shapes} for _ in range(count)]
        for name, shape in shapes.items():
            for box in cut(shape, luck, pieces):
                luck.choice(every)[name].append(box)
        return cls(every)

    @property
    def count(self) -> int:
        return len(self.boxes)

    def blocks(self, host: int, tensors: Tensors) -> dict[str, Blocks]:
        return {
            name: tuple(Block(tuple(p.start for p in box), np.array(tensors[name][box])) for box in boxes)
            for name, boxes in self.boxes[host].items()
        }

    def digests(self, host: int, tensors: Tensors) -> dict[str, int]:
        return {
            name: int(sum(terms(tensors[name])[box].sum() for box in boxes)) & 0xFFFFFFFF
            for name, boxes in self.boxes[host].items()
        }

    def delta(
        self, host: int, old: Tensors, new: Tensors, *, base: int, step: int, dense: Sequence[str]
    ) -> WeightDelta:
        parts = {}
        for name, boxes in self.boxes[host].items():
            if name in dense:
                parts[name] = self.blocks(host, new)[name]
                continue
            here = np.zeros(new[name].shape, bool)
            for box in boxes:
                here[box] = True
            differs = here & (old[name].view(np.uint16) != new[name].view(np.uint16))
            positions = np.flatnonzero(differs)
            parts[name] = encode(Change(positions, new[name].reshape(-1)[positions].view(np.uint16)))
        shapes = {name: tensor.shape for name, tensor in new.items()}
        return WeightDelta(base, step, parts, self.digests(host, new), shapes)

    def dense(self, host: int, tensors: Tensors, dtype: str, *, step: int) -> Payload:
        return payload_lib.dense_part(
            Version(5, step), self.blocks(host, tensors), self.digests(host, tensors) if dtype == "bfloat16" else {},
            dtype=dtype, shapes={name: tensor.shape for name, tensor in tensors.items()}, part=Part(host, self.count),
            chunk_bytes=64,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the host copy


def staged(store: WeightStore, payloads: Sequence[Payload], held: Version) -> list:
    stagings = []
    for payload in payloads:
        store.check(payload.header, held)
        store.check_base(payload.header)
        staging = store.stage(payload.header)
        for index in range(payload.chunks):
            assert staging.put(payload.chunk(index)) is True
        stagings.append(staging)
    return stagings


@given(
    sync_dtype=st.sampled_from(["float32", "bfloat16"]),
    hosts=st.integers(2, 5),
    share=st.sampled_from([0.0, 0.1, 0.4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_parts_are_the_version(sync_dtype: str, hosts: int, share: float, seed: int) -> None:
    luck, rng = random.Random(seed), np.random.default_rng(seed)
    store, cuts = WeightStore(info(sync_dtype), new_buffer), Hosts.drawn(SHAPES, hosts, luck)
    old = bits(sync_dtype, seed)
    parts = staged(store, [cuts.dense(host, old, sync_dtype, step=1) for host in range(hosts)], Version(5, 0))
    luck.shuffle(parts)
    arrived, changes = store.finish(*parts)
    store.held = Version(5, 1)
    assert changes == dict.fromkeys(SHAPES)
    assert {name: tensor.tobytes() for name, tensor in arrived.items()} == {n: t.tobytes() for n, t in old.items()}
    if sync_dtype == "float32":
        return
    new = {name: tensor.copy() for name, tensor in old.items()}
    for tensor in new.values():
        flat = tensor.reshape(-1).view(np.uint16)
        flat[rng.random(flat.size) < share] ^= 1
    # Each host decides by itself what is sent whole; "scale" is sparse on some hosts, and not on others.
    dense = [["scale"] if luck.random() < 0.3 else [] for _ in range(hosts)]
    deltas = [cuts.delta(h, old, new, base=1, step=2, dense=dense[h]) for h in range(hosts)]
    payloads = [payload_lib.sparse(5, delta, chunk_bytes=7, part=Part(h, hosts)) for h, delta in enumerate(deltas)]
    arrived, changes = store.finish(*staged(store, payloads, Version(5, 1)))
    assert {name: tensor.tobytes() for name, tensor in arrived.items()} == {n: t.tobytes() for n, t in new.items()}
    for name, change in changes.items():
        if change is not None:
            differs = np.flatnonzero(old[name].view(np.uint16) != new[name].view(np.uint16))
            np.testing.assert_array_equal(change.positions, differs)


def two_hosts() -> tuple[WeightStore, Hosts, Tensors]:
    """And the copy holds a version."""
    store, cuts, old = (
        WeightStore(info("bfloat16"), new_buffer),
        Hosts.drawn(SHAPES, 2, random.Random(3)),
        bits("bfloat16", 1),
    )
    store.finish(*staged(store, [cuts.dense(host, old, "bfloat16", step=1) for host in range(2)], Version(5, 0)))
    store.held = Version(5, 1)
    return store, cuts, old


def copy_of(store: WeightStore) -> bytes:
    assert store._buffer is not None
    return store._buffer.tobytes()


def test_parts_that_do_not_go_together_change_nothing() -> None:
    store, cuts, old = two_hosts()
    before = copy_of(store)
    new = {name: tensor.copy() for name, tensor in old.items()}
    new["embed"].view(np.uint16)[:, 0] ^= 1
    deltas = [cuts.delta(host, old, new, base=1, step=2, dense=[]) for host in range(2)]

    def finish(*deltas: WeightDelta) -> None:
        store.held = Version(5, 1)
        payloads = [payload_lib.sparse(5, delta, chunk_bytes=64, part=Part(i, 2)) for i, delta in enumerate(deltas)]
        store.finish(*staged(store, payloads, Version(5, 1)))

    with pytest.raises(BaseNotHeld, match="two parts change the same element"):
        finish(deltas[0], deltas[0] if deltas[0].changed else deltas[1])
    assert copy_of(store) == before
    lying = dataclasses.replace(deltas[1], digests={**deltas[1].digests, "embed": deltas[1].digests["embed"] ^ 1})
    with pytest.raises(BaseNotHeld, match="tensor embed: its digest is not that of"):
        finish(deltas[0], lying)
    assert copy_of(store) == before
    finish(*deltas)
    assert copy_of(store) != before


@pytest.mark.parametrize("twice", [True, False])
def test_blocks_that_are_not_the_tensor_are_refused(twice: bool) -> None:
    """Some elements come twice, or not at all; the sum of sizes alone would not tell."""
    store, cuts, old = two_hosts()
    before, held = copy_of(store), store.held
    payloads = [cuts.dense(0, old, "bfloat16", step=2), cuts.dense(1 - twice, old, "bfloat16", step=2)]
    if not twice:
        halves = [[(slice(0, 3), slice(0, 3))], [(slice(1, 3), slice(0, 3))]]  # of 5 rows: 3, and 2 of the same
        wrong = Hosts([{**cuts.boxes[host], "embed": halves[host]} for host in range(2)])
        payloads = [wrong.dense(host, old, "bfloat16", step=2) for host in range(2)]
    parts = staged(store, payloads, Version(5, 1))
    with pytest.raises(ValueError, match="the parts' blocks of tensor"):
        store.finish(*parts)
    assert (copy_of(store), store.held) == (before, held)


@pytest.mark.parametrize(
    ("boxes", "told"),
    [
        ([([0, 0], [5, 3])], ""),
        ([([0, 0], [2, 3]), ([2, 0], [3, 3])], ""),
        ([([0, 0], [2, 3])], "blocks of 6 elements, the tensor has 15"),
        ([([0, 0], [2, 3]), ([1, 0], [3, 3])], "overlap the one at"),
        ([([0], [5])], "a block of 1 and 1 dimensions in a tensor of 2"),
        ([([3, 0], [3, 3])], r"a block at \[3, 0\] of \[3, 3\]"),
        ([([0, 0], [0, 3])], r"of \[0, 3\] in a tensor"),
    ],
)
def test_the_blocks_of_a_tensor(boxes: list, told: str) -> None:
    with pytest.raises(ValueError, match=told) if told else contextlib.nullcontext():
        check_cover(boxes, (5, 3))


# --------------------------------------------------------------------------------------- hosts, servers and gRPC


class Trainer:
    """The publishing half of a trainer of several hosts, each with its publisher."""

    def __init__(self, engine: ReplayEngine, count: int):
        luck, self.rng = random.Random(0), np.random.default_rng(0)
        self.shapes = dict(engine.info.tensors)
        self.hosts = Hosts.drawn(self.shapes, count, luck)
        self.held = {
            name: self.rng.integers(0, 2**15, shape).astype(np.uint16).view(ml_dtypes.bfloat16)
            for name, shape in self.shapes.items()
        }
        self.step, self.kept = -1, (0, [])
        self.lost: set[int] = set()  # hosts that send nothing
        self.channels: dict = {}
        self.publisher = Publisher(
            incarnation=Incarnation(INCARNATION),
            chunk_bytes=500,
            delta_bytes=2**24,
            parts=Parts(Part(0, count), "bfloat16", self.shapes, push=self._push, keep=self._keep),
        )
        self.others = [
            PartPublisher(
                Part(index, count), dtype="bfloat16", shapes=self.shapes, connect=self.channels.__getitem__,
                chunk_bytes=300, delta_bytes=2**24, to_host=asyncio.to_thread,
            )
            for index in range(1, count)
        ]  # fmt: skip

    async def _push(self, wanted: PartPush) -> list[PushReport]:
        every = [other.push(wanted) for index, other in enumerate(self.others, 1) if index not in self.lost]
        if self.lost:
            every.append(asyncio.Event().wait())
        return await asyncio.gather(*every)

    def _keep(self, until: int, steps: list[int]) -> None:
        self.kept = (until, steps)
        for other in self.others:
            other.keep(until, steps)

    def publish(self, share: float = 0.02) -> None:
        old, self.step = {name: tensor.copy() for name, tensor in self.held.items()}, self.step + 1
        for tensor in self.held.values():
            tensor.reshape(-1).view(np.uint16)[self.rng.random(tensor.size) < share] ^= 1
        new = {name: tensor.copy() for name, tensor in self.held.items()}
        for host, publisher in enumerate([self.publisher, *self.others]):
            delta = self.hosts.delta(host, old, new, base=self.step - 1, step=self.step, dense=[])
            if self.step == 0:
                delta = dataclasses.replace(delta, base=None, tensors={})
            if host == 0:
                self.publisher.deltas.record(self.step, lambda delta=delta: delta)
            else:
                publisher.publish(self.step, lambda host=host: self.hosts.blocks(host, new), lambda delta=delta: delta)
        self.publisher.publish(self.step, lambda: self.hosts.blocks(0, new))

    async def push(self, served: Served, base: int | None, timeout: float = SECONDS) -> PushReport:
        process = Process(f"127.0.0.1:{served.server.port}", served.server.service.server_id)
        self.channels[process.address] = served.stub
        return await self.publisher.push(served.stub, self.step, process, base=base, timeout=timeout)

    def compare(self, served: Served) -> None:
        assert served.engine.status().version == Version(INCARNATION, self.step)
        for name, tensor in self.held.items():
            assert served.engine.weights[name].tobytes() == tensor.tobytes(), name

    def close(self) -> None:
        for publisher in (self.publisher, *self.others):
            publisher.close()


@contextlib.asynccontextmanager
async def trained(make_replay: Callable[..., ReplayEngine], *, servers: int, hosts: int) -> AsyncIterator[tuple]:
    async with contextlib.AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(serving(make_replay(sync_dtype="bfloat16"))) for _ in range(servers)]
        trainer = Trainer(fleet[0].engine, hosts)
        stack.callback(trainer.close)
        yield trainer, fleet


@pytest.mark.parametrize(("servers", "hosts"), [(1, 2), (1, 4), (5, 3), (1, 17)])
async def test_a_fleet_is_kept_up_by_several_hosts(make_replay, servers: int, hosts: int) -> None:
    """Dense, then deltas; of more servers than one some get all parts from others."""
    async with trained(make_replay, servers=servers, hosts=hosts) as (trainer, fleet):
        for base in (None, 0, 1, 2):
            trainer.publish()
            reports = await asyncio.gather(*(trainer.push(served, base) for served in fleet))
            assert [report.sparse for report in reports] == [base is not None] * servers
            for served in fleet:
                trainer.compare(served)
        assert trainer.kept == (3, [3])
        assert all(set(other._sources) == {3} for other in trainer.others)


async def test_one_that_missed_some_versions_gets_their_deltas_at_once(make_replay) -> None:
    async with trained(make_replay, servers=1, hosts=3) as (trainer, (served,)):
        trainer.publish()
        await trainer.push(served, None)
        for _ in range(3):
            trainer.publish()
        report = await trainer.push(served, 0)
        assert report.sparse
        trainer.compare(served)


async def test_a_part_that_does_not_come_leaves_the_weights_and_the_next_push_is_whole(make_replay) -> None:
    async with trained(make_replay, servers=1, hosts=3) as (trainer, (served,)):
        trainer.publish()
        await trainer.push(served, None)
        held = served.engine.status().version
        trainer.publish()
        trainer.lost = {2}
        with pytest.raises(TimeoutError):
            await trainer.push(served, 0, timeout=0.5)
        assert served.engine.status().version == held
        trainer.lost = set()
        assert (await trainer.push(served, 0)).sparse
        trainer.compare(served)


async def test_a_host_without_the_delta_has_the_version_sent_whole(make_replay) -> None:
    async with trained(make_replay, servers=1, hosts=2) as (trainer, (served,)):
        trainer.publish()
        await trainer.push(served, None)
        trainer.publish()
        trainer.others[0]._deltas._deltas.clear()
        with pytest.raises(PushRefused, match="there is no delta from version 0 to 1"):
            await trainer.push(served, 0)
        assert not (await trainer.push(served, None)).sparse
        trainer.compare(served)


async def test_a_push_that_is_given_up_leaves_the_payload_to_the_others(make_replay) -> None:
    async with trained(make_replay, servers=2, hosts=2) as (trainer, fleet):
        trainer.publish()
        asked, made, go = [], [], asyncio.Event()

        async def to_host(make: Callable[[], dict]) -> dict:
            made.append(make)
            await go.wait()
            return make()

        push, trainer.others[0]._to_host = trainer.others[0].push, to_host
        trainer.others[0].push = lambda wanted: asked.append(wanted) or push(wanted)
        given_up, other = (asyncio.create_task(trainer.push(served, None)) for served in fleet)
        await eventually_async(lambda: len(asked) == 2 and made)
        given_up.cancel()
        await asyncio.wait([given_up])
        again = asyncio.create_task(trainer.push(fleet[0], None))
        await eventually_async(lambda: len(asked) == 3)
        go.set()
        await asyncio.gather(other, again)
        assert len(made) == 1
        for served in fleet:
            trainer.compare(served)


async def test_a_payload_that_failed_is_made_again(make_replay) -> None:
    async with trained(make_replay, servers=1, hosts=2) as (trainer, (served,)):
        trainer.publish()
        to_host = trainer.others[0]._to_host

        async def fails(make: Callable[[], dict]) -> dict:
            raise PushRefused("no memory")

        trainer.others[0]._to_host = fails
        with pytest.raises(PushRefused, match="no memory"):
            await trainer.push(served, None)
        trainer.others[0]._to_host = to_host
        await trainer.push(served, None)
        trainer.compare(served)


async def test_a_newer_version_takes_the_place_of_parts_that_wait(make_replay) -> None:
    async with trained(make_replay, servers=1, hosts=2) as (trainer, (served,)):
        trainer.publish()
        await trainer.push(served, None)
        trainer.publish()
        trainer.lost = {1}
        waiting = asyncio.create_task(trainer.push(served, 0))
        receiver = served.server.service._weights
        await eventually_async(lambda: receiver._receiving is not None and receiver._receiving.parts_missing == 1)
        trainer.publish()
        trainer.lost = set()
        await trainer.push(served, 0)
        with pytest.raises(PushRefused, match="another push of step 2 took its place"):
            await waiting
        trainer.compare(served)


async def test_parts_take_no_more_memory_than_the_weights(make_replay) -> None:
    """Each part alone may be as large as all tensors; one that would be too much with the others is refused."""
    async with trained(make_replay, servers=1, hosts=2) as (trainer, (served,)):
        trainer.publish()
        every = Hosts([{name: cut(shape, random.Random(0), 1) for name, shape in trainer.shapes.items()}] * 2)
        payloads = [every.dense(host, trainer.held, "bfloat16", step=3) for host in range(2)]
        pushes = [Push(served.stub.PushWeights(), payload) for payload in payloads]
        streams = [asyncio.create_task(push.run(server_id="", timeout=SECONDS)) for push in pushes]
        done, _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
        size = sum(tensor.nbytes for tensor in trainer.held.values())
        assert f"parts of {2 * size} bytes together, the tensors take {size}" in str(done.pop().exception())
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

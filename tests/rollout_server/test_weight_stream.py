"""200 versions of a run, through the trainer's publisher and real gRPC into every engine: after each of them the engine
has, bit for bit, the weights that the trainer has, whoever joins, restarts, is lost or damaged on the way."""

import asyncio
import contextlib
import importlib.util
import os
import pathlib
import subprocess
import zlib
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from rollout_server.engines.engine import Engine
from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk
from scalerl_jax.rollouts.weights.payload import Payload
from scalerl_jax.rollouts.weights.publisher import Incarnation, Publisher
from scalerl_jax.rollouts.weights.push import FullSyncNeeded, PushReport
from tests.rollout_server.client import INCARNATION, SECONDS, Served, long_group, serving
from tests.rollout_server.engine_weights import weight_bits
from tests.rollout_server.record_run import EMPTY, UPDATES, Recorded
from tests.support.paths import ROOT
from tests.support.processes import run_python

MakeEngine = Callable[..., Engine]
CHUNK_BYTES = 300  # several in a delta, hundreds in a dense version


def recorded_run(model_folder: pathlib.Path, out: pathlib.Path) -> Recorded:
    command = ["-m", "tests.rollout_server.record_run", str(model_folder), str(out)]
    if importlib.util.find_spec("jax") is not None:
        run_python(*command).check_returncode()
    else:
        python = str(ROOT / os.environ.get("VENV", ".venv") / "bin" / "python")
        subprocess.run([python, *command], check=True, cwd=ROOT)
    return Recorded(str(model_folder), str(out))


@pytest.fixture(scope="session")
def recorded(model_folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded_run(model_folder, tmp_path_factory.mktemp("recorded") / "run.npz")


class Trainer:
    """The publishing half of one, with the recorded versions."""

    def __init__(self, recorded: Recorded, *, incarnation: int = INCARNATION, delta_bytes: int = 2**20):
        self.recorded, self.incarnation, self.step = recorded, incarnation, -1
        self.versions: list[dict] = []
        self.publisher = Publisher(
            incarnation=Incarnation(incarnation),
            chunk_bytes=CHUNK_BYTES,
            delta_bytes=delta_bytes,
            event=self.versions.append,
        )

    def publish(self, step: int, *, first: bool = False) -> None:
        delta = self.recorded.delta(step)
        if first:  # of a trainer that starts anew here: there is nothing to compare it with
            delta = type(delta)(None, step, {}, delta.digests, delta.shapes)
        self.publisher.deltas.record(step, lambda: delta)
        self.publisher.publish(step, lambda: self.whole(step))
        self.step = step

    def whole(self, step: int) -> dict[str, np.ndarray]:
        return {name: bits.view(ml_dtypes.bfloat16) for name, bits in self.recorded.tensors(step).items()}


class Follower:
    """What the trainer knows of one server: which version it holds. Keeps what it was sent."""

    def __init__(self, served: Served):
        self.served, self.base = served, None
        self.reports: list[PushReport] = []
        self.full_syncs = 0  # how often it asked for a dense version

    async def follow(self, trainer: Trainer) -> PushReport:
        """Brings it to the newest version, as Upkeep does, and compares."""
        try:
            report = await trainer.publisher.push(self.served.stub, trainer.step, base=self.base, timeout=SECONDS)
        except FullSyncNeeded:
            self.full_syncs += 1
            report = await trainer.publisher.push(self.served.stub, trainer.step, timeout=SECONDS)
        self.reports.append(report)
        self.base = trainer.step
        await self.compare(trainer)
        return report

    async def compare(self, trainer: Trainer, step: int | None = None) -> None:
        step = trainer.step if step is None else step
        assert self.served.engine.status().version == codec.Version(trainer.incarnation, step)
        held, wanted = await weight_bits(self.served.engine), trainer.recorded.tensors(step)
        assert held.keys() == wanted.keys()
        for name, bits in wanted.items():
            assert held[name].tobytes() == bits.tobytes(), f"{name} of version {step}"

    @property
    def host_copy(self) -> np.ndarray:
        return self.served.server.service._weights.store._buffer


async def decode(served: Served, incarnation: int) -> None:
    """Completions without end; each is asked for anew when the one before it is through."""
    number = 0
    while True:
        number += 1
        wanted = long_group(f"train/{number}", completions=2, tokens=60, incarnation=incarnation)
        await served.generate(wanted)


@pytest.mark.slow
async def test_every_version_of_a_run_arrives_bit_for_bit(make_engine: MakeEngine, recorded: Recorded) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = Follower(await stack.enter_async_context(serving(make_engine(sync_dtype="bfloat16"))))
        trainer, decoding, resent = Trainer(recorded), None, 0
        for step in range(UPDATES + 1):
            trainer.publish(step, first=step == 0)
            if step == 120:  # a bit flips in the server's memory
                first.host_copy[12345] ^= 8
            if step == 140:  # a push is lost on its way; the next one starts from where the server is
                await killed(trainer, first, messages=2)
                continue
            if 150 <= step < 155:  # not reached for a while
                continue
            report = await first.follow(trainer)
            resent += report.resent_chunks
            if step == 10:
                decoding = asyncio.create_task(decode(first.served, trainer.incarnation))
            if step == 100:  # versions have come while it decoded, and go on coming
                await first.served.until(lambda status: status.sampled_tokens > 100)
            if step and step % EMPTY == 0:
                assert report.sparse and report.payload_bytes == 0
        assert decoding is not None and not decoding.done(), decoding
        decoding.cancel()
        # All but the first and the one after the flipped bit were deltas, and small.
        assert [report.step for report in first.reports if not report.sparse] == [0, 120]
        assert first.full_syncs == 1
        sparse = [report for report in first.reports if report.sparse]
        assert len(sparse) >= 0.9 * UPDATES
        assert sum(r.payload_bytes for r in sparse) < 0.1 * len(sparse) * first.host_copy.nbytes


async def killed(trainer: Trainer, follower: Follower, *, messages: int, base: int | None = -1) -> None:
    """A push that ends after so many messages."""
    base = follower.base if base == -1 else base
    payload = await trainer.publisher._payload(base, trainer.step, lambda: trainer.whole(trainer.step))
    assert payload.chunks >= messages
    call = follower.served.stub.PushWeights(timeout=SECONDS)
    await call.write(pb.WeightMessage(header=payload.header))
    for index in range(messages - 1):
        await call.write(payload.chunk(index))
    receiver = follower.served.server.service._weights
    # The header, then the chunks are there.
    while receiver._receiving is None or receiver._receiving.stagings[0].waiting > payload.chunks - (messages - 1):
        await asyncio.sleep(0.005)
    call.cancel()
    while receiver._receiving is not None:
        await asyncio.sleep(0.005)
    await follower.compare(trainer, trainer.step - 1)  # nothing of it has reached the engine


async def test_joins_restarts_and_losses(make_engine: MakeEngine, recorded: Recorded) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = Follower(await stack.enter_async_context(serving(make_engine(sync_dtype="bfloat16"))))
        trainer = Trainer(recorded)
        # 1. A newcomer in the middle of a run: dense, then deltas.
        for step in range(30, 34):
            trainer.publish(step, first=step == 30)
            if step >= 31:
                await server.follow(trainer)
        assert [report.sparse for report in server.reports] == [False, True, True]
        # 2. A dense push is lost in its middle: the host copy is nothing any more, and the server says so.
        trainer.publish(34)
        await killed(trainer, server, messages=5, base=None)
        await server.follow(trainer)
        assert (server.full_syncs, server.reports[-1].sparse) == (1, False)
        # 3. The trainer is started anew, from an older version: no delta leads from one incarnation to the other.
        old, trainer = trainer, Trainer(recorded, incarnation=INCARNATION + 1)
        trainer.publish(20, first=True)
        server.base = None
        await server.follow(trainer)
        with pytest.raises(Exception, match="older"):
            await old.publisher.push(server.served.stub, 34, base=33, timeout=SECONDS)
        trainer.publish(21)
        assert (await server.follow(trainer)).sparse
        # 4. A server that was started anew holds nothing, whatever the trainer thinks.
        again = Follower(await stack.enter_async_context(serving(make_engine(sync_dtype="bfloat16"))))
        again.base = 20
        await again.follow(trainer)
        assert again.full_syncs == 1
        trainer.publish(22)
        assert (await again.follow(trainer)).sparse and (await server.follow(trainer)).sparse


async def test_beyond_the_byte_bound_a_dense_version_goes_out(make_engine: MakeEngine, recorded: Recorded) -> None:
    async with serving(make_engine(sync_dtype="bfloat16")) as served:
        kept = sum(recorded.delta(step).nbytes for step in range(56, 61))
        server, trainer = Follower(served), Trainer(recorded, delta_bytes=kept)
        for step in range(50, 61):
            trainer.publish(step, first=step == 50)
            if step == 50:
                await server.follow(trainer)
            await trainer.publisher.deltas._deltas[step]
        server.base = 55
        payload = await trainer.publisher._payload(55, 60, lambda: trainer.whole(60))
        assert payload.is_delta and payload.bytes <= kept
        server.base = 50
        assert not (await server.follow(trainer)).sparse
        assert server.full_syncs == 0  # known before anything was sent


def damage(monkeypatch: pytest.MonkeyPatch, times: int, *, with_checksum: bool) -> None:
    """The first chunks sent have a bit flipped; their checksum is of the damaged bytes where so wished."""
    good, left = Payload.chunk, [times]

    def chunk(self: Payload, index: int) -> Chunk:
        message = good(self, index)
        if left[0] > 0:
            left[0] -= 1
            data = bytearray(message.data)
            data[-1] ^= 4  # of a value's bits
            crc = zlib.crc32(data) if with_checksum else message.crc32
            message = Chunk(index, (data,), crc)
        return message

    monkeypatch.setattr(Payload, "chunk", chunk)


@pytest.mark.parametrize("with_checksum", [False, True])
async def test_flipped_bits_on_the_way(
    make_engine: MakeEngine, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, with_checksum: bool
) -> None:
    """A checksum finds what happens between the two processes, the digest what happens in them."""
    async with serving(make_engine(sync_dtype="bfloat16")) as served:
        server, trainer = Follower(served), Trainer(recorded)
        trainer.publish(40, first=True)
        await server.follow(trainer)
        trainer.publish(41)
        with monkeypatch.context() as patched:
            damage(patched, 1, with_checksum=with_checksum)
            report = await server.follow(trainer)
        assert (server.full_syncs, report.sparse) == ((1, False) if with_checksum else (0, True))
        assert report.resent_chunks == (0 if with_checksum else 1)
        assert (await served.status()).chunks_refused == report.resent_chunks
        trainer.publish(42)
        assert (await server.follow(trainer)).sparse


def _header(payload: Payload) -> pb.WeightHeader:
    return pb.WeightHeader.FromString(payload.header.SerializeToString())


HEADERS: dict[str, Callable[[pb.WeightHeader], None]] = {
    "has no digest": lambda header: header.tensors[1].ClearField("digest"),
    "a delta from step 9 of": lambda header: setattr(header.base, "incarnation", 7),
    "a delta from step 41 to step 10": lambda header: setattr(header.base, "step", 41),
    "elements changed": lambda header: setattr(header.tensors[1], "changed", 10**6),
    "the tensors' parts take": lambda header: setattr(header.tensors[0], "gap_bytes", 10**6),
    "dense, and has": lambda header: setattr(header.tensors[0], "dense", True),
}


@pytest.mark.parametrize("told", sorted(HEADERS))
async def test_a_patch_whose_header_is_wrong(make_engine: MakeEngine, recorded: Recorded, told: str) -> None:
    async with serving(make_engine(sync_dtype="bfloat16")) as served:
        server, trainer = Follower(served), Trainer(recorded)
        trainer.publish(9, first=True)
        await server.follow(trainer)
        trainer.publish(10)
        payload = await trainer.publisher._payload(9, 10, lambda: trainer.whole(10))
        header = _header(payload)
        HEADERS[told](header)
        call = served.stub.PushWeights(timeout=SECONDS)
        await call.write(pb.WeightMessage(header=header))
        assert told in (await call.read()).refused
        call.cancel()
        await server.compare(trainer, 9)
        assert (await server.follow(trainer)).sparse  # the host copy is what it was


async def test_a_patch_to_what_is_held_is_answered_at_once(make_engine: MakeEngine, recorded: Recorded) -> None:
    async with serving(make_engine(sync_dtype="bfloat16")) as served:
        server, trainer = Follower(served), Trainer(recorded)
        for step in (9, 10):
            trainer.publish(step, first=step == 9)
            await server.follow(trainer)
        server.base = 9  # the trainer never heard of it
        await server.follow(trainer)
        assert server.full_syncs == 0 and (await served.status()).versions_applied == 2


async def test_no_patch_on_a_float32_wire(make_replay: Callable[..., Engine], recorded: Recorded) -> None:
    async with serving(make_replay(sync_dtype="float32")) as served:
        trainer = Trainer(recorded)
        for step in (9, 10):
            trainer.publish(step, first=step == 9)
        payload = await trainer.publisher._payload(9, 10, lambda: trainer.whole(10))
        header = _header(payload)
        for tensor in header.tensors:
            tensor.dtype = "float32"
            tensor.ClearField("digest")
        call = served.stub.PushWeights(timeout=SECONDS)
        await call.write(pb.WeightMessage(header=header))
        assert "the sync dtype is 'float32'" in (await call.read()).refused
        call.cancel()

"""The staging of a version, without gRPC: whatever the order, size and damage, the bits that arrive are those sent."""

import dataclasses
import random
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.engines.engine import EngineInfo
from rollout_server.weight_store import BaseNotHeld, WeightStore
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk
from scalerl_jax.contract.codec import Version

SHAPES = {"embed": (5, 3), "scale": (7,), "scalar": (), "empty": (0, 4), "down": (3, 2, 2)}


def new_buffer(size: int) -> np.ndarray:
    return np.empty(size, np.uint8)


def info(sync_dtype: str) -> EngineInfo:
    return EngineInfo("replay", slots=1, queue_capacity=1, maximum_tokens=8, tensors=SHAPES, sync_dtype=sync_dtype)


def bits(sync_dtype: str, seed: int) -> dict[str, np.ndarray]:
    """Arbitrary bits: not-a-number with a payload, -0.0 and denormals among them."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if sync_dtype == "bfloat16" else np.float32)
    return {
        name: np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
        for name, shape in SHAPES.items()
    }


def header_of(tensors: dict[str, np.ndarray], *, chunk_bytes: int, step: int = 1) -> pb.WeightHeader:
    return pb.WeightHeader(
        target=pb.Version(incarnation=5, step=step),
        tensors=[pb.TensorInfo(name=n, dtype=t.dtype.name, shape=t.shape) for n, t in tensors.items()],
        payload_bytes=sum(t.nbytes for t in tensors.values()),
        chunk_bytes=chunk_bytes,
    )


@given(
    sync_dtype=st.sampled_from(["float32", "bfloat16"]),
    chunk_bytes=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
    damage=st.floats(0, 0.5),
    loss=st.floats(0, 0.5),
)
def test_the_bits_that_arrive_are_those_sent(
    sync_dtype: str, chunk_bytes: int, seed: int, damage: float, loss: float
) -> None:
    store, luck = WeightStore(info(sync_dtype), new_buffer), random.Random(seed)
    for step in (1, 2):  # the second into a buffer that holds the first
        sent = dict(luck.sample(sorted(bits(sync_dtype, seed + step).items()), len(SHAPES)))  # in any order
        header = header_of(sent, chunk_bytes=chunk_bytes, step=step)
        store.check(header, Version(5, step - 1))
        staging = store.stage(header)
        payload = b"".join(tensor.tobytes() for tensor in sent.values())
        chunks = {at // chunk_bytes: payload[at : at + chunk_bytes] for at in range(0, len(payload), chunk_bytes)}
        waiting, wrong, refused = luck.sample(sorted(chunks), len(chunks)), dict.fromkeys(chunks, 0), 0
        before = store.chunks_refused
        while not staging.complete:
            waiting = waiting or staging.ask()
            assert waiting, "nothing is on its way, and nothing is asked for"
            index, data = waiting[0], bytearray(chunks[waiting[0]])
            waiting = waiting[1:]
            crc = zlib.crc32(bytes(data))
            if wrong[index] == 0 and luck.random() < loss:
                wrong[index] = 1  # lost once: asked for when the others are through
                continue
            if wrong[index] < 6 and luck.random() < damage:
                wrong[index] += 1
                data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
                assert staging.put(Chunk(index, (data,), crc)) is False
                refused += 1
                waiting.append(index)
                continue
            assert staging.put(Chunk(index, (data,), crc)) is True
        assert staging.ask() == []
        assert store.chunks_refused - before == refused
        arrived, changes = store.finish(staging)
        assert changes == dict.fromkeys(SHAPES)
        assert list(arrived) == list(sent)
        for name, tensor in sent.items():
            assert (arrived[name].shape, arrived[name].dtype) == (tensor.shape, tensor.dtype)
            assert arrived[name].tobytes() == tensor.tobytes()
            assert not arrived[name].flags.writeable
            assert not arrived[name].flags.owndata  # a view: a version is never held twice


def test_a_chunk_that_came_already_is_not_taken_again() -> None:
    store, sent = WeightStore(info("float32"), new_buffer), bits("float32", 0)
    staging = store.stage(header_of(sent, chunk_bytes=64))
    payload = b"".join(tensor.tobytes() for tensor in sent.values())
    good = Chunk(0, (payload[:64],), zlib.crc32(payload[:64]))
    assert staging.put(good)
    left = staging.waiting
    assert staging.put(good)
    # A damaged copy of it is nothing to ask for: the good one is here.
    assert staging.put(Chunk(0, (b"\0" * 64,), 1))
    assert (staging.waiting, 0 in staging.ask()) == (left, False)


@pytest.mark.parametrize(("index", "size", "told"), [(9, 64, "chunk 9 of"), (0, 63, "63 bytes"), (2, 64, "64 bytes")])
def test_a_chunk_that_cannot_belong_there(index: int, size: int, told: str) -> None:
    staging = WeightStore(info("float32"), new_buffer).stage(header_of(bits("float32", 0), chunk_bytes=64))
    data = b"x" * size
    with pytest.raises(ValueError, match=told):
        staging.put(Chunk(index, (data,), zlib.crc32(data)))


def test_more_tensors_than_the_model_has_are_not_looked_at() -> None:
    """Each of them would be compared with all others."""
    header = header_of(bits("float32", 0), chunk_bytes=64)
    header.tensors.extend(pb.TensorInfo(name=f"{number % 5000}") for number in range(20_000))
    with pytest.raises(ValueError, match=r"names 20005 tensors, the model has 5"):
        WeightStore(info("float32"), new_buffer).check(header, Version(5, 0))


def test_a_tensor_that_is_named_twice() -> None:
    header = header_of(bits("float32", 0), chunk_bytes=64)
    header.tensors[1].name = header.tensors[0].name
    with pytest.raises(ValueError, match=f"named twice: {header.tensors[0].name}"):
        WeightStore(info("float32"), new_buffer).check(header, Version(5, 0))


def test_no_more_chunks_than_can_be_kept_account_of() -> None:
    big = WeightStore(dataclasses.replace(info("bfloat16"), tensors={"embed": (2**15, 2**15)}), new_buffer)
    header = pb.WeightHeader(
        target=pb.Version(incarnation=1),
        tensors=[pb.TensorInfo(name="embed", dtype="bfloat16", shape=[2**15, 2**15])],
        payload_bytes=2**31,
        chunk_bytes=2**11,
    )
    big.check(header, Version(0, 0))  # nothing is allocated for it
    header.chunk_bytes = 2**11 - 1
    with pytest.raises(ValueError, match="chunks, more than"):
        big.check(header, Version(0, 0))


@pytest.mark.parametrize("held", [None, Version(5, 0), Version(5, 2), Version(4, 1)])
def test_a_delta_from_a_version_that_is_not_held_asks_for_a_full_sync(held: Version | None) -> None:
    store = WeightStore(info("bfloat16"), new_buffer)
    header = pb.WeightHeader(base=pb.Version(incarnation=5, step=1), target=pb.Version(incarnation=5, step=3))
    store.held = Version(5, 1)
    store.check_base(header)
    store.held = held
    with pytest.raises(BaseNotHeld, match="the delta starts from step 1 of incarnation 5, the host copy holds"):
        store.check_base(header)

"""Chunks on the wire against protobuf, both ways."""

import os
import zlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.contract import chunks
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk

INDICES = st.integers(0, 2**32 - 1)
CHECKSUMS = st.integers(0, 2**32 - 1)


@given(INDICES, st.lists(st.binary(max_size=300), max_size=4), CHECKSUMS)
def test_protobuf_reads_what_is_written(index: int, parts: list[bytes], checksum: int) -> None:
    message = pb.WeightMessage.FromString(chunks.to_bytes(Chunk(index, parts, checksum)))
    assert message.WhichOneof("kind") == "chunk"
    assert (message.chunk.index, message.chunk.data, message.chunk.crc32) == (index, b"".join(parts), checksum)


@given(INDICES, st.binary(max_size=300), CHECKSUMS)
def test_what_protobuf_writes_is_read(index: int, data: bytes, checksum: int) -> None:
    """It leaves out fields that are zero."""
    wire = pb.WeightMessage(chunk=pb.WeightChunk(index=index, data=data, crc32=checksum)).SerializeToString()
    found = chunks.from_bytes(wire, longest=0)  # protobuf is not needed for it
    assert isinstance(found, Chunk)
    assert (found.index, bytes(found.data), found.crc32) == (index, data, checksum)


@given(INDICES, st.binary(min_size=1, max_size=300), CHECKSUMS, st.data())
def test_bytes_that_are_not_ours_are_what_protobuf_says(index: int, data: bytes, checksum: int, draw: st.DataObject):
    """A chunk cut short, lengthened or with a byte changed: the same fields as protobuf's, or its error."""
    wire = bytearray(chunks.to_bytes(Chunk(index, (data,), checksum)))
    for _ in range(draw.draw(st.integers(1, 2))):
        kind, at = draw.draw(st.sampled_from(["cut", "add", "change"])), draw.draw(st.integers(0, len(wire) - 1))
        if kind == "cut":
            del wire[max(at, 1) :]
        elif kind == "add":
            wire.append(draw.draw(st.integers(0, 255)))
        else:
            wire[at] = draw.draw(st.integers(0, 255))
    try:
        expected = pb.WeightMessage.FromString(bytes(wire))
    except DecodeError:
        with pytest.raises(DecodeError):
            chunks.from_bytes(bytes(wire))
        return
    found = chunks.from_bytes(bytes(wire))
    if expected.WhichOneof("kind") == "chunk":
        assert isinstance(found, Chunk)
        there = expected.chunk
        assert (found.index, bytes(found.data), found.crc32) == (there.index, there.data, there.crc32)
    else:
        assert found == expected


@pytest.mark.parametrize(
    "message", [pb.WeightMessage(commit=True), pb.WeightMessage(header=pb.WeightHeader(payload_bytes=3)), b""]
)
def test_other_messages_are_protobufs(message: pb.WeightMessage | bytes) -> None:
    wire = message if isinstance(message, bytes) else chunks.to_bytes(message)
    assert chunks.from_bytes(wire) == pb.WeightMessage.FromString(wire)


@given(INDICES, st.binary(max_size=300), CHECKSUMS, st.permutations(range(3)))
def test_the_fields_of_a_chunk_may_come_in_any_order(index: int, data: bytes, checksum: int, order: list[int]) -> None:
    parts = [
        pb.WeightChunk(index=index).SerializeToString(),
        pb.WeightChunk(data=data).SerializeToString(),
        pb.WeightChunk(crc32=checksum).SerializeToString(),
    ]
    inner = b"".join(parts[place] for place in order)
    wire = b"\x12" + chunks._varint(len(inner)) + inner
    found = chunks.from_bytes(wire, longest=0)
    assert isinstance(found, Chunk)
    assert (found.index, bytes(found.data), found.crc32) == (index, data, checksum)


def test_what_is_no_chunk_may_not_be_long() -> None:
    """A chunk with a header behind it is, to protobuf, a header, and one of any size."""
    header = pb.WeightMessage(header=pb.WeightHeader(tensors=[pb.TensorInfo()] * 1000))
    for wire in (chunks.to_bytes(header), chunks.to_bytes(Chunk(1, (b"x",), 0)) + chunks.to_bytes(header)):
        assert chunks.from_bytes(wire, longest=len(wire)) == header
        with pytest.raises(ValueError, match="not one chunk of weights"):
            chunks.from_bytes(wire, longest=len(wire) - 1)


def test_data_is_a_view_and_its_checksum_is_zlibs() -> None:
    data = os.urandom(2**20 + 3)
    cut = chunks.cut(7, (memoryview(data)[:1000], memoryview(data)[1000:]))
    assert (cut.crc32, cut.size) == (zlib.crc32(data), len(data))
    wire = chunks.to_bytes(cut)
    found = chunks.from_bytes(wire)
    assert isinstance(found, Chunk) and isinstance(found.data, memoryview)
    assert found.data.obj is wire and found.data == data

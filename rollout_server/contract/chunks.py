"""Chunks of weights as they travel: protobuf's bytes, without the copies that its classes make of them.

    WeightMessage{chunk: {index, data, crc32}}   =   12 <length>  08 <index>  12 <length> data  1d <crc32>

A dense version is mostly `data`. It is copied once when a chunk is written and not at all when one is read; every other
message, and a chunk whose fields come in another order, goes through protobuf. Numbers are varints, little-endian.
"""

import dataclasses
import struct
from collections.abc import Sequence

from zlib_ng import zlib_ng

from rollout_server.contract import rollout_pb2 as pb

Buffer = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Data in parts that follow each other, or, where it was read, in one."""

    index: int
    parts: Sequence[Buffer]
    crc32: int

    @property
    def data(self) -> Buffer:
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    @property
    def size(self) -> int:
        return sum(len(part) for part in self.parts)


def crc32(*parts: Buffer) -> int:
    """Of parts that follow each other; the same as zlib's, by the processor's carry-less products."""
    value = 0
    for part in parts:
        value = zlib_ng.crc32(part, value)
    return value


def cut(index: int, parts: Sequence[Buffer]) -> Chunk:
    """A chunk with its checksum. The parts are read when it is written, and must stay as they are until then."""
    return Chunk(index, parts, crc32(*parts))


def to_bytes(message: pb.WeightMessage | Chunk) -> bytes:
    """What gRPC sends."""
    if not isinstance(message, Chunk):
        return message.SerializeToString()
    head = b"\x08" + _varint(message.index) + b"\x12" + _varint(message.size)
    tail = struct.pack("<BI", 0x1D, message.crc32)
    length = len(head) + message.size + len(tail)
    return b"".join([b"\x12", _varint(length), head, *message.parts, tail])


def from_bytes(data: bytes) -> pb.WeightMessage | Chunk:
    """What gRPC has received: never a message of kind `chunk`, but a Chunk. Raises protobuf's DecodeError."""
    if (chunk := _chunk(data)) is not None:
        return chunk
    message = pb.WeightMessage.FromString(data)
    if message.WhichOneof("kind") != "chunk":
        return message
    return Chunk(message.chunk.index, (message.chunk.data,), message.chunk.crc32)


def _chunk(data: bytes) -> Chunk | None:
    """A view of the data; None where it is another message, or not laid out as to_bytes does it."""
    try:
        if data[0] != 0x12:
            return None
        length, at = _read_varint(data, 1)
        if at + length != len(data) or data[at] != 0x08:
            return None
        index, at = _read_varint(data, at + 1)
        if data[at] != 0x12:
            return None
        size, start = _read_varint(data, at + 1)
    except IndexError:  # it ends in the middle
        return None
    end = start + size
    if end + 5 != len(data) or data[end] != 0x1D or index >= 2**32:
        return None
    (checksum,) = struct.unpack_from("<I", data, end + 1)
    return Chunk(index, (memoryview(data)[start:end],), checksum)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends). Raises IndexError where the data ends before it does, or after 5 bytes."""
    value = 0
    for number in range(5):
        byte = data[at + number]
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value, at + number + 1
    raise IndexError("a number of more than 5 bytes")

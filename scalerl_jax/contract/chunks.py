"""Encodes and decodes chunks of weights: protobuf's bytes, without the copies that its classes make of them.

    WeightMessage{chunk: {index, data, crc32}}   =   12 <length>  08 <index>  12 <length> data  1d <crc32>

A dense version is mostly `data`. It is copied once when a chunk is written and not at all when one is read, in any
order of its fields and even if some are omitted because they are zero; every other message goes through protobuf, and
must not be long, since protobuf may make an object of every two bytes of it. Numbers are varints, little-endian.
"""

import dataclasses
import struct
from collections.abc import Sequence

from zlib_ng import zlib_ng

from scalerl_jax.contract import limits
from scalerl_jax.contract import rollout_pb2 as pb

_FIELDS = 3  # of a chunk, each once

Buffer = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Data in consecutive parts, or in one part if it was read."""

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
    """Checksum of consecutive parts; the same as zlib's, by the processor's carry-less products."""
    value = 0
    for part in parts:
        value = zlib_ng.crc32(part, value)
    return value


def cut(index: int, parts: Sequence[Buffer]) -> Chunk:
    """A chunk with its checksum. The parts are read when it is written, and must stay as they are until then."""
    return Chunk(index, parts, crc32(*parts))


def to_bytes(message: pb.WeightMessage | Chunk) -> bytes:
    """The bytes that gRPC sends."""
    if not isinstance(message, Chunk):
        return message.SerializeToString()
    head = b"\x08" + _varint(message.index) + b"\x12" + _varint(message.size)
    tail = struct.pack("<BI", 0x1D, message.crc32)
    length = len(head) + message.size + len(tail)
    return b"".join([b"\x12", _varint(length), head, *message.parts, tail])


def from_bytes(data: bytes, *, longest: int = limits.MAXIMUM_MESSAGE_BYTES) -> pb.WeightMessage | Chunk:
    """Decodes bytes that gRPC has received: a message of kind `chunk` is always returned as a Chunk.

    Raises protobuf's DecodeError, and ValueError if data that is not plainly a chunk has more than `longest` bytes.
    """
    if (chunk := _chunk(data)) is not None:
        return chunk
    if len(data) > longest:
        raise ValueError(f"{len(data)} bytes that are not one chunk of weights, at most {longest} are possible")
    message = pb.WeightMessage.FromString(data)
    if message.WhichOneof("kind") != "chunk":
        return message
    return Chunk(message.chunk.index, (message.chunk.data,), message.chunk.crc32)


def _chunk(data: bytes) -> Chunk | None:
    """A view of the data; None if it is another message, or a chunk in an unusual encoding."""
    index, start, end, checksum, fields = 0, 0, 0, 0, 0
    try:
        if data[0] != 0x12:
            return None
        length, at = _read_varint(data, 1)
        if at + length != len(data):
            return None
        while at < len(data):
            tag, fields = data[at], fields + 1
            if fields > _FIELDS:
                return None
            if tag == 0x08:
                index, at = _read_varint(data, at + 1)
            elif tag == 0x12:
                size, start = _read_varint(data, at + 1)
                at = end = start + size
            elif tag == 0x1D:
                (checksum,) = struct.unpack_from("<I", data, at + 1)
                at += 5
            else:
                return None
    except (IndexError, struct.error):  # it ends in the middle
        return None
    if at != len(data) or index >= 2**32:
        return None
    return Chunk(index, (memoryview(data)[start:end],), checksum)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends). Raises IndexError if the data ends before it does, or after 5 bytes."""
    value = 0
    for number in range(5):
        byte = data[at + number]
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value, at + number + 1
    raise IndexError("a number of more than 5 bytes")

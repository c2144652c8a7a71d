"""One version of the weights as it goes on the wire: a header, and a payload that is cut into chunks.

    dense   the tensors' bytes one after another, in the header's order
    delta   what changed in each of them, in the header's order: gaps, then replacement values

A part of a version (a trainer of several hosts sends one from each) has blocks instead of whole tensors.

The payload is never concatenated: chunks are cut from the arrays it consists of. See contract/rollout.proto.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from scalerl_jax.contract import chunks, codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.weight_delta import Sparse, WeightDelta
from scalerl_jax.contract.weight_parts import Blocks, Part

Tensors = Mapping[str, np.ndarray]  # Hugging Face names, complete, in sync dtype
TensorBlocks = Mapping[str, Blocks]  # likewise, only the blocks that this host sends


class Payload:
    """Ready to be cut into chunks by any number of pushes at once."""

    def __init__(self, header: pb.WeightHeader, pieces: Sequence[np.ndarray], *, chunk_bytes: int):
        """Fills in the header's sizes."""
        assert sys.byteorder == "little", "weights travel little-endian"
        self._pieces = [np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces]
        self._starts = np.concatenate([[0], np.cumsum([len(piece) for piece in self._pieces], dtype=int)]).tolist()
        self.bytes, self._chunk_bytes = self._starts[-1], chunk_bytes
        self.chunks = -(-self.bytes // chunk_bytes)
        self.header = header
        header.payload_bytes, header.chunk_bytes = self.bytes, chunk_bytes

    @property
    def is_delta(self) -> bool:
        return self.header.HasField("base")

    def chunk(self, index: int) -> chunks.Chunk:
        """Views of the arrays, and their checksum."""
        start = index * self._chunk_bytes
        end = min(start + self._chunk_bytes, self.bytes)
        assert 0 <= start < end
        parts = []
        at = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < end:
            piece_end = min(end, self._starts[at + 1])
            offset = self._starts[at]
            parts.append(self._pieces[at][start - offset : piece_end - offset].data)
            start, at = piece_end, at + 1
        return chunks.cut(index, parts)


def dense(version: codec.Version, tensors: Tensors, digests: Mapping[str, int], *, chunk_bytes: int) -> Payload:
    """The payload of whole tensors. digests: of the tensors that have one."""
    assert tensors, "a version without tensors"
    header = pb.WeightHeader(
        target=codec.version_to_proto(version),
        tensors=[
            pb.TensorInfo(name=name, dtype=tensor.dtype.name, shape=tensor.shape, digest=digests.get(name))
            for name, tensor in tensors.items()
        ],
    )
    return Payload(header, list(tensors.values()), chunk_bytes=chunk_bytes)


def dense_part(
    version: codec.Version,
    tensors: TensorBlocks,
    digests: Mapping[str, int],
    *,
    dtype: str,
    shapes: Mapping[str, tuple[int, ...]],
    part: Part,
    chunk_bytes: int,
) -> Payload:
    """This host's part of a dense version. digests: of the blocks it sends of each tensor, where there is one."""
    header = pb.WeightHeader(target=codec.version_to_proto(version), part=part.index, parts=part.count)
    pieces = []
    for name, blocks in tensors.items():
        info = header.tensors.add(name=name, dtype=dtype, shape=shapes[name], digest=digests.get(name))
        pieces += _add_blocks(info, blocks)
    return Payload(header, pieces, chunk_bytes=chunk_bytes)


def _add_blocks(info: pb.TensorInfo, blocks: Blocks) -> list[np.ndarray]:
    for block in blocks:
        info.blocks.add(start=block.start, size=block.values.shape)
    return [block.values for block in blocks]


def sparse(incarnation: int, delta: WeightDelta, *, chunk_bytes: int, part: Part | None = None) -> Payload:
    """The payload of a delta, or of this host's part of one."""
    assert delta.base is not None
    header = pb.WeightHeader(
        target=pb.Version(incarnation=incarnation, step=delta.step),
        base=pb.Version(incarnation=incarnation, step=delta.base),
    )
    if part is not None:
        header.part, header.parts = part.index, part.count
    pieces = []
    for name, found in delta.tensors.items():
        info = header.tensors.add(name=name, dtype="bfloat16", shape=delta.shapes[name], digest=delta.digests[name])
        if isinstance(found, Sparse):
            info.changed, info.gap_bytes = found.changed, found.gaps.nbytes
            pieces += [found.gaps, found.values]
        else:
            info.dense = True
            pieces += [found] if isinstance(found, np.ndarray) else _add_blocks(info, found)
    return Payload(header, [piece for piece in pieces if piece.size], chunk_bytes=chunk_bytes)

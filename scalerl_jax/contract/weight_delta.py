"""The changes between two versions of the weights, as bytes, and the digest that checks the result.

    gaps     positions p[0] < p[1] < ... in row-major order as p[0], p[i] - p[i-1] - 1, each a varint: 7 bits a byte,
             the low ones first, the high bit is set if more follow
    values   the new version's values there, 2 bytes each: replacements, never differences
    digest   sum over elements of mix(bits * a(row) + b(column)) mod 2^32, see rollout.proto

Values are compared and carried as bits (uint16): -0.0 and the payloads of not-a-number are values like any other.
One pass of NumPy over what changed; only the digest reads whole tensors.

Left out on purpose: entropy coding of the values. They are half of a delta, and nearly all noise.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.contract.weight_parts import Blocks

# Longest varint of a gap: 5 bytes hold 35 bits, and no tensor has 2^31 elements.
MAXIMUM_GAP_BYTES = 5
MAXIMUM_ELEMENTS = 2**31

# A delta longer than this share of the dense payload is not worth the work: the dense version is sent.
MAXIMUM_DELTA_SHARE = 0.5

MIX = 0x7FEB352D
FINAL = (0x85EBCA6B, 0xC2B2AE35)
ROW_SALT, COLUMN_SALT = 0x9E3779B9, 0x7F4A7C15

# Elements that the digest processes at once: their uint32 stay in a core's second-level cache.
_BLOCK = 2**15


@dataclasses.dataclass(frozen=True)
class Change:
    """The positions where one tensor of a new version differs from the version held, and the new values."""

    positions: np.ndarray  # [changed] int64, into the tensor in row-major order, ascending, none twice
    values: np.ndarray  # [changed] in sync dtype, or its bits


@dataclasses.dataclass(frozen=True)
class Sparse:
    """A change in its encoded form."""

    changed: int
    gaps: np.ndarray  # [gap bytes] uint8
    values: np.ndarray  # [changed] uint16


@dataclasses.dataclass(frozen=True)
class WeightDelta:
    """From version `base` to version `step` of one incarnation."""

    base: int | None  # None: there is no base, only the digests are given
    step: int
    # All tensors; an array is the whole tensor's bits. In one host's part: its share of each, blocks instead of arrays.
    tensors: Mapping[str, Sparse | np.ndarray | Blocks]
    digests: Mapping[str, int]  # of the whole tensors of `step`; in a part, of what the host has of them
    shapes: Mapping[str, tuple[int, ...]]
    held: int | None = None  # in a part: elements that the host has

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for part in self.tensors.values() for array in _arrays(part))

    @property
    def elements(self) -> int:
        """Number of elements, changed or not, in the tensors that the delta covers."""
        return sum(math.prod(shape) for shape in self.shapes.values()) if self.held is None else self.held

    @property
    def changed(self) -> int:
        """Number of elements that are sent; of a tensor sent whole all count."""
        return sum(
            part.changed if isinstance(part, Sparse) else sum(array.size for array in _arrays(part))
            for part in self.tensors.values()
        )

    @property
    def whole(self) -> int:
        """Number of tensors that are sent whole, or as all of this host's blocks of them."""
        return sum(not isinstance(part, Sparse) for part in self.tensors.values())


def _arrays(part: Sparse | np.ndarray | Blocks) -> list[np.ndarray]:
    if isinstance(part, Sparse):
        return [part.gaps, part.values]
    return [block.values for block in part] if isinstance(part, tuple) else [part]


def encode(change: Change) -> Sparse:
    """The change in its encoded form."""
    positions = np.asarray(change.positions, np.int64)
    values = np.ascontiguousarray(change.values).view(np.uint16)
    gaps = np.diff(positions, prepend=-1) - 1
    has = np.flatnonzero(gaps >= 0x80)  # those with a next byte
    if not len(has):
        return Sparse(len(positions), gaps.astype(np.uint8), values)
    # Few gaps are long: each byte beyond the first is a pass over those that have it.
    lengths = np.ones(len(gaps), np.int64)
    nexts = []
    rest = gaps[has] >> 7
    while len(has):
        lengths[has] += 1
        more = rest >= 0x80
        nexts.append((has, (rest & 0x7F).astype(np.uint8) | (more.astype(np.uint8) << 7)))
        has, rest = has[more], rest[more] >> 7
    ends = np.cumsum(lengths)
    starts = ends - lengths
    out = np.empty(int(ends[-1]), np.uint8)
    out[starts] = (gaps & 0x7F).astype(np.uint8) | ((lengths > 1).astype(np.uint8) << 7)
    for byte, (places, bits) in enumerate(nexts, start=1):
        out[starts[places] + byte] = bits
    return Sparse(len(positions), out, values)


def decode(sparse: Sparse, size: int) -> Change:
    """The change of a tensor of `size` elements. Raises ValueError if the gaps are invalid."""
    data, count = sparse.gaps, sparse.changed
    ends = np.flatnonzero(data < 0x80)
    if len(ends) != count or (len(data) and data[-1] >= 0x80):
        raise ValueError(f"{len(ends)} gaps in {len(data)} bytes, {count} elements changed")
    starts = np.concatenate([[0], ends[:-1] + 1]) if count else ends
    lengths = ends - starts + 1
    longest = int(lengths.max(initial=0))
    if longest > MAXIMUM_GAP_BYTES:
        raise ValueError(f"a gap of {longest} bytes")
    gaps = (data[starts] & 0x7F).astype(np.int64)
    for byte in range(1, longest):
        has = np.flatnonzero(lengths > byte)
        gaps[has] |= (data[starts[has] + byte] & 0x7F).astype(np.int64) << (7 * byte)
    if gaps.max(initial=0) >= size:  # so that the sum below cannot overflow
        raise ValueError(f"a gap of {gaps.max()} in a tensor of {size} elements")
    positions = np.cumsum(gaps + 1) - 1
    if count and positions[-1] >= size:
        raise ValueError(f"position {positions[-1]} in a tensor of {size} elements")
    return Change(positions, sparse.values)


def merge(deltas: Sequence[WeightDelta]) -> WeightDelta:
    """The deltas of consecutive versions as one: for each position the newest value. None of them has blocks."""
    assert deltas and all(a.step == b.base for a, b in itertools.pairwise(deltas))
    if len(deltas) == 1:
        return deltas[0]
    tensors: dict[str, Sparse | np.ndarray] = {}
    for name in deltas[0].tensors:
        parts = [part for delta in deltas if not isinstance(part := delta.tensors[name], tuple)]
        assert len(parts) == len(deltas)
        size = math.prod(deltas[0].shapes[name])
        dense = max((i for i, part in enumerate(parts) if isinstance(part, np.ndarray)), default=None)
        changes = [decode(part, size) for part in parts[(dense or 0) :] if isinstance(part, Sparse)]
        if dense is not None:
            whole = np.array(parts[dense])
            for change in changes:
                whole.reshape(-1)[change.positions] = change.values
            tensors[name] = whole
            continue
        positions = np.concatenate([change.positions for change in changes])
        values = np.concatenate([change.values for change in changes])
        order = np.argsort(positions, kind="stable")
        positions, values = positions[order], values[order]
        newest = np.append(positions[1:] != positions[:-1], True) if len(positions) else np.zeros(0, bool)
        tensors[name] = encode(Change(positions[newest], values[newest]))
    return dataclasses.replace(deltas[-1], base=deltas[0].base, tensors=tensors)


def digest(tensor: np.ndarray) -> int:
    """The digest of a tensor in a dtype of 2 bytes, see rollout.proto."""
    bits = np.ascontiguousarray(tensor).view(np.uint16)
    columns = bits.shape[-1] if bits.ndim else 1
    bits = bits.reshape(-1, columns) if bits.size else np.zeros((0, 1), np.uint16)
    rows, columns = bits.shape
    of_row = final(np.arange(rows, dtype=np.uint32) ^ np.uint32(ROW_SALT)) | np.uint32(1)
    of_column = final(np.arange(columns, dtype=np.uint32) ^ np.uint32(COLUMN_SALT))
    step = max(1, _BLOCK // columns)
    mixed, shifted = np.empty((step, columns), np.uint32), np.empty((step, columns), np.uint32)
    total = 0
    for start in range(0, rows, step):
        block = bits[start : start + step]
        x, y = mixed[: len(block)], shifted[: len(block)]
        np.copyto(x, block)
        x *= of_row[start : start + step, None]
        x += of_column
        np.right_shift(x, 16, out=y)
        x ^= y
        x *= np.uint32(MIX)
        np.right_shift(x, 15, out=y)
        x ^= y
        total += int(x.sum(dtype=np.uint32))
    return total & 0xFFFFFFFF


def final(x: Any) -> Any:
    """The last steps of MurmurHash3 (Appleby): every bit of x changes half of the bits of the result.

    x: uint32, of NumPy or of JAX.
    """
    x = x ^ (x >> 16)
    x = x * np.uint32(FINAL[0])
    x = x ^ (x >> 13)
    x = x * np.uint32(FINAL[1])
    return x ^ (x >> 16)

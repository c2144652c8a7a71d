"""A version in parts: some blocks of each tensor, and where they must lie; see WeightHeader in rollout.proto."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Part:
    """One of `count`; index from 0."""

    index: int
    count: int


@dataclasses.dataclass(frozen=True)
class Block:
    """A box of a tensor, in the layout of the whole: it begins at `start`, one number a dimension."""

    start: tuple[int, ...]
    values: np.ndarray

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.values.shape, strict=True))


Blocks = tuple[Block, ...]
Box = tuple[Sequence[int], Sequence[int]]  # start, size


def check_box(box: Box, shape: Sequence[int]) -> int:
    """The box's number of elements. Raises ValueError if it does not lie within a tensor of `shape`."""
    start, size = box
    if len(start) != len(shape) or len(size) != len(shape):
        raise ValueError(f"a block of {len(start)} and {len(size)} dimensions in a tensor of {len(shape)}")
    for first, count, whole in zip(start, size, shape):
        if not 0 < count <= whole or first + count > whole:
            raise ValueError(f"a block at {list(start)} of {list(size)} in a tensor of {list(shape)}")
    return math.prod(size)


def check_cover(boxes: Sequence[Box], shape: Sequence[int]) -> None:
    """Raises ValueError unless every element of a tensor of `shape` is in exactly one of the boxes."""
    total = sum(check_box(box, shape) for box in boxes)
    if total != math.prod(shape):
        raise ValueError(f"blocks of {total} elements, the tensor has {math.prod(shape)}")
    if not shape:
        return
    starts = np.array([start for start, _ in boxes], np.int64).reshape(-1, len(shape))
    ends = starts + np.array([size for _, size in boxes], np.int64).reshape(starts.shape)
    for i in range(len(boxes) - 1):
        if ((starts[i] < ends[i + 1 :]) & (starts[i + 1 :] < ends[i])).all(axis=1).any():
            raise ValueError(f"blocks that overlap the one at {starts[i].tolist()}")

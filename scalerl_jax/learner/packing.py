"""From sequences of any length to micro-batches of one fixed shape.

A segment is one sequence: its inputs are tokens[:-1], its targets tokens[1:], and every per-token number stands at the
position that predicts its token. Segments are placed whole in rows (first fit, longest first), rows are cut into
micro-batches, and the last one is filled with empty rows, so that every compiled function sees a single shape.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Segment:
    """One sequence of t tokens. Weights, advantages and log-probs are per token; the first token's are never used."""

    tokens: np.ndarray  # [t] int32
    weights: np.ndarray  # [t] float32, 0 where there is no loss
    advantages: np.ndarray  # [t] float32
    generator_logprobs: np.ndarray  # [t] float32


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Fixed-shape input of one `accumulate`."""

    tokens: np.ndarray  # [rows, length] int32
    positions: np.ndarray  # [rows, length] int32, from 0 in each segment
    segment_ids: np.ndarray  # [rows, length] int32, from 1 in each row; 0 is padding
    targets: np.ndarray  # [rows, length] int32
    weights: np.ndarray  # [rows, length] float32
    advantages: np.ndarray  # [rows, length] float32
    generator_logprobs: np.ndarray  # [rows, length] float32

    def arrays(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a segment's positions lie: micro_batches[batch] at [row, start : start + positions]."""

    batch: int
    row: int
    start: int
    positions: int


def pack(
    segments: Sequence[Segment], *, length: int, rows: int, beside: Sequence[Segment] = ()
) -> tuple[list[MicroBatch], list[Place]]:
    """Packs segments into micro-batches of [rows, length].

    beside: segments that take what room the others leave, and rows of their own beyond it: those lie where they would
    lie without.
    Returns: (micro-batches, the place of each segment in the order given, those beside after the others).
    Raises ValueError naming a segment that does not fit into a row.
    """
    first, segments = len(segments), [*segments, *beside]
    positions = [len(segment.tokens) - 1 for segment in segments]
    for i, size in enumerate(positions):
        if size < 1:
            raise ValueError(f"segment {i} has {size + 1} tokens: at least 2 are needed")
        if size > length:
            raise ValueError(f"segment {i} has {size + 1} tokens: a row holds {length + 1} (config.learner.seq_len)")
    room: list[int] = []
    where: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(segments)), key=lambda i: (i >= first, -positions[i], i)):
        row = next((r for r, free in enumerate(room) if free >= positions[i]), None)
        if row is None:
            row = len(room)
            room.append(length)
        where[i] = (row, length - room[row])
        room[row] -= positions[i]

    batches = max(1, -(-len(room) // rows))
    shape = (batches * rows, length)
    whole = MicroBatch(
        **{name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids", "targets")},
        **{name: np.zeros(shape, np.float32) for name in ("weights", "advantages", "generator_logprobs")},
    )
    used = [0] * len(room)
    places = []
    for i, segment in enumerate(segments):
        row, start = where[i]
        at = (row, slice(start, start + positions[i]))
        used[row] += 1
        whole.tokens[at] = segment.tokens[:-1]
        whole.positions[at] = np.arange(positions[i])
        whole.segment_ids[at] = used[row]
        whole.targets[at] = segment.tokens[1:]
        whole.weights[at] = segment.weights[1:]
        whole.advantages[at] = segment.advantages[1:]
        whole.generator_logprobs[at] = segment.generator_logprobs[1:]
        places.append(Place(row // rows, row % rows, start, positions[i]))
    arrays = whole.arrays()
    cut = [MicroBatch(**{k: v[b * rows : (b + 1) * rows] for k, v in arrays.items()}) for b in range(batches)]
    return cut, places


def plain(tokens: np.ndarray) -> Segment:
    """A segment that is only scored: no loss on any token."""
    zeros = np.zeros(len(tokens), np.float32)
    return Segment(np.asarray(tokens, np.int32), zeros, zeros, zeros)

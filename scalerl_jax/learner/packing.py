"""From sequences of any length to micro-batches of one fixed shape.

A segment is one sequence: its inputs are tokens[:-1], its targets tokens[1:], and every per-token number is at the
position that predicts its token. Segments are placed whole in rows (first fit, longest first), rows are cut into
micro-batches, and the last one is filled with empty rows, so that every compiled function sees a single shape.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl_jax.contract.codec import Completion, TeacherScores
from scalerl_jax.model.experts import OWN


@dataclasses.dataclass(frozen=True)
class Segment:
    """One sequence of t tokens. Weights, advantages and log-probs are per token; the first token's are never used."""

    tokens: np.ndarray  # [t] int32
    weights: np.ndarray  # [t] float32, 0 where there is no loss
    advantages: np.ndarray  # [t] float32
    generator_logprobs: np.ndarray  # [t] float32
    # [t - 1, layers, experts per token]: the experts that each input token is routed to; None: the router decides
    experts: np.ndarray | None = None
    # Scores of these tokens; with soft targets, weights in place of top_logprobs. None: the segment has no divergence
    teacher: TeacherScores | None = None
    thresholds: np.ndarray | None = None  # [t, 2] float32, in place of the objective's (losses.THRESHOLDS)


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A segment in rows of other hosts: here it only reserves its place."""

    length: int  # tokens


def positions_of(segment: Segment | Elsewhere) -> int:
    """The positions it takes in a row."""
    return (segment.length if isinstance(segment, Elsewhere) else len(segment.tokens)) - 1


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
    # [rows, length, layers, experts per token] int16, OWN where the router decides; None: it decides everywhere
    experts: np.ndarray | None = None
    teacher_ids: np.ndarray | None = None  # [rows, length, k] int32, -1: none; field None: no teacher
    teacher_logprobs: np.ndarray | None = None  # [rows, length, k] float32, of these ids
    thresholds: np.ndarray | None = None  # [rows, length, 2] float32; None: the objective's

    def arrays(self) -> dict[str, np.ndarray]:
        every = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in every.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a segment's positions lie: micro_batches[batch] at [row, start : start + positions]."""

    batch: int
    row: int
    start: int
    positions: int


def pack(
    segments: Sequence[Segment | Elsewhere],
    *,
    length: int,
    rows: int,
    beside: Sequence[Segment | Elsewhere] = (),
    routed: tuple[int, int] | None = None,
    teacher_k: int = 0,
    most: int | None = None,
    align: int = 1,
) -> tuple[list[MicroBatch], list[Place]]:
    """Packs segments into micro-batches of [rows, length].

    most: segments of a row; None: any number. align: segments start at multiples of it, which divides `length`.
    routed: (layers, experts per token) if the micro-batches contain the segments' experts; None: they do not.
    teacher_k: ids of the segments' teachers at each position of the micro-batches; 0: as many as the segments have,
    rounded up to a power of two, and no array where they have none.
    Thresholds are in the micro-batches if the first segment has them; then all must.
    beside: segments that fill the space the others leave, and then rows after theirs: the others lie where they would
    without them.
    Returns: (micro-batches, the place of each segment in the order given, those of `beside` after the others).
    Raises ValueError naming a segment that does not fit into a row, or whose teacher has more ids.
    """
    first, segments = len(segments), [*segments, *beside]
    positions = [positions_of(segment) for segment in segments]
    for i, size in enumerate(positions):
        if size < 1:
            raise ValueError(f"segment {i} has {size + 1} tokens: at least 2 are needed")
        if size > length:
            raise ValueError(f"segment {i} has {size + 1} tokens: a row holds {length + 1} (config.learner.seq_len)")
    where = first_fit(positions, length=length, beside=len(segments) - first, most=most, align=align)
    row_count = 1 + max((row for row, _ in where), default=-1)

    batches = max(1, -(-row_count // rows))
    shape = (batches * rows, length)
    if not teacher_k and (ids := [ids.shape[1] for one in segments if (ids := _ids_of(one)) is not None]):
        teacher_k = 1 << (max(ids) - 1).bit_length()
    bounded = bool(segments) and isinstance(segments[0], Segment) and segments[0].thresholds is not None
    whole = MicroBatch(
        **{name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids", "targets")},
        **{name: np.zeros(shape, np.float32) for name in ("weights", "advantages", "generator_logprobs")},
        experts=None if routed is None else np.full((*shape, *routed), OWN, np.int16),
        teacher_ids=np.full((*shape, teacher_k), -1, np.int32) if teacher_k else None,
        teacher_logprobs=np.zeros((*shape, teacher_k), np.float32) if teacher_k else None,
        thresholds=np.zeros((*shape, 2), np.float32) if bounded else None,
    )
    used = [0] * row_count
    places = []
    for i, segment in enumerate(segments):
        row, start = where[i]
        places.append(Place(row // rows, row % rows, start, positions[i]))
        if isinstance(segment, Elsewhere):
            continue
        at = (row, slice(start, start + positions[i]))
        used[row] += 1
        whole.tokens[at] = segment.tokens[:-1]
        whole.positions[at] = np.arange(positions[i])
        whole.segment_ids[at] = used[row]
        whole.targets[at] = segment.tokens[1:]
        whole.weights[at] = segment.weights[1:]
        whole.advantages[at] = segment.advantages[1:]
        whole.generator_logprobs[at] = segment.generator_logprobs[1:]
        if whole.experts is not None and segment.experts is not None:
            whole.experts[at] = segment.experts
        if whole.teacher_ids is not None and whole.teacher_logprobs is not None and segment.teacher is not None:
            _copy_teacher(i, segment.teacher, whole.teacher_ids[at], whole.teacher_logprobs[at])
        if whole.thresholds is not None and segment.thresholds is not None:
            whole.thresholds[at] = segment.thresholds[1:]
    arrays = whole.arrays()
    cut = [MicroBatch(**{k: v[b * rows : (b + 1) * rows] for k, v in arrays.items()}) for b in range(batches)]
    return cut, places


def _ids_of(segment: Segment | Elsewhere) -> np.ndarray | None:
    return None if isinstance(segment, Elsewhere) or segment.teacher is None else segment.teacher.ids


def _copy_teacher(i: int, teacher: TeacherScores, ids: np.ndarray, logprobs: np.ndarray) -> None:
    """Copies into segment i's part of a row: [positions, teacher_k] each."""
    assert teacher.ids is not None and teacher.top_logprobs is not None, "the segment's teacher has no ids"
    wanted = teacher.ids.shape[1]
    if wanted > ids.shape[1]:
        raise ValueError(
            f"segment {i}: its teacher has {wanted} ids at a token, above {ids.shape[1]} (config.distill.k)"
        )
    ids[:, :wanted] = teacher.ids[1:]
    logprobs[:, :wanted] = teacher.top_logprobs[1:]


def first_fit(
    positions: Sequence[int], *, length: int, beside: int = 0, most: int | None = None, align: int = 1
) -> list[tuple[int, int]]:
    """(row, start) of each segment by its positions, the longest first, each in the first row with space for it.

    most: segments of a row; None: any number. align: segments start at multiples of it, which divides `length`.
    beside: so many of the last segments are placed after all others, which lie where they would without them.
    """
    first, positions = len(positions) - beside, [-(-size // align) * align for size in positions]
    remaining: list[int] = []
    count: list[int] = []
    where = [(0, 0)] * len(positions)
    for i in sorted(range(len(positions)), key=lambda i: (i >= first, -positions[i], i)):
        row = next((r for r, free in enumerate(remaining) if free >= positions[i] and count[r] != most), None)
        if row is None:
            row = len(remaining)
            remaining.append(length)
            count.append(0)
        where[i] = (row, length - remaining[row])
        remaining[row] -= positions[i]
        count[row] += 1
    return where


def plain(tokens: np.ndarray, experts: np.ndarray | None = None) -> Segment:
    """A segment that is only scored: no loss on any token."""
    zeros = np.zeros(len(tokens), np.float32)
    return Segment(np.asarray(tokens, np.int32), zeros, zeros, zeros, experts)


def unpack(scored: Sequence[np.ndarray], places: Sequence[Place]) -> list[np.ndarray]:
    """From micro-batches [rows, length, ...], each segment's part [t, ...], with 0 for the first token, which is not
    predicted."""
    out = []
    for place in places:
        row = scored[place.batch][place.row, place.start : place.start + place.positions]
        out.append(np.concatenate([np.zeros((1, *row.shape[1:]), np.float32), row]))
    return out


def scored_only(prompt: np.ndarray, completion: Completion) -> Segment:
    """Prompt [tokens] and completion, as a segment without loss."""
    return plain(np.concatenate([prompt, completion.token_ids]), completion.experts)

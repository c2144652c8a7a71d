"""Messages between the hosts of a trainer: a kind, fields that JSON can hold, and named arrays.

A frame is the bytes of a safetensors file, with kind and fields in a separate tensor: never pickle.

Of a batch each host gets the segments that lie in its rows, and only the lengths of the others.

Every host packs by the lengths of all segments, so all compute the same places (learner/packing.py).
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from scalerl_jax.contract.codec import TeacherScores
from scalerl_jax.learner.packing import Elsewhere, Segment

_HEAD = "frame"


@dataclasses.dataclass(frozen=True)
class Frame:
    kind: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def to_bytes(self) -> bytes:
        head = json.dumps([self.kind, dict(self.fields)]).encode()
        return save(
            {_HEAD: np.frombuffer(head, np.uint8), **{k: np.ascontiguousarray(v) for k, v in self.arrays.items()}}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Frame":
        arrays = load(data)
        kind, fields = json.loads(arrays.pop(_HEAD).tobytes())
        return cls(kind, fields, arrays)


# Approximate size of one frame's arrays: a batch is sent as several frames, so that it is never copied as a whole.
FRAME_BYTES = 32 * 2**20
MORE = "segments"  # the kind of a frame that only carries segments; the last one names the command

_FIELDS = ("tokens", "weights", "advantages", "generator_logprobs")
_OF_TEACHER = [field.name for field in dataclasses.fields(TeacherScores)]


def frames(
    what: str,
    segments: Sequence[Segment | Elsewhere],
    beside: Sequence[Segment | Elsewhere],
    wanted: Collection[int],
    **fields: Any,
) -> Iterator[Frame]:
    """wanted: the places of those that the host needs, counted over segments and beside. fields: of the last frame."""
    every = [*segments, *beside]
    at, size, piece = [], 0, []  # places and segments of one frame
    for place in sorted(wanted):
        segment = every[place]
        assert isinstance(segment, Segment)
        at.append(place)
        piece.append(segment)
        size += 16 * len(segment.tokens) + sum(array.nbytes for array in _beside(segment).values())
        if size >= FRAME_BYTES:
            yield _frame(MORE, at, piece)
            at, size, piece = [], 0, []
    last = _frame(what, at, piece)
    lengths = [s.length if isinstance(s, Elsewhere) else len(s.tokens) for s in every]
    yield Frame(what, {"beside": len(beside), **fields}, {**last.arrays, "lengths": np.array(lengths, np.int64)})


def _frame(kind: str, at: Sequence[int], segments: Sequence[Segment]) -> Frame:
    arrays = {"at": np.array(at, np.int64)}
    for name in _FIELDS:
        every = [getattr(segment, name) for segment in segments]
        dtype = np.int32 if name == "tokens" else np.float32
        arrays[name] = np.concatenate([np.asarray(one, dtype) for one in every]) if every else np.zeros(0, dtype)
    arrays["sizes"] = np.array([len(segment.tokens) for segment in segments], np.int64)
    for place, segment in zip(at, segments, strict=True):
        arrays |= {f"{name}/{place}": array for name, array in _beside(segment).items()}
    return Frame(kind, {}, arrays)


def _beside(segment: Segment) -> dict[str, np.ndarray]:
    """The segment's optional arrays."""
    teacher = {f"teacher/{name}": getattr(segment.teacher, name, None) for name in _OF_TEACHER}
    return {name: array for name, array in ({"experts": segment.experts} | teacher).items() if array is not None}


class Received:
    """Reassembles a batch that arrives as several frames."""

    def __init__(self) -> None:
        self._there: dict[int, Segment] = {}

    def add(self, frame: Frame) -> None:
        arrays = frame.arrays
        ends = np.cumsum(arrays["sizes"])
        for place, start, end in zip(arrays["at"].tolist(), (ends - arrays["sizes"]).tolist(), ends.tolist()):
            fields = {name: arrays[name][start:end] for name in _FIELDS}
            scores: dict[str, Any] = {name: arrays.get(f"teacher/{name}/{place}") for name in _OF_TEACHER}
            teacher = TeacherScores(**scores) if scores["logprobs"] is not None else None
            self._there[place] = Segment(**fields, experts=arrays.get(f"experts/{place}"), teacher=teacher)

    def finish(self, frame: Frame) -> tuple[list[Segment | Elsewhere], list[Segment | Elsewhere]]:
        """Adds the last frame; returns the segments and the `beside` ones, and resets itself."""
        self.add(frame)
        there, self._there = self._there, {}
        every = [there.get(i) or Elsewhere(length) for i, length in enumerate(frame.arrays["lengths"].tolist())]
        first = len(every) - int(frame.fields["beside"])
        return every[:first], every[first:]

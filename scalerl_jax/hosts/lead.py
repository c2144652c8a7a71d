"""The first host's commands to the others: each device operation that all hosts do together, just before it does it.

    begin                 the settled config, the longest sequence, the incarnation
    segments*, forward_backward | score    as in Trainer; each host packs its own rows
    next                  one more micro-batch of the current gradient; any other command drops it
    optim_step            of the gradient computed last
    version, save         the policy of a step, as it is sent; a checkpoint
    push -> reply, keep   this host's part of a version, to one server; which versions may still be requested

follow.py runs them on the others.

Of a batch each host gets the segments that lie in its rows, and only the lengths of the others. Every host packs by the
lengths of all segments, so all compute the same places (learner/packing.py).
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np

from scalerl_jax.config import Config, ObjectiveConfig, OptimizerConfig
from scalerl_jax.config_io import to_json
from scalerl_jax.contract.codec import TeacherScores
from scalerl_jax.contract.weight_parts import Part
from scalerl_jax.hosts.link import FirstHost, Frame
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.learner.packing import Elsewhere, Segment, first_fit, positions_of
from scalerl_jax.learner.trainer import Pending, Trainer
from scalerl_jax.learner.weight_snapshots import WeightSnapshot
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.rollouts.weights.host_parts import PartPush, Parts
from scalerl_jax.rollouts.weights.push import FullSyncNeeded, PushRefused, PushReport

NEXT = "next"
Placed = Segment | Elsewhere

# The failures of another host's push, by their name on the line.
FAULTS: dict[str, type[Exception]] = {
    "full_sync": FullSyncNeeded,
    "refused": PushRefused,
    "in time": TimeoutError,
}


def fault_of(error: Exception) -> dict[str, str]:
    """The failure as fields of a reply."""
    if isinstance(error, grpc.aio.AioRpcError):
        return {"fault": "refused", "why": f"it is not reached from there ({error.code().name})"}
    fault = next(name for name, kind in FAULTS.items() if isinstance(error, kind))  # full_sync comes before refused
    return {"fault": fault, "why": str(error)}


# Approximate size of one frame's arrays: a batch is sent as several frames, so that it is never copied as a whole.
FRAME_BYTES = 32 * 2**20
MORE = "segments"  # the kind of a frame that only carries segments; the last one names the command

_FIELDS = ("tokens", "weights", "advantages", "generator_logprobs")
_OF_TEACHER = [field.name for field in dataclasses.fields(TeacherScores)]


def frames(
    what: str,
    segments: Sequence[Placed],
    beside: Sequence[Placed],
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

    def finish(self, frame: Frame) -> tuple[list[Placed], list[Placed]]:
        """Adds the last frame; returns the segments and the `beside` ones, and resets itself."""
        self.add(frame)
        there, self._there = self._there, {}
        every = [there.get(i) or Elsewhere(length) for i, length in enumerate(frame.arrays["lengths"].tolist())]
        first = len(every) - int(frame.fields["beside"])
        return every[:first], every[first:]


class _LeadTrainer(Trainer):
    """The first host's trainer: sends each of its operations to the others, too."""

    def __init__(self, first: FirstHost, **arguments: Any):
        super().__init__(**arguments)
        self._first, self._host_rows = first, self._rows_of_hosts()

    def _send(self, what: str, segments: Sequence[Placed], beside: Sequence[Placed] = (), **fields: Any) -> None:
        """Sends to each host the segments that lie in its rows."""
        every = [*segments, *beside]
        where = first_fit(
            [positions_of(one) for one in every], length=self.seq_len, beside=len(beside), most=self.most_segments,
            align=self.align,
        )  # fmt: skip
        for index in self._first.others:
            rows = self._host_rows.get(index, set())
            wanted = {place for place, (row, _) in enumerate(where) if row % self.rows in rows}
            for frame in frames(what, segments, beside, wanted, **fields):
                self._first.send(frame, to=index)

    def _rows_of_hosts(self) -> dict[int, set[int]]:
        """The rows of a micro-batch that each host has at least some positions of, by its number."""
        found: dict[int, set[int]] = {}
        places: Any = self._batch_sharding.devices_indices_map((self.rows, self.seq_len))
        for device, (rows, _) in places.items():
            found.setdefault(device.process_index, set()).update(range(*rows.indices(self.rows)))
        return found

    def forward_backward(
        self,
        segments: Sequence[Placed],
        *,
        beside: Sequence[Placed] = (),
        objective: ObjectiveConfig | None = None,
        add_to: Pending | None = None,
        before_micro_batch: Callable[[], None] = lambda: None,
    ) -> Pending:
        values = dataclasses.asdict(objective) if objective is not None else None
        self._send("forward_backward", segments, beside, objective=values, add=add_to is not None)

        def send_next() -> None:
            before_micro_batch()
            self._first.send(Frame(NEXT))

        return super().forward_backward(
            segments, beside=beside, objective=objective, add_to=add_to, before_micro_batch=send_next
        )

    def optim_step(
        self, pending: Pending, *, learning_rate: float | None = None, optimizer: OptimizerConfig | None = None
    ) -> dict[str, Any]:
        values = dataclasses.asdict(optimizer) if optimizer is not None else None
        self._first.send(Frame("optim_step", {"learning_rate": learning_rate, "optimizer": values}))
        return super().optim_step(pending, learning_rate=learning_rate, optimizer=optimizer)

    def score(self, segments: Sequence[Placed]) -> list[np.ndarray]:
        self._send("score", segments)
        return super().score(segments)

    def version(self, step: int) -> WeightSnapshot:
        self._first.send(Frame("version", {"step": step}))
        return super().version(step)

    def save(
        self, checkpoints: Checkpoints, step: int, *, manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> None:
        self._first.send(Frame("save", {"step": step, "manifest": dict(manifest)}, arrays))
        super().save(checkpoints, step, manifest=manifest, arrays=arrays)


class Lead:
    """The first host's side; its methods may be called on any thread, those of the device on the trainer's."""

    def __init__(self, first: FirstHost):
        self._first = first

    @property
    def count(self) -> int:
        return len(self._first.others) + 1

    def begin(self, config: Config, *, maximum_tokens: int, incarnation: int) -> None:
        """Lets all hosts make their trainers, and read the checkpoint or the model."""
        fields = {"config": to_json(config), "maximum_tokens": maximum_tokens, "incarnation": incarnation}
        self._first.send(Frame("begin", fields))

    def trainer(self, **arguments: Any) -> Trainer:
        """arguments: of Trainer."""
        return _LeadTrainer(self._first, **arguments)

    def parts(self, trainer: Trainer) -> Parts:
        return Parts(
            part=Part(0, self.count),
            dtype=trainer.sync_dtype,
            shapes=hf_tensors(trainer.decoder),
            push=self._push,
            keep=lambda until, steps: self._first.send(Frame("keep", {"until": until, "steps": steps})),
        )

    async def _push(self, wanted: PartPush) -> list[PushReport]:
        """Raises the first failure of any host at once: the other hosts' parts wait at the server for that one."""
        return await asyncio.gather(*(self._push_from(index, wanted) for index in self._first.others))

    async def _push_from(self, index: int, wanted: PartPush) -> PushReport:
        reply = await asyncio.wrap_future(self._first.ask(Frame("push", dataclasses.asdict(wanted)), to=index))
        if "fault" in reply.fields:
            raise FAULTS[reply.fields["fault"]](f"host {index}: {reply.fields['why']}")
        return PushReport(**reply.fields["report"])

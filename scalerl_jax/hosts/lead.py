"""The first host's commands to the others: each device operation that all hosts do together, just before it does it.

    begin                 the settled config, the longest sequence, the incarnation
    segments*, forward_backward | score    as in Trainer; each host packs its own rows
    next                  one more micro-batch of the current gradient; any other command drops it
    optim_step            of the gradient computed last
    version, save         the policy of a step, as it is sent; a checkpoint
    push -> reply, keep   this host's part of a version, to one server; which versions may still be requested

follow.py runs them on the others.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np

from scalerl_jax.config import Config, ObjectiveConfig, OptimizerConfig
from scalerl_jax.config_io import to_json
from scalerl_jax.contract.weight_parts import Part
from scalerl_jax.hosts.frames import Frame, frames
from scalerl_jax.hosts.link import FirstHost
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.learner.packing import Elsewhere, Segment, first_fit, positions_of
from scalerl_jax.learner.trainer import Pending, Trainer
from scalerl_jax.learner.weight_snapshots import Version
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.rollouts.weights.parts import PartPush, Parts
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


class _LeadTrainer(Trainer):
    """The first host's trainer: sends each of its operations to the others, too."""

    def __init__(self, first: FirstHost, **arguments: Any):
        super().__init__(**arguments)
        self._first, self._host_rows = first, self._rows_of_hosts()

    def _tell(self, what: str, segments: Sequence[Placed], beside: Sequence[Placed] = (), **fields: Any) -> None:
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
                self._first.tell(frame, to=index)

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
        self._tell("forward_backward", segments, beside, objective=values, add=add_to is not None)

        def tell_next() -> None:
            before_micro_batch()
            self._first.tell(Frame(NEXT))

        return super().forward_backward(
            segments, beside=beside, objective=objective, add_to=add_to, before_micro_batch=tell_next
        )

    def optim_step(
        self, pending: Pending, *, learning_rate: float | None = None, optimizer: OptimizerConfig | None = None
    ) -> dict[str, Any]:
        values = dataclasses.asdict(optimizer) if optimizer is not None else None
        self._first.tell(Frame("optim_step", {"learning_rate": learning_rate, "optimizer": values}))
        return super().optim_step(pending, learning_rate=learning_rate, optimizer=optimizer)

    def score(self, segments: Sequence[Placed]) -> list[np.ndarray]:
        self._tell("score", segments)
        return super().score(segments)

    def version(self, step: int) -> Version:
        self._first.tell(Frame("version", {"step": step}))
        return super().version(step)

    def save(
        self, checkpoints: Checkpoints, step: int, *, manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> None:
        self._first.tell(Frame("save", {"step": step, "manifest": dict(manifest)}, arrays))
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
        self._first.tell(Frame("begin", fields))

    def trainer(self, **arguments: Any) -> Trainer:
        """arguments: of Trainer."""
        return _LeadTrainer(self._first, **arguments)

    def parts(self, trainer: Trainer) -> Parts:
        return Parts(
            part=Part(0, self.count),
            dtype=trainer.sync_dtype,
            shapes=hf_tensors(trainer.decoder),
            push=self._push,
            keep=lambda until, steps: self._first.tell(Frame("keep", {"until": until, "steps": steps})),
        )

    async def _push(self, wanted: PartPush) -> list[PushReport]:
        """Raises the first failure of any host at once: the other hosts' parts wait at the server for that one."""
        return await asyncio.gather(*(self._push_from(index, wanted) for index in self._first.others))

    async def _push_from(self, index: int, wanted: PartPush) -> PushReport:
        reply = await asyncio.wrap_future(self._first.ask(Frame("push", wanted.fields()), to=index))
        if "fault" in reply.fields:
            raise FAULTS[reply.fields["fault"]](f"host {index}: {reply.fields['why']}")
        return PushReport(**reply.fields["report"])

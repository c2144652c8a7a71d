"""Trainer memory estimate, checked before the first rollout.

On each device, the maximum of

    an update     state + gradient + sent + the worst micro-batch's temporaries    as XLA plans them, for full rows
    its end       state + gradient + sent + the optimizer's temporaries
    a version     state + 2 sent                                                   compared with the one before

    state         float32 parameters and both moments: 12 bytes a parameter of this device's part; of biases and norms'
                  scales 16 (optimizer.py). With an adapter those of the adapter, and the policy in the sync dtype
    sent          the weights in the sync dtype, as of the last version
    reference     likewise the initial policy, in addition to all three, if the loss has a KL to it

and on the host this process as it is, a copy of the state (a checkpoint being written) and of a whole version. On a CPU
the two are one memory. What the plan leaves out (code, scratch of kernels) was below a tenth where it was measured.

`check_memory` then runs the worst step on real buffers, with the state left as it is: a failed allocation shows here,
and not at step 120. More than one process: each checks its own devices and host.
"""

import dataclasses
import math
import re
from typing import Any

import jax

from scalerl_jax.learner.trainer import Trainer
from scalerl_jax.model.lora import starts_frozen
from scalerl_jax.model.remat import FULL, REMATS
from scalerl_jax.system import memory


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes on one device, and on the host."""

    state: int
    gradient: int
    sent: int
    temporaries: int  # of the worst micro-batch, beyond these
    ending: int  # of the optimizer's step, beyond these
    version: int  # the state and a whole version, on the host
    reference: int = 0

    @property
    def kept(self) -> int:
        """Bytes in use throughout an update."""
        return self.state + self.reference + self.gradient + self.sent

    @property
    def device(self) -> int:
        return max(self.kept + max(self.temporaries, self.ending), self.state + self.reference + 2 * self.sent)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes needed and available in one memory. `available` is None if unknown."""

    where: str
    needed: int
    available: int | None
    parts: dict[str, int]

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= self.available

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {memory.gib(size)}" for name, size in self.parts.items())
        of = f" of {memory.gib(self.available)} that can be had" if self.available is not None else ""
        return f"{self.where} {memory.gib(self.needed)} GiB{of} ({parts})"


def needs_of(trainer: Trainer) -> Needs:
    """The needs of the compiled programs."""
    state, policy = trainer.abstract_state, trainer.abstract_policy
    sent, frozen = bytes_on_one_device(policy), bytes_on_one_device(trainer.abstract_frozen)
    batch, end = trainer.compile_update()
    return Needs(
        state=bytes_on_one_device(state) + frozen,
        gradient=bytes_on_one_device(state["params"]),
        sent=sent,
        temporaries=memory.working_bytes(batch),
        ending=memory.working_bytes(end),
        version=_on_host(state) + _on_host(policy),
        reference=sent if trainer.layout.reference and not starts_frozen(trainer.lora) else 0,
    )


def bytes_on_one_device(tree: Any) -> int:
    """Bytes of one device's part of all arrays."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _on_host(tree: Any) -> int:
    """Bytes that this process copies to its host: one copy of each part."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) // jax.process_count()


def forecast(trainer: Trainer) -> list[MemoryEstimate]:
    """The estimate for each memory; the state and the reference policy are allocated already."""
    needs, device = needs_of(trainer), trainer.mesh.local_devices[0]
    parts = {
        "state": needs.state,
        "gradient": needs.gradient,
        "weights sent": needs.sent,
        **({"reference": needs.reference} if needs.reference else {}),
        "an update's temporaries": max(needs.temporaries, needs.ending),
    }
    resident, left = memory.resident(), memory.available()
    available = resident + left if left < memory.UNKNOWN else None
    stats = device.memory_stats() if device.platform != "cpu" else None
    if device.platform == "cpu":
        # The devices of one process share its memory, and its state is included already.
        devices = len(trainer.mesh.local_devices)
        needed = resident + devices * (needs.device - needs.state - needs.reference) + needs.version
        parts = {"now": resident, **{n: devices * size for n, size in parts.items() if n not in ("state", "reference")}}
        parts["a checkpoint and a version on their way"] = needs.version
        return [MemoryEstimate("host", needed, available, parts)]
    host = MemoryEstimate(
        "host", resident + needs.version, available,
        {"now": resident, "a checkpoint and a version on their way": needs.version},
    )  # fmt: skip
    limit = stats.get("bytes_limit") if stats else None
    return [MemoryEstimate(f"each device ({device.device_kind})", needs.device, limit, parts), host]


class TooLittleMemory(ValueError):
    """A user's mistake: one line with the remedies."""


def check_memory(trainer: Trainer, *, longest: int, refuse: bool = True) -> str:
    """Runs the worst step. Returns the line to log; afterwards the trainer is compiled, and its state is kept.

    longest: tokens of the longest possible sequence.

    Raises TooLittleMemory if it does not fit when tried, or (refuse) by the estimate.
    """
    try:
        trainer.compile()
        estimates = forecast(trainer)
        short = [estimate for estimate in estimates if not estimate.fits]
        if short and refuse:
            raise TooLittleMemory(f"too little memory: {short[0]}; {remedies(trainer, short[0], longest)}")
        trainer.rehearse()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        asked = re.search(r"[^.\n]*(?:allocat|exceed|Ran out)[^\n]*", str(error))
        reason = " ".join((asked[0] if asked else str(error)).split())[:200]
        raise TooLittleMemory(
            f"too little memory for an update ({reason}); {remedies(trainer, None, longest)}"
        ) from None
    return ("too little memory, tried all the same: " if short else "memory: ") + "; ".join(map(str, estimates))


def remedies(trainer: Trainer, short: MemoryEstimate | None, longest: int) -> str:
    """The changes that would make it fit, by their names in the config."""
    layout, found = trainer.layout, []
    shards = max(1, layout.rows // trainer.rows_per_shard)
    if short is None or short.available is None or needs_of(trainer).kept < short.available:
        if trainer.rows_per_shard > 1:
            found.append(f"config.learner.micro_batch_rows below {trainer.rows_per_shard}")
        if layout.remat != FULL:
            found.append(f"config.model.remat={REMATS[REMATS.index(layout.remat) + 1]} (it is {layout.remat})")
        if layout.seq_len > longest:
            found.append(f"config.learner.seq_len={longest} (it is {layout.seq_len})")
    found.append(f"more devices for config.learner.fsdp (rows lie on {shards})")
    return "what would make it fit: " + ", ".join(found)

"""The policy's versions on their way from the learner to the fleet: as deltas on a bfloat16 wire, else whole."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract.weight_parts import Block, Blocks
from scalerl_jax.learner.step import Learner
from scalerl_jax.learner.weight_snapshots import WeightSnapshots


class Versions:
    """Of one trainer; used by its thread. On several hosts each has one, and makes the same versions."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        publish: Callable[..., Any],
        tell: Callable[[int], None] = lambda step: None,
    ):
        """publish: Fleet.publish, or PartPublisher's. tell: called with each version before it is made."""
        self._learner, self._publish, self._tell = learner, publish, tell
        self._snapshots: WeightSnapshots | None = None
        if config.model.sync_dtype == "bfloat16" and config.fleet.max_delta_density > 0:
            self._snapshots = WeightSnapshots(learner.decoder, learner.mesh, share=config.fleet.max_delta_density)

    def snapshot(self, step: int) -> Callable[[], None]:
        """Makes the policy version `step` on the device. The function returned lets it go out to the fleet.

        Its bytes come to the host when a server is ready for them, what changed in it at once.
        """
        self._tell(step)
        several = self._learner.several_hosts
        if self._snapshots is not None:
            version = self._snapshots.take(self._learner.state["params"], step)
            return lambda: self._publish(step, version.blocks if several else version.tensors, version.delta)
        weights = self._learner.sync_weights()
        return lambda: self._publish(step, lambda: host_blocks(weights) if several else host_arrays(weights))


def host_arrays(weights: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in weights.items()}


def host_blocks(weights: dict[str, jax.Array]) -> dict[str, Blocks]:
    """What this host's devices hold of each; no element is on two hosts."""
    return {
        name: tuple(
            Block(tuple(part.start or 0 for part in shard.index), np.asarray(shard.data))
            for shard in value.addressable_shards
            if shard.replica_id == 0
        )
        for name, value in weights.items()
    }

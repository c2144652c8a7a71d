"""Bytes on one device of what an update keeps, whatever computes it: exact, from the shapes and the mesh.

parameters     float32 masters                              4 P / (axes that cut them)
optimizer      both moments, and the counters               8 P / ... ; and 4 of biases and norms' scales
gradients      float32                                      4 P / ...
weights sent   in the sync dtype, as the last version had   2 P / ... ; a moment before a version is sent, twice
reference      in the sync dtype, where the loss has a KL   2 P / ...
"""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from scalerl_jax.config import Config
from scalerl_jax.learner import optimizer as optimizer_lib
from scalerl_jax.model.decoder import abstract_params
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.sharding import MESH_AXES, mesh_sizes


def of(config: Config, decoder: DecoderConfig, devices: int) -> dict[str, int]:
    """By class. Raises ValueError where the mesh is not one of so many devices."""
    sizes = mesh_sizes(devices, **{axis: getattr(config.learner, axis) for axis in MESH_AXES})
    mesh: Any = AbstractMesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    params = abstract_params(decoder, mesh)
    moments = optimizer_lib.abstract_state(optimizer_lib.from_config(config.optimizer), params, mesh)
    parameters = on_one_device(params)
    sent = parameters // 4 * (2 if config.model.sync_dtype == "bfloat16" else 4)
    return {
        "parameters": parameters,
        "optimizer": on_one_device((moments, optimizer_lib.vectors(params))),
        "gradients": parameters,
        "weights sent": sent,
        "reference": sent if config.objective.reference_kl > 0 else 0,
    }


def on_one_device(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

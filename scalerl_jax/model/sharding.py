"""Where each array lies on the mesh, said once.

The mesh has three named axes: `replica` (whole copies, over the slower network), `fsdp` (each weight and the batch's
rows are cut along it), `tensor` (heads, MLP columns and vocabulary are cut along it). The row of a weight names its
dimensions; `RULES` says which mesh axis each of these names lies on.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("replica", "fsdp", "tensor")
ROWS = ("replica", "fsdp")


# A dimension of the rows in families/ -> mesh axis; any other is whole on every device.
RULES = {"width": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocabulary": "tensor"}


def make_mesh(*, replica: int = 1, fsdp: int = 0, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices` (default: all). fsdp=0 takes what the other two leave.

    Raises ValueError where the axes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if fsdp == 0:
        fsdp = max(1, len(devices) // (replica * tensor))
    if replica * fsdp * tensor != len(devices):
        raise ValueError(
            f"config.learner: replica {replica} x fsdp {fsdp} x tensor {tensor} is not the {len(devices)} devices"
        )
    grid = np.array(devices).reshape(replica, fsdp, tensor)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def spec(shape: Sequence[int], dimensions: Sequence[str], mesh: Mesh) -> PartitionSpec:
    """The partition of a weight with these dimensions; one that its mesh axis does not divide stays whole."""
    parts: list[str | None] = []
    for size, dimension in zip(shape, dimensions, strict=True):
        target = RULES.get(dimension)
        parts.append(target if target is not None and size % mesh.shape[target] == 0 else None)
    return PartitionSpec(*parts)


def constrain(x: jax.Array, mesh: Mesh | None, *parts: Any) -> jax.Array:
    """`x` laid out as given on the mesh; as it is where there is no mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*parts)))

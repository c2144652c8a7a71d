"""Where each array lies on the mesh, said once.

    replica   whole copies, over the slower network
    fsdp      weights are cut along it, and the batch's rows
    context   the positions of a row are cut along it, and weights
    expert    experts are cut along it; for all else it is one more fsdp
    tensor    heads, MLP columns and vocabulary are cut along it

The row of a weight names its dimensions; `RULES` says along which axes each of these names is cut.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("replica", "fsdp", "context", "expert", "tensor")
ROWS = ("replica", "fsdp", "expert")  # along which a batch's rows are cut

# A dimension of the rows in families/ -> mesh axes; any other is whole on every device.
RULES = {
    "experts": ("expert",),
    "width": ("fsdp", "context", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert_mlp": ("tensor",),
    "vocabulary": ("tensor",),
}
WEIGHTS = MESH_AXES[1:]  # along which weights are cut


def mesh_sizes(
    devices: int, *, replica: int = 1, fsdp: int = 0, context: int = 1, expert: int = 1, tensor: int = 1
) -> dict[str, int]:
    """Of every axis, over so many devices. fsdp=0 takes what the others leave.

    Raises ValueError where the axes do not multiply to the number of devices.
    """
    if fsdp == 0:
        fsdp = max(1, devices // (replica * context * expert * tensor))
    sizes = dict(zip(MESH_AXES, (replica, fsdp, context, expert, tensor)))
    if math.prod(sizes.values()) != devices:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(f"config.learner: {product} is not the {devices} devices")
    return sizes


def make_mesh(*, devices: Sequence[jax.Device] | None = None, **axes: int) -> Mesh:
    """A mesh over `devices` (default: all), of these axes. Raises ValueError as mesh_sizes."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(len(devices), **axes)
    grid = np.array(devices).reshape(*sizes.values())
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def row_shards(mesh: Mesh) -> int:
    """Parts that a batch's rows are cut into."""
    return int(np.prod([mesh.shape[axis] for axis in ROWS]))


def spec(shape: Sequence[int], dimensions: Sequence[str], mesh: Mesh) -> PartitionSpec:
    """The partition of a weight with these dimensions.

    A dimension that its axes do not divide is cut along the first of them that do; each axis cuts one dimension.
    """
    parts: list[tuple[str, ...] | None] = []
    free = {axis: size for axis, size in mesh.shape.items() if size > 1}
    for size, dimension in zip(shape, dimensions, strict=True):
        cut: list[str] = []
        for axis in RULES.get(dimension, ()):
            if axis in free and size % free[axis] == 0:
                cut.append(axis)
                size //= free.pop(axis)
        parts.append(tuple(cut) or None)
    return PartitionSpec(*parts)


def constrain(x: jax.Array, mesh: Mesh | None, *parts: Any) -> jax.Array:
    """`x` laid out as given on the mesh; as it is where there is no mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*parts)))

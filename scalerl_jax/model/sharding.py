"""The sharding of each array on the mesh, defined in one place.

    replica   whole copies, over the slower network
    fsdp      shards weights, and the batch's rows
    context   shards the positions of a row, and weights
    expert    shards experts; for everything else it is another fsdp
    tensor    shards heads, MLP columns and vocabulary

The row of a weight names its dimensions; `RULES` gives the axes along which each of these names is sharded.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("replica", "fsdp", "context", "expert", "tensor")
ROWS = ("replica", "fsdp", "expert")  # axes that shard a batch's rows

# A dimension of the rows in families/ -> mesh axes; any other is replicated.
RULES = {
    "experts": ("expert",),
    "width": ("fsdp", "context", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert_mlp": ("tensor",),
    "vocabulary": ("tensor",),
}
WEIGHTS = MESH_AXES[1:]  # axes that shard weights


def mesh_sizes(
    devices: int, *, replica: int = 1, fsdp: int = 0, context: int = 1, expert: int = 1, tensor: int = 1
) -> dict[str, int]:
    """The size of every axis, over so many devices. fsdp=0 uses the devices that the others leave.

    Raises ValueError if the sizes do not multiply to the number of devices.
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
    """Number of parts of a batch's rows."""
    return int(np.prod([mesh.shape[axis] for axis in ROWS]))


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Of programs whose weights are sharded. For TPUs XLA would divide a product into one for each part of a gathered
    weight, so that it sends one part while it multiplies another. But each adds to the whole result in memory, which
    takes longer than what is sent."""
    on_tpus = mesh.devices.flat[0].platform == "tpu"
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": str(2**20)} if on_tpus else {}


def spec(shape: Sequence[int], dimensions: Sequence[str], mesh: Mesh) -> PartitionSpec:
    """The partition of a weight with these dimensions.

    An axis shards a dimension if it divides what earlier axes leave of it; each axis shards at most one dimension.
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


def axes_of(part: PartitionSpec, dimension: int) -> tuple[str, ...]:
    """The mesh axes that shard the dimension, the outermost first."""
    axes = part[dimension]
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def abstract_weight(
    shape: Sequence[int], dimensions: Sequence[str], mesh: Mesh | None, dtype: Any
) -> jax.ShapeDtypeStruct:
    """A weight with these dimensions, with its sharding if there is a mesh."""
    sharding = None if mesh is None else NamedSharding(mesh, spec(shape, dimensions, mesh))
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def constrain(x: jax.Array, mesh: Mesh | None, *parts: Any) -> jax.Array:
    """`x` with this sharding on the mesh; unchanged without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*parts)))

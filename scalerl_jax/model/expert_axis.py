"""Experts on a mesh: each device computes its own experts, and its own columns of them, for the tokens of its group.

A group is the devices along the axis `expert`. In each of them, inside jax.shard_map:

    x, routing   all-gathered over `expert`                       every token of the group, on every device of it
    y            this device's experts' part of the output, and of it this device's columns (`tensor`)
    y            reduce-scattered over `expert`, summed over `tensor`

Pairs with other devices' experts are assigned to no expert here, and cost only their gathering. No token is dropped,
and the split of tokens does not depend on the router; the price is memory for all pairs of a group.

A weight's other shards (fsdp, context) are gathered first, in the dtype to which weights are rounded anyway; its
cotangent is reduce-scattered in float32.

Left out on purpose: an all-to-all of only those tokens that a device's experts need, which pays beyond a few devices.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from scalerl_jax.model.experts import Routing, expert_mlp
from scalerl_jax.model.precision import Precision
from scalerl_jax.model.sharding import ROWS, spec

# Axes along which the products below stay sharded; a weight is gathered along every other axis.
_KEPT = ("expert", "tensor")


def sharded_expert_mlp(
    x: jax.Array,
    routing: Routing,
    weights: Sequence[jax.Array],
    dimensions: Sequence[tuple[str, ...]],
    *,
    precision: Precision,
    mesh: Mesh,
) -> jax.Array:
    """As expert_mlp, for x [rows, length, D] and the masters gate, up and down with these dimensions."""
    specs = [spec(weight.shape, names, mesh) for weight, names in zip(weights, dimensions, strict=True)]
    cut = [axis for dimension in range(3) for axis in _axes(specs[0], dimension)]
    grouped = "expert" in _axes(specs[0], 0)
    assert grouped or mesh.shape["expert"] == 1, f"{weights[0].shape[0]} experts over {dict(mesh.shape)}"
    tokens = PartitionSpec(ROWS, "context", None)

    def local(x: jax.Array, chosen: jax.Array, scale: jax.Array, *shards: jax.Array) -> jax.Array:
        own = [_whole(shard, part, precision) for shard, part in zip(shards, specs)]
        if grouped:
            x, chosen, scale = (jax.lax.all_gather(part, "expert", axis=0, tiled=True) for part in (x, chosen, scale))
            here = chosen - jax.lax.axis_index("expert") * len(own[0])
            chosen = jnp.where((here >= 0) & (here < len(own[0])), here, len(own[0]))
        y = expert_mlp(x, Routing(chosen, scale, routing.on_input), tuple(own[:-1]), own[-1], precision=precision)
        # Sums between devices are in float32, as those within one.
        y = y.astype(jnp.float32)
        if grouped:
            y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
        if "tensor" in cut:
            y = jax.lax.psum(y, "tensor")
        return y.astype(x.dtype)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(tokens, tokens, tokens, *specs), out_specs=tokens, check_vma=False
    )  # fmt: skip
    return mapped(x, routing.experts, routing.weights, *weights)


def _whole(shard: jax.Array, part: PartitionSpec, precision: Precision) -> jax.Array:
    """The weight, gathered along all axes but those of the sharded products."""
    for dimension in range(len(part)):
        for axis in reversed(_axes(part, dimension)):
            if axis not in _KEPT:
                shard = _gathered(shard, axis, dimension, precision)
    return shard


def _axes(part: PartitionSpec, dimension: int) -> tuple[str, ...]:
    """The mesh axes that shard the dimension, the outermost first."""
    axes = part[dimension]
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(shard: jax.Array, axis: str, dimension: int, precision: Precision) -> jax.Array:
    """Gathers the shard in the sync dtype; returns float32 with the values of the sync dtype."""
    rounded = precision.cast(shard, precision.sync)
    return jax.lax.all_gather(rounded, axis, axis=dimension, tiled=True).astype(shard.dtype)


def _scattered(axis: str, dimension: int, precision: Precision, _: Any, g: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(g, axis, scatter_dimension=dimension, tiled=True),)


_gathered.defvjp(
    lambda shard, axis, dimension, precision: (_gathered(shard, axis, dimension, precision), None), _scattered
)

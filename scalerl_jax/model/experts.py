"""Experts: the routing of tokens to experts, and the experts' products.

    ROUTERS      logits [..., E] float32 -> Routing: k experts of each token and their weights
    expert_mlp   y_t = sum over its experts e:  weight_te * down_e(silu(gate_e(x_t)) * up_e(x_t))

Pairs (token, expert) are sorted by their expert, so that each expert's are contiguous rows, and the products of all
experts are one grouped product: the rows of expert e times matrix e. No expert has a capacity and no token is dropped:
whatever the router's balance, an expert computes all its tokens. Sorting and its reverse are gathers, in the backward
pass too.

Grouped products. TPUs use jax.lax.ragged_dot, which is a kernel there. On CPUs and GPUs XLA would compute it as E
masked products of all rows, 4 to 90 times slower than a loop over blocks of rows (tests/benchmarks/bench_experts.py),
so the loop is used; and so it is for the weights' cotangent everywhere, for which TPUs have no kernel either.

Precision as decoder.project: operands in the compute dtype, weights rounded to the sync dtype, results summed in
float32, float32 cotangents for weights. The router and the weighted sum of a token's experts are float32.

On a mesh each device computes its own experts, and its own columns of them, for the tokens of its group: the devices
along the axis `expert`. In each of them, inside jax.shard_map:

    x, routing   all-gathered over `expert`                       every token of the group, on every device of it
    y            this device's experts' part of the output, and of it this device's columns (`tensor`)
    y            reduce-scattered over `expert`, summed over `tensor`

Pairs with other devices' experts are assigned to no expert here, and cost only their gathering. No token is dropped,
and the split of tokens does not depend on the router; the price is memory for all pairs of a group. A weight's other
shards (fsdp, context) are gathered first, in the dtype to which weights are rounded anyway; its cotangent is
reduce-scattered in float32. Left out on purpose: an all-to-all of only those tokens that a device's experts need, which
pays beyond a few devices.

Legend of shapes: T tokens, E experts, k of a token, M = T k pairs, D width, F columns of an expert.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from scalerl_jax.model.lora import LowRank, partition_of_factors
from scalerl_jax.model.precision import Precision, named
from scalerl_jax.model.remat import PRODUCT
from scalerl_jax.model.sharding import ROWS, axes_of, spec

OWN = -1  # given instead of an expert: the router's own choice is used

# Rows of a block of the grouped product: the minimum, and the maximum on CPUs and on accelerators, which start kernels
# for each block.
SMALLEST_BLOCK, BLOCK, LARGE_BLOCK = 16, 128, 1024


# A master; or a merged weight, with the factors to which its gradient goes (lora.split).
Weight = tuple[jax.Array, LowRank | None]


class Routing(NamedTuple):
    """The experts of tokens."""

    experts: jax.Array  # [..., k] int32; E: no expert
    weights: jax.Array  # [..., k] float32
    on_input: bool = False  # the weight scales the expert's input, not its output


def softmax_router(logits: jax.Array, count: int, *, normalize: bool, given: jax.Array | None = None) -> Routing:
    """The `count` experts of the highest probability, which is their weight; normalize: the weights add up to 1.

    given: [..., count] int, experts to use instead, OWN: the router's choice; their weights still come from these
    logits (router replay, arXiv 2510.11370).
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    chosen = _chosen(logits, count, given)
    weights = _at(probabilities, chosen)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(chosen, weights)


def sigmoid_router(logits: jax.Array, count: int, *, normalize: bool, given: jax.Array | None = None) -> Routing:
    """The `count` experts of the highest logit, whose sigmoid scales their input. given: as above."""
    assert not normalize
    chosen = _chosen(logits, count, given)
    return Routing(chosen, jax.nn.sigmoid(_at(logits, chosen)), on_input=True)


ROUTERS: dict[str, Callable[..., Routing]] = {"softmax": softmax_router, "sigmoid": sigmoid_router}


def _chosen(logits: jax.Array, count: int, given: jax.Array | None) -> jax.Array:
    own = jax.lax.top_k(logits, count)[1]
    return own if given is None else jnp.where(given == OWN, own, given)


def moved(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """[..., k] bool: which of chosen [..., k] are not among the k experts with the highest logits [..., E]."""
    own = jax.lax.top_k(logits, chosen.shape[-1])[1]
    return ~jnp.any(chosen[..., :, None] == own[..., None, :], axis=-1)


def _at(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """values [..., E] at chosen [..., k]. A masked sum and not a gather, whose backward pass would be a scatter."""
    there = chosen[..., None] == jnp.arange(values.shape[-1])
    return jnp.sum(jnp.where(there, values[..., None, :], 0.0), axis=-1)


def expert_mlp(x: jax.Array, routing: Routing, weights: Sequence[Weight], *, precision: Precision) -> jax.Array:
    """The output of the experts for x [..., D] in the compute dtype: like x.

    Args:
      weights: masters, gate and up [E, F, D] each, or both in one [E, 2F, D]; and down [E, D, F].
    """
    tokens = x.reshape(-1, x.shape[-1])
    chosen, shares = (part.reshape(len(tokens), -1) for part in routing[:2])

    def product(x: jax.Array, weight: Weight) -> jax.Array:
        return named(grouped_product(x, weight, sizes, precision), PRODUCT)

    order, inverse, sizes = _sorted(chosen.reshape(-1), len(weights[0][0]))
    pairs = _to_pairs(tokens, order, inverse)
    if routing.on_input:
        scale = _permute(shares.reshape(-1), order, inverse)[:, None]
        pairs = (pairs.astype(jnp.float32) * scale).astype(x.dtype)
    *gate_up, down = weights
    inner = [product(pairs, weight) for weight in gate_up]
    gate, up = inner if len(inner) == 2 else jnp.split(inner[0], 2, axis=-1)
    mixed = product(jax.nn.silu(gate) * up, down)
    back = _permute(mixed, inverse, order).reshape(*chosen.shape, -1).astype(jnp.float32)
    back = back if routing.on_input else back * shares[..., None]
    return jnp.sum(back, axis=1).astype(x.dtype).reshape(x.shape)


def tokens_of(chosen: jax.Array, experts: int) -> jax.Array:
    """[experts] float32: the number of tokens of each expert, from chosen [..., k]."""
    return jnp.sum(chosen.reshape(-1, 1) == jnp.arange(experts), axis=0, dtype=jnp.float32)


# ------------------------------------------------------------------------------------------------------- pairs


def _sorted(chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pairs sorted by expert, [M] int32, those without an expert last: (pair at each place, place of each pair, pairs
    of each [E])."""
    order = jnp.argsort(chosen, stable=True)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    sizes = jnp.sum(chosen[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    return order, inverse, sizes


@jax.custom_vjp
def _to_pairs(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """x [T, D] -> [M, D], a token's row for each of its pairs, in the order of the experts."""
    return x[order // (len(order) // len(x))]


def _to_pairs_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, None, None]:
    inverse, tokens = saved
    parts = g[inverse].reshape(tokens, -1, g.shape[-1])
    return jnp.sum(parts.astype(jnp.float32), axis=1).astype(g.dtype), None, None


_to_pairs.defvjp(lambda x, order, inverse: (_to_pairs(x, order, inverse), (inverse, len(x))), _to_pairs_backward)


@jax.custom_vjp
def _permute(x: jax.Array, places: jax.Array, inverse: jax.Array) -> jax.Array:
    """x[places], for places that are a permutation; inverse: its inverse."""
    return x[places]


_permute.defvjp(lambda x, places, inverse: (x[places], inverse), lambda inverse, g: (g[inverse], None, None))


# --------------------------------------------------------------------------------------------- grouped products


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(x: jax.Array, weight: Weight, sizes: jax.Array, precision: Precision) -> jax.Array:
    """x [M, in] in the compute dtype times weight [E, out, in]; sizes [E]: the number of consecutive rows per expert.

    Returns [M, out] in the compute dtype, 0 in rows beyond the sum of sizes. The cotangent of the weight, or of its
    factors, is float32.
    """
    return _rows_times(x, precision.cast(weight[0]), sizes, 2, precision)


def _grouped_backward(precision: Precision, saved: Any, g: jax.Array) -> tuple[jax.Array, Any, None]:
    x, (weight, adapter), sizes = saved
    dx = _rows_times(g, precision.cast(weight), sizes, 1, precision)

    def outer(g: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(
            g, x, sizes,
            cpu=functools.partial(_outer_by_blocks, dot=precision.dot, most=BLOCK),
            default=functools.partial(_outer_by_blocks, dot=precision.dot, most=LARGE_BLOCK),
        )  # fmt: skip

    if adapter is None:
        return dx, (outer(g, x).astype(weight.dtype), None), None
    left, right = adapter.factors(x.dtype)
    inner, back = _rows_times(x, right, sizes, 2, precision), _rows_times(g, left, sizes, 1, precision)
    return dx, (None, adapter.of_factors(outer(g, inner), outer(back, x))), None


grouped_product.defvjp(
    lambda x, weight, sizes, precision: (grouped_product(x, weight, sizes, precision), (x, weight, sizes)),
    _grouped_backward,
)


def _rows_times(x: jax.Array, weight: jax.Array, sizes: jax.Array, over: int, precision: Precision) -> jax.Array:
    """Each row of x times its expert's matrix, summed over the matrices' dimension `over` of weight's three."""
    by_blocks, ragged = (functools.partial(f, over=over, dot=precision.dot) for f in (_by_blocks, _ragged))
    return jax.lax.platform_dependent(
        x, weight, sizes,
        tpu=ragged,
        # The CPU has no fast kernel for a bfloat16 result: float32 until all blocks are done.
        cpu=functools.partial(by_blocks, most=BLOCK, result=jnp.float32),
        default=functools.partial(by_blocks, most=LARGE_BLOCK, result=x.dtype),
    )  # fmt: skip


def _ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, over: int, dot: jax.lax.Precision) -> jax.Array:
    matrices = jnp.swapaxes(weight, 1, 2) if over == 2 else weight
    y = jax.lax.ragged_dot(x, matrices, sizes, precision=dot)
    return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), y, 0)


def rows_of_block(pairs: int, experts: int, most: int) -> int:
    """Rows of a block: about the pairs of an expert under a uniform load, within SMALLEST_BLOCK and `most`."""
    rows = SMALLEST_BLOCK
    while rows < min(most, pairs // experts):
        rows *= 2
    return min(rows, pairs)


class _Blocks(NamedTuple):
    """The blocks of `rows` rows that cover each expert's rows; the last of an expert overlaps the next expert's
    rows."""

    count: jax.Array
    expert: jax.Array  # [most blocks] int32 each
    start: jax.Array
    end: jax.Array
    rows: int

    @staticmethod
    def of(sizes: jax.Array, pairs: int, most: int) -> "_Blocks":
        experts, rows = len(sizes), rows_of_block(pairs, len(sizes), most)
        ends = jnp.cumsum(sizes)
        own = -(-sizes // rows)
        last = jnp.cumsum(own)
        number = jnp.arange(pairs // rows + experts, dtype=jnp.int32)
        expert = jnp.minimum(jnp.sum(last <= number[:, None], axis=1, dtype=jnp.int32), experts - 1)
        start = (ends - sizes)[expert] + (number - (last - own)[expert]) * rows
        return _Blocks(last[-1], expert, start, ends[expert], rows)

    def place(self, i: jax.Array, pairs: int) -> tuple[jax.Array, jax.Array]:
        """The start of block i, and which of its rows belong to its expert, [rows, 1]."""
        at = jnp.minimum(self.start[i], pairs - self.rows)
        row = at + jnp.arange(self.rows, dtype=jnp.int32)
        return at, ((row >= self.start[i]) & (row < self.end[i]))[:, None]


def _by_blocks(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, *, over: int, dot: jax.lax.Precision, most: int, result: Any
) -> jax.Array:
    blocks = _Blocks.of(sizes, len(x), most)

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        at, mine = blocks.place(i, len(x))
        matrix = jax.lax.dynamic_index_in_dim(weight, blocks.expert[i], keepdims=False)
        rows = jax.lax.dynamic_slice_in_dim(x, at, blocks.rows)
        y = jax.lax.dot_general(
            rows, matrix, (((1,), (over - 1,)), ((), ())), precision=dot, preferred_element_type=jnp.float32
        )
        before = jax.lax.dynamic_slice_in_dim(out, at, blocks.rows)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, y.astype(result), before), at, 0)

    out = jnp.zeros((len(x), weight.shape[3 - over]), result)
    return jax.lax.fori_loop(0, blocks.count, one, out).astype(x.dtype)


def _outer_by_blocks(g: jax.Array, x: jax.Array, sizes: jax.Array, *, dot: jax.lax.Precision, most: int) -> jax.Array:
    blocks = _Blocks.of(sizes, len(x), most)

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        at, mine = blocks.place(i, len(x))
        left = jnp.where(mine, jax.lax.dynamic_slice_in_dim(g, at, blocks.rows), 0)
        right = jax.lax.dynamic_slice_in_dim(x, at, blocks.rows)
        more = jax.lax.dot_general(
            left, right, (((0,), (0,)), ((), ())), precision=dot, preferred_element_type=jnp.float32
        )
        before = jax.lax.dynamic_index_in_dim(out, blocks.expert[i])
        return jax.lax.dynamic_update_index_in_dim(out, before + more, blocks.expert[i], 0)

    out = jnp.zeros((len(sizes), g.shape[1], x.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.count, one, out)


# -------------------------------------------------------------------------------------------------- on a mesh

# Axes along which the products below stay sharded; a weight is gathered along every other axis.
_KEPT = ("expert", "tensor")


def sharded_expert_mlp(
    x: jax.Array,
    routing: Routing,
    weights: Sequence[Weight],
    dimensions: Sequence[tuple[str, ...]],
    *,
    precision: Precision,
    mesh: Mesh,
) -> jax.Array:
    """As expert_mlp, for x [rows, length, D] and gate, up and down with these dimensions."""
    wholes = [spec(weight.shape, names, mesh) for (weight, _), names in zip(weights, dimensions, strict=True)]
    specs = [(whole, partition_of_factors(adapter, whole)) for (_, adapter), whole in zip(weights, wholes, strict=True)]
    cut = [axis for dimension in range(3) for axis in axes_of(wholes[0], dimension)]
    grouped = "expert" in axes_of(wholes[0], 0)
    assert grouped or mesh.shape["expert"] == 1, f"{weights[0][0].shape[0]} experts over {dict(mesh.shape)}"
    tokens, exact = PartitionSpec(ROWS, "context", None), dataclasses.replace(precision, sync="float32")

    def local(x: jax.Array, chosen: jax.Array, scale: jax.Array, *shards: Weight) -> jax.Array:
        own = []
        for (shard, adapter), (part, factors) in zip(shards, specs):
            if adapter is not None:
                left, right = _whole(adapter.left, factors.left, exact), _whole(adapter.right, factors.right, exact)
                adapter = adapter.of_factors(left, right)
            own.append((_whole(shard, part, precision), adapter))
        if grouped:
            x, chosen, scale = (jax.lax.all_gather(part, "expert", axis=0, tiled=True) for part in (x, chosen, scale))
            count = len(own[0][0])
            here = chosen - jax.lax.axis_index("expert") * count
            chosen = jnp.where((here >= 0) & (here < count), here, count)
        y = expert_mlp(x, Routing(chosen, scale, routing.on_input), own, precision=precision)
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
        for axis in reversed(axes_of(part, dimension)):
            if axis not in _KEPT:
                shard = _gathered(shard, axis, dimension, precision)
    return shard


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

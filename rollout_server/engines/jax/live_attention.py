"""Attention of one query of each slot over the positions that the slot has: on GPUs cuDNN's, on TPUs a Pallas kernel.

XLA's products read the caches to the end, and a cache is as long as its longest slot. cuDNN's kernel takes the
length of each slot's part. In the one for TPUs a step of the grid is one tile of positions of one slot, and there are
no steps for tiles past a slot's end, or before the first position that a layer with local attention sees: what is read
is the live part, up to a tile a slot. As in flash attention (arXiv 2205.14135), a slot's tiles are added up with a
running maximum and sum.

Legend: B slots, S positions, T positions of a tile, K key/value heads, G query heads that share one, h head size.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from rollout_server.engines.jax.weights import DecodePrecision
from scalerl_jax.model.attention import cudnn
from scalerl_jax.model.attention.blocks import MASKED

LONG_CACHE = 2048  # positions; shorter caches have little that is not live
LONGEST_TILE, SHORTEST_TILE = 512, 256
LANES = 128
_TILE_BYTES = 2**21  # of keys; a step has those, as many of values, and the next step's on their way
# cuDNN reads each key head of a slot with one of the 108 to 148 multiprocessors of a large GPU: with fewer most of the
# memory's rate is lost, which XLA's products use whatever the shape is.
_FEWEST_PARTS = 128
_Scalars = Any  # references to what the steps of the grid look up


def has_cudnn(cache: jax.Array, precision: DecodePrecision) -> bool:
    """Whether cuDNN reads the live part of a cache [B, K, S, h] on this GPU."""
    slots, heads, length, size = cache.shape
    fits = cudnn.has_head(precision.capability, size) and cache.dtype == "bfloat16"
    many = length >= LONG_CACHE and slots * heads >= _FEWEST_PARTS
    return fits and many and not precision.bitwise and cudnn.has_packed_call()


def tile_of(cache: jax.Array) -> int:
    """Positions of a tile of a cache [B, K, S, h]; 0: it is read whole, since it is short, its length odd, or its heads
    are no whole lanes: then the kernel's layout is another one, and every step would copy the cache."""
    _, heads, length, size = cache.shape
    tile = math.gcd(length, LONGEST_TILE) if size % LANES == 0 else 0
    while heads * tile * size * cache.dtype.itemsize > _TILE_BYTES:
        tile //= 2
    return tile if tile >= SHORTEST_TILE and length > tile else 0


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, end: jax.Array, *, scale: float, precision: Any,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The largest score [B, K, G, 1] float32, the sum of exp(score - largest), likewise, and the values [B, K, G, h]
    float32, each times that, of q [B, K, G, h] over positions first..end - 1 [B] of k and v [B, K, S, h].

    A slot without such positions has a sum of 0. scale: of the products of q and k. interpret: without a TPU.
    """
    from jax.experimental import pallas as pl  # a fifth of a second, for TPUs alone
    from jax.experimental.pallas import tpu as pltpu

    slots, heads, length, size = k.shape
    group, tile = q.shape[2], tile_of(k)
    most = length // tile
    begin = jnp.clip(first // tile, 0, most - 1)
    count = jnp.clip(-(-end // tile) - begin, 1, most - begin)  # of a slot's tiles
    after = jnp.cumsum(count)  # steps of a slot and those before it
    slot = jnp.searchsorted(after, jnp.arange(slots * most), side="right").astype(jnp.int32)
    scalars = [x.astype(jnp.int32) for x in (slot, after - count, begin, count, first, end)]

    def of_slot(step: Any, slot: Any, *_: Any) -> tuple[Any, ...]:
        return slot[step], 0, 0, 0

    def of_tile(step: Any, slot: Any, before: Any, begin: Any, *_: Any) -> tuple[Any, ...]:
        at = slot[step]
        return at, 0, begin[at] + step - before[at], 0

    parts = [(heads, group, 1), (heads, group, 1), (heads, group, size)]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(after[-1],),
        in_specs=[
            pl.BlockSpec((1, heads, group, size), of_slot),
            pl.BlockSpec((1, heads, tile, size), of_tile),
            pl.BlockSpec((1, heads, tile, size), of_tile),
        ],
        out_specs=[pl.BlockSpec((1, *part), of_slot) for part in parts],
        scratch_shapes=[pltpu.VMEM(part, jnp.float32) for part in parts],
    )
    return pl.pallas_call(
        functools.partial(_step, tile=tile, scale=scale, precision=precision),
        grid_spec=grid,
        out_shape=[jax.ShapeDtypeStruct((slots, *part), jnp.float32) for part in parts],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="live_attention",
    )(*scalars, q, k, v)


def _step(
    slot: _Scalars, before: _Scalars, begin: _Scalars, count: _Scalars, first: _Scalars, end: _Scalars,
    q: Any, k: Any, v: Any, top_out: Any, total_out: Any, mixed_out: Any, top: Any, total: Any, mixed: Any,
    *, tile: int, scale: float, precision: Any,
) -> None:  # fmt: skip
    """One tile of one slot."""
    from jax.experimental import pallas as pl

    step = pl.program_id(0)
    own = slot[step]
    number = step - before[own]  # among the slot's tiles

    @pl.when(number == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)

    at = (begin[own] + number) * tile + jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1)
    seen = (at >= first[own]) & (at < end[own])
    dot: Any = {"precision": precision, "preferred_element_type": jnp.float32}
    for head in range(q.shape[1]):
        scores = jax.lax.dot_general(q[0, head], k[0, head], (((1,), (1,)), ((), ())), **dot)
        scores = jnp.where(seen, scores * scale, MASKED)
        old, new = top[head], jnp.maximum(top[head], jnp.max(scores, axis=-1, keepdims=True))
        weights, less = jnp.where(seen, jnp.exp(scores - new), 0.0), jnp.exp(old - new)
        by_value = jax.lax.dot_general(weights.astype(v.dtype), v[0, head], (((1,), (0,)), ((), ())), **dot)
        top[head] = new
        total[head] = total[head] * less + jnp.sum(weights, axis=-1, keepdims=True)
        mixed[head] = mixed[head] * less + by_value

    @pl.when(number == count[own] - 1)
    def _() -> None:
        for out, kept in ((top_out, top), (total_out, total), (mixed_out, mixed)):
            out[0] = kept[...]

"""Attention whose numbers are the same to the bit in packed rows and in a generator's slots: config.numerics=bitwise.

A query iterates over the keys of its segment in tiles of TILE from the segment's first, with a running maximum and sum
(flash attention, arXiv 2205.14135), as one of a block of QUERIES: query i of its segment is row i % QUERIES there. ROWS
blocks are computed at once (see row_blocks.py): in the trainer neighboring blocks, in the generator one for each slot,
of which one row is used. So both multiply the same shapes, and each query adds up the same tiles in the same order. A
tile without visible keys changes no bit: the maximum stays, the factor is exp(0) = 1, and the summands are 0. A
generator on a CPU multiplies other shapes, of which the kernels there make the same bits (attend_slots_on_cpu).

Segments start at multiples of TILE. The backward pass is that of the other ways (blocks.py).

Legend: R rows, L length, K key/value heads, G query heads that share one, h head size, W = ROWS, Q = QUERIES, T = TILE.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.model.attention.blocks import (
    BLOCK,
    LOOP_SPAN,
    MASKED,
    MOST_UNROLLED,
    SAVED,
    Segments,
    heads_last,
    looped_backward,
    loops_on,
    unrolled_backward,
)
from scalerl_jax.model.precision import kept, rounded
from scalerl_jax.model.row_blocks import QUERIES, ROWS, TILE, barrier, in_a_loop

Tile = Callable[[Any], tuple[jax.Array, jax.Array]]  # number -> keys [W, K, h, T], values [W, K, T, h]

_SMALL_PRODUCT = 2**14  # elements of the right operand; XLA's kernels for CPUs change between 2**15 and 40,960
_UNSEEN = 1e30  # log of the sum for a query without visible keys: its probabilities are 0 in the backward pass


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, precision: jax.lax.Precision, *, cpu: bool = False
) -> jax.Array:
    """As blocks.attend, for whole rows."""
    assert segments.offset is None
    rows, length, heads, size = q.shape
    grouped = q.reshape(rows, length, k.shape[2], heads // k.shape[2], size)
    return _tiled(grouped, k, v, segments.keys, segments.longest, precision, cpu).reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _tiled(q, k, v, segment_ids, longest, precision, cpu):
    """q [R, L, K, G, h], k and v [R, L, K, h] -> like q."""
    return _tiled_forward(q, k, v, segment_ids, longest, precision, cpu)[0]


def _tiled_forward(q, k, v, segment_ids, longest, precision, cpu):
    del longest, cpu
    dtype = str(q.dtype)

    def on_cpu(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> Any:
        wide = (x.astype(jnp.float32) for x in (q, k, v))  # the dtype of the generator's keys and values
        return _rows_over_tiles(*wide, segment_ids, dtype, precision)

    out, log_total = jax.lax.platform_dependent(
        q, k, v, segment_ids, cpu=on_cpu,
        default=functools.partial(_rows_over_tiles, dtype=dtype, precision=precision),
    )  # fmt: skip
    out, log_total = kept(heads_last(out, 1), SAVED), kept(log_total, SAVED)
    return out, (q, k, v, segment_ids, out, log_total)


def _rows_over_tiles(q, k, v, segment_ids, dtype, precision):
    """(output in `dtype` [R, K, G, L, h], log of the sums [R, K, G, L, 1] float32) for q, k and v in the dtype of
    products."""
    rows, length, kv_heads, group, size = q.shape
    padded = -(-length // TILE) * TILE

    def whole(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, padded - length)) + ((0, 0),) * (x.ndim - 2))

    def blocks(x: jax.Array) -> jax.Array:
        """[R, L, ...] -> [chunks, W, Q, ...]"""
        x = whole(x).reshape(-1, QUERIES, *x.shape[2:])
        x = jnp.pad(x, ((0, -len(x) % ROWS),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, ROWS, *x.shape[1:])

    def joined(x: jax.Array) -> jax.Array:
        """[chunks, W, K, G Q, n] -> [R, K, G, L, n]"""
        x = x.reshape(-1, kv_heads, group, QUERIES, x.shape[-1])[: rows * padded // QUERIES]
        x = jnp.moveaxis(x.reshape(rows, -1, *x.shape[1:]), 1, 3)
        return x.reshape(*x.shape[:3], padded, x.shape[-1])[..., :length, :]

    keys, values = (whole(x).reshape(-1, TILE, kv_heads, size) for x in (k, v))
    tiles = keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)
    here = jnp.broadcast_to(jnp.arange(length), segment_ids.shape)
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    starts = jax.lax.cummax(jnp.where(changes, here, 0), axis=1)
    seen = jnp.where(segment_ids > 0, here - starts + 1, 0)
    # The first tile of each block's segment, among the tiles of all rows: a block's first query is in its segment.
    first = starts // TILE + jnp.arange(rows)[:, None] * (padded // TILE)

    def chunk(xs: Any, tiles: Any) -> Any:
        queries, seen, first = xs
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(ROWS, kv_heads, group * QUERIES, size)

        def tile(number: Any) -> tuple[jax.Array, jax.Array]:
            wanted = jnp.minimum(first[:, 0] + number, len(keys) - 1)
            return tiles[0][wanted], tiles[1][wanted]

        return over_tiles(queries, seen, tile, dtype, precision)

    return tuple(map(joined, in_a_loop(chunk, (blocks(q), blocks(seen), blocks(first)), tiles)))


def over_tiles(q: jax.Array, seen: jax.Array, tile: Tile, dtype: str, precision: Any) -> tuple[jax.Array, jax.Array]:
    """q [W, K, G Q, h] over the first `seen` [W, Q] keys of each -> (like q in `dtype`, log of the sum [W, K, G Q, 1]
    float32). q and the tiles are in the dtype of products, with values of `dtype`."""
    dot: Any = {"precision": precision, "preferred_element_type": jnp.float32}
    batch = ((0, 1), (0, 1))

    def add(number: Any, carry: Any) -> Any:
        (top, total, out), queries, sees, keys, values = barrier((carry, q, seen, *tile(number)))
        scores = jax.lax.dot_general(queries, keys, (((3,), (2,)), batch), **dot) * (1 / math.sqrt(q.shape[-1]))
        counts = number * TILE + jnp.arange(TILE) < sees[..., None]
        counts = jnp.tile(counts, (1, q.shape[2] // QUERIES, 1))[:, None]
        scores = jnp.where(counts, scores, MASKED)
        new = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights, scale = barrier((jnp.exp(scores - new), jnp.exp(top - new)))
        by_value = jax.lax.dot_general(
            rounded(weights, dtype).astype(values.dtype), values, (((3,), (2,)), batch), **dot
        )
        total = total * scale + _sum(weights)
        return barrier((new, total, out * scale + by_value))

    nothing = jnp.zeros((*q.shape[:-1], 1), jnp.float32)
    start = (nothing + MASKED, nothing, jnp.zeros(q.shape, jnp.float32))
    top, total, out = jax.lax.fori_loop(0, jnp.maximum(1, -(-jnp.max(seen) // TILE)), add, start)
    unseen = jnp.tile(seen == 0, (1, q.shape[2] // QUERIES))[:, None, :, None]
    out = jnp.where(unseen, 0.0, out / total).astype(dtype)
    return barrier((out, jnp.where(unseen, _UNSEEN, top + jnp.log(total))))


def _sum(x: jax.Array) -> jax.Array:
    """[..., TILE] -> [..., 1], added up in halves: a compiler chooses the order of jnp.sum by the other dimensions."""
    while x.shape[-1] > 1:
        first, second = jnp.split(x, 2, axis=-1)
        x = first + second
    return x


def _tiled_backward(longest, precision, cpu, saved, g):
    q, k, v, segment_ids, out, log_total = saved
    length = q.shape[1]
    block = min(length, BLOCK)
    if math.ceil(length / block) <= MOST_UNROLLED:
        return unrolled_backward(block, math.ceil((longest - 1) / block), precision, saved, g)
    offset, span = jnp.int32(0), min(length, LOOP_SPAN)
    saved = q, k, v, segment_ids, segment_ids, offset, out, log_total
    return looped_backward(block, span, loops_on(cpu, 1)[1], precision, saved, g)[:4]


_tiled.defvjp(_tiled_forward, _tiled_backward)


def attend_slots(q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array, precision: Any) -> jax.Array:
    """One query of each slot: q [B, H, h] over positions 0..position [B] of k [B, K, h, S] and v [B, K, S, h] -> like
    q. S is a multiple of TILE."""
    slots, heads, size = q.shape
    kv_heads = k.shape[1]
    outs = []
    for at in range(0, slots, ROWS):
        count = min(ROWS, slots - at)

        def rows(x: jax.Array, axis: int | None = None, number: Any = 0, at: int = at, count: int = count) -> jax.Array:
            """The data of these slots, or one tile of it along an axis; padding after them."""
            x = jax.lax.slice_in_dim(x, at, at + count)
            x = x if axis is None else jax.lax.dynamic_slice_in_dim(x, number * TILE, TILE, axis)
            return jnp.pad(x, ((0, ROWS - count),) + ((0, 0),) * (x.ndim - 1))

        def tile(number: Any, rows: Any = rows) -> tuple[jax.Array, jax.Array]:
            return rows(k, 3, number), rows(v, 2, number)

        queries = rows(q.astype(k.dtype)).reshape(ROWS, kv_heads, -1, 1, size)
        queries = jnp.broadcast_to(queries, (*queries.shape[:3], QUERIES, size)).reshape(ROWS, kv_heads, -1, size)
        place = rows(position)
        seen = jnp.broadcast_to(jnp.minimum(place + 1, k.shape[3])[:, None], (ROWS, QUERIES))
        out, _ = over_tiles(queries, seen, tile, str(q.dtype), precision)
        out = out.reshape(ROWS, heads, QUERIES, size)
        outs.append(jnp.take_along_axis(out, (place % QUERIES)[:, None, None, None], axis=2)[:count, :, 0])
    return jnp.concatenate(outs)


def attend_slots_on_cpu(q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array, precision: Any) -> jax.Array:
    """As attend_slots, with the same bits on a CPU, in a quarter of the time: all tiles at once, and nothing padded.

    There XLA's products of small matrices sum up an element in the same order whatever the number of rows (from 2 on),
    of columns, and of matrices in a batch. The probe of a trainer and tests compare the bits.
    """
    dot: Any = {"precision": precision, "preferred_element_type": jnp.float32}
    slots, heads, size = q.shape
    kv_heads, length = v.shape[1:3]
    group = heads // kv_heads
    grouped = q.reshape(slots, kv_heads, group, size).astype(k.dtype)
    grouped = jnp.broadcast_to(grouped, (slots, kv_heads, max(2, group), size))
    tiles = length // TILE

    # A product with more columns is another kernel's.
    columns = max(TILE, _SMALL_PRODUCT // size // TILE * TILE)
    parts = [
        jax.lax.dot_general(grouped, part, (((3,), (2,)), ((0, 1), (0, 1))), **dot)
        for part in (k[..., at : at + columns] for at in range(0, length, columns))
    ]
    scores = jnp.concatenate(parts, axis=3) * (1 / math.sqrt(size))
    scores = jnp.where(jnp.arange(length) <= position[:, None, None, None], scores, MASKED)
    scores = scores.reshape(*scores.shape[:3], tiles, TILE).transpose(0, 1, 3, 2, 4)

    top = jax.lax.cummax(jnp.max(scores, axis=-1, keepdims=True), axis=2)  # [B, K, tiles, G, 1]
    before = jnp.concatenate([jnp.full_like(top[:, :, :1], MASKED), top[:, :, :-1]], axis=2)
    weights, scale = barrier((jnp.exp(scores - top), jnp.exp(before - top)))
    values = v.reshape(slots, kv_heads, tiles, TILE, size)
    batch = ((0, 1, 2), (0, 1, 2))
    by_value = jax.lax.dot_general(rounded(weights, str(q.dtype)).astype(v.dtype), values, (((4,), (3,)), batch), **dot)
    added = barrier((by_value, _sum(weights)))

    def add(carry: Any, tile: Any) -> Any:
        (out, total), (scale, (by_value, weight)) = carry, tile
        return (out * scale + by_value, total * scale + weight), None

    start = jnp.zeros_like(by_value[:, :, 0]), jnp.zeros_like(scale[:, :, 0])
    by_tile = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), (scale, added))
    (out, total), _ = jax.lax.scan(add, start, by_tile, unroll=min(tiles, 16))
    return (out / total)[:, :, :group].reshape(q.shape).astype(q.dtype)

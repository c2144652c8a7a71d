"""Attention in plain XLA, for every platform: queries are taken a block at a time, with the keys that matter to them.

The scores of a whole row, [length, length], never exist. Three ways, by the row's length and its longest segment:

    unrolled   few blocks: one after the other, each with just the keys it needs
    windowed   many blocks, of short segments: all at once, each with a few blocks before it
    looped     many blocks: a loop, whose program does not grow with the row; also where the queries are a part of it
"""

import math

import jax

from scalerl_jax.model.attention.backend import BLOCKS, Backend
from scalerl_jax.model.attention.blocks_looped import looped
from scalerl_jax.model.attention.blocks_unrolled import unrolled
from scalerl_jax.model.attention.blocks_windowed import windowed

BLOCK = 128
_SHORT_BLOCK = 64  # wastes less on short segments, and costs more operations on long ones
_SHORT_SEGMENT = 256
MOST_UNROLLED = 8  # blocks: compile time grows with them
_LOOP_BLOCK, LOOP_SPAN = 256, 512
_MOST_SCORES = 2**28  # that exist at once where all blocks are one product: 1 GiB, and the backward pass has three


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    *,
    offset: jax.Array | None,
    max_segment: int,
    precision: jax.lax.Precision,
    backend: Backend = BLOCKS,
) -> jax.Array:
    """q [rows, length, heads, h], k and v [rows, keys, kv_heads, h] -> like q. offset: None where they are one row."""
    del backend
    rows, length, heads, size = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(rows, length, kv_heads, heads // kv_heads, size)
    short = max_segment <= _SHORT_SEGMENT
    block = min(length, _SHORT_BLOCK if short else BLOCK)
    back = math.ceil((max_segment - 1) / block)  # blocks before its own that a block can see
    window = (back + 1) * block
    few = rows * heads * length * window <= _MOST_SCORES
    if offset is None and math.ceil(length / block) <= MOST_UNROLLED:
        out = unrolled(q, k, v, key_segments, block, back, precision)
    elif offset is None and 2 * window <= length and few:
        out = windowed(q, k, v, key_segments, block, back, precision)
    else:
        start = jax.numpy.int32(0) if offset is None else offset
        sizes = min(length, _LOOP_BLOCK), min(k.shape[1], LOOP_SPAN)
        out = looped(q, k, v, query_segments, key_segments, start, *sizes, precision)
    return out.reshape(rows, length, heads, size)

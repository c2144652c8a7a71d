"""Attention in plain XLA, for every platform: queries are processed a block at a time, with only the keys they need.

The scores of a whole row, [length, length], never exist. Three ways, by the row's length and its longest segment:

    unrolled   few blocks: one after the other, each with only the keys it needs
    windowed   many blocks, of short segments: all at once, each with a few blocks before it
    looped     many blocks: a loop, whose program does not grow with the row; also if the queries are a part of it

The backward pass is explicit. It keeps q, k, v, the output and each query's log of the softmax's sum, recomputes the
probabilities P from them, and needs no other pass over the scores than

    dV = P' dO      dS = P * (dO V' - rowsum(dO * O)) / sqrt(h)      dQ = dS K      dK = dS' Q

Products have operands in the given dtype, or with precision HIGHEST in float32, and accumulate in float32; everything
between them is float32. What suits a CPU best was measured there (tests/benchmarks/LOG.md), down to which operand of a
product is transposed.

Legend: R rows, L queries, S keys, K key/value heads, G query heads that share one, h head size, B queries of a block,
W keys that a block sees or that a span has.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.model.precision import kept

SAVED = "attention"  # name of the arrays kept for the backward pass (jax.ad_checkpoint), for a remat policy by names
MASKED = -1e30
BLOCK = 128
_SHORT_BLOCK = 64  # wastes less on short segments, and costs more operations on long ones
_SHORT_SEGMENT = 256
MOST_UNROLLED = 8  # blocks: compile time grows with them
_LOOP_BLOCK, LOOP_SPAN = 256, 256
_MOST_SCORES = 2**28  # at once, if all blocks are one product: 1 GiB; the backward pass has three such arrays
_CACHED_SCORES = 2**19  # at once in a loop on a core of a CPU: 2 MiB


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of queries and keys: a query sees the keys of its own segment that are not later."""

    queries: jax.Array  # [rows, length] int32, the segment of each query; 0 is padding
    keys: jax.Array  # [rows, keys] int32
    offset: jax.Array | None  # of the first query among the keys; None: the queries are whole rows
    longest: int  # positions; no segment is longer


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, precision: jax.lax.Precision, *, cpu: bool = False
) -> jax.Array:
    """q [rows, length, heads, h], k and v [rows, keys, kv_heads, h] -> like q. cpu: as Backend has it."""
    rows, length, heads, size = q.shape
    # A CPU's products of few rows or columns are no faster in bfloat16.
    few_columns = jax.lax.Precision.HIGHEST if cpu else precision
    kv_heads = k.shape[2]
    q = q.reshape(rows, length, kv_heads, heads // kv_heads, size)
    short = segments.longest <= _SHORT_SEGMENT
    block = min(length, _SHORT_BLOCK if short else BLOCK)
    back = math.ceil((segments.longest - 1) / block)  # blocks before its own that a block can see
    window = (back + 1) * block
    few = rows * heads * length * window <= _MOST_SCORES
    if segments.offset is None and math.ceil(length / block) <= MOST_UNROLLED:
        out = unrolled(q, k, v, segments.keys, block, back, few_columns)
    elif segments.offset is None and 2 * window <= length and few:
        out = windowed(q, k, v, segments.keys, block, back, few_columns)
    else:
        start = jnp.int32(0) if segments.offset is None else segments.offset
        sizes = min(length, _LOOP_BLOCK), min(k.shape[1], LOOP_SPAN)
        # A CPU computes loops side by side, each on one core: products as small as theirs are not divided.
        loops, most = loops_on(cpu, kv_heads)
        parts = zip(*(jnp.split(x, loops, axis=2) for x in (q, k, v)), strict=True)
        outs = [looped(*part, segments.queries, segments.keys, start, *sizes, most, precision) for part in parts]
        out = jnp.concatenate(outs, axis=2)
    return out.reshape(rows, length, heads, size)


def loops_on(cpu: bool, kv_heads: int) -> tuple[int, int]:
    """The number of loops among which the key heads are divided, and the most scores at once in each."""
    if not cpu:
        return 1, _MOST_SCORES
    cores = os.cpu_count() or 1
    loops = _divisor(kv_heads, cores)
    return loops, _CACHED_SCORES * (cores // loops)


def attend_block(q, k, v, mask, precision):
    """q [..., K, G, B, h], k and v [..., K, W, h], mask [..., B, W] -> (like q, log of the sum [..., K, G, B, 1])."""
    scores = scores_of(q, k, mask, precision)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = by_values(weights, v, precision).reshape(q.shape) / total
    return out.astype(q.dtype), top + jnp.log(total)


def attend_block_backward(q, k, v, mask, log_total, mean, g, precision):
    """(dq like q, dk and dv [..., K, h, W]), float32. mean: mean_of the output and its cotangent g."""
    weights = jnp.exp(scores_of(q, k, mask, precision) - log_total)
    by_weight = _product(_rows(g), v, (1, 1), precision).reshape(weights.shape)
    by_score = (weights * (by_weight - mean) * (1 / math.sqrt(q.shape[-1]))).astype(q.dtype)
    dq = _product(_rows(by_score), k, (1, 0), precision).reshape(q.shape)
    # The narrow operand first, and the keys last: on a CPU several times faster than the opposite order.
    dk = _product(_rows(q), _rows(by_score), (0, 0), precision)
    dv = _product(_rows(g), _rows(weights.astype(v.dtype)), (0, 0), precision)
    # Without the barrier the compiler swaps the operands to save the transposition of the products' small results.
    return dq, *jax.lax.optimization_barrier((dk, dv))


def mask_of(query_segment: jax.Array, key_segment: jax.Array, offset: Any) -> jax.Array:
    """[..., B], [..., W] -> [..., B, W]: True for keys of the query's segment that are not later. Query i is at key
    offset + i."""
    queries, keys = query_segment.shape[-1], key_segment.shape[-1]
    causal = offset + jnp.arange(queries)[:, None] >= jnp.arange(keys)[None, :]
    return (query_segment[..., :, None] == key_segment[..., None, :]) & causal


def segment_starts(segment_ids: jax.Array) -> jax.Array:
    """[R, S] -> [R, S] int32: the place in its row at which each position's segment starts."""
    here = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(changes, here, 0), axis=1)


def scores_of(q, k, mask, precision):
    """[..., K, G, B, W] float32, scaled and masked."""
    scores = _product(_rows(q), k, (1, 1), precision).reshape(*q.shape[:-1], k.shape[-2])
    return jnp.where(mask[..., None, None, :, :], scores * (1 / math.sqrt(q.shape[-1])), MASKED)


def by_values(weights, v, precision):
    """weights [..., K, G, B, W] float32, v [..., K, W, h] -> [..., K, G B, h] float32"""
    return _product(_rows(weights.astype(v.dtype)), v, (1, 0), precision)


def mean_of(out: jax.Array, g: jax.Array, axis: int) -> jax.Array:
    """rowsum(dO * O), the mean of dO V' under P, heads first: [..., K, G, L, 1] float32."""
    return heads_first(jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True), axis)


def heads_first(x: jax.Array, axis: int) -> jax.Array:
    """Moves the length from `axis` to the second-to-last place, so that products are batched matrix products."""
    return jnp.moveaxis(x, axis, -2)


def operand(x: jax.Array, axis: int, precision: jax.lax.Precision) -> jax.Array:
    """Heads first, in the dtype that products take."""
    return heads_first(x.astype(jnp.float32) if precision == jax.lax.Precision.HIGHEST else x, axis)


def heads_last(x: jax.Array, axis: int) -> jax.Array:
    return jnp.moveaxis(x, -2, axis)


def _rows(x: jax.Array) -> jax.Array:
    """[..., G, B, n] -> [..., G B, n]: the query heads that share keys are rows of one product."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int], precision: Any) -> jax.Array:
    """Batched matrix product over the last two dimensions, contracted as given (0: first, 1: second), in float32."""
    batch = tuple(range(a.ndim - 2))
    contracting = ((a.ndim - 2 + contract[0],), (b.ndim - 2 + contract[1],))
    return jax.lax.dot_general(
        a, b, (contracting, (batch, batch)), precision=precision, preferred_element_type=jnp.float32
    )


# A row of few blocks, one after the other, each with the keys that it needs: no loop, and no wasted work.
# The program grows with the number of blocks.


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def unrolled(q, k, v, segment_ids, block, back, precision):
    """q [R, L, K, G, h], k and v [R, L, K, h] -> like q. Block i sees keys from block max(0, i - back) to i."""
    return _unrolled_forward(q, k, v, segment_ids, block, back, precision)[0]


def _spans(length: int, block: int, back: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and its keys; the last block may be shorter."""
    for start in range(0, length, block):
        stop = min(length, start + block)
        yield slice(start, stop), slice(max(0, start - back * block), stop)


def _in_turn(x: jax.Array, done: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Both unchanged, but `x` becomes available only after the last of `done`.

    The blocks do not depend on each other, so some compilers (XLA's for GPUs) would start with the scores of all of
    them: at 16k tokens and 32 heads that is 18 GiB, where one block's take 1 GiB.
    """
    if not done:
        return x, done
    x, last = jax.lax.optimization_barrier((x, done[-1]))
    return x, [*done[:-1], last]


def _unrolled_forward(q, k, v, segment_ids, block, back, precision):
    qt, kt, vt = (operand(x, 1, precision) for x in (q, k, v))
    outs, logs = [], []
    for at, to in _spans(q.shape[1], block, back):
        mask = mask_of(segment_ids[:, at], segment_ids[:, to], at.start - to.start)
        qt, outs = _in_turn(qt, outs)
        out, log_total = attend_block(qt[..., at, :], kt[..., to, :], vt[..., to, :], mask, precision)
        outs.append(out)
        logs.append(log_total)
    out = heads_last(jnp.concatenate(outs, axis=-2), 1).astype(q.dtype)
    out, log_total = kept(out, SAVED), kept(jnp.concatenate(logs, axis=-2), SAVED)
    return out, (q, k, v, segment_ids, out, log_total)


def unrolled_backward(block, back, precision, saved, g):
    q, k, v, segment_ids, out, log_total = saved
    qt, kt, vt, gt = (operand(x, 1, precision) for x in (q, k, v, g))
    mean = mean_of(out, g, 1)
    length = q.shape[1]
    dqs = []
    # Sums of the blocks' parts, one per block of keys: each part is split at the boundaries of key blocks.
    dks: list[Any] = [0.0] * math.ceil(length / block)
    dvs: list[Any] = [0.0] * math.ceil(length / block)
    for at, to in _spans(length, block, back):
        mask = mask_of(segment_ids[:, at], segment_ids[:, to], at.start - to.start)
        qt, dqs = _in_turn(qt, dqs)
        dq, dk, dv = attend_block_backward(
            qt[..., at, :], kt[..., to, :], vt[..., to, :], mask, log_total[..., at, :], mean[..., at, :],
            gt[..., at, :], precision,
        )  # fmt: skip
        dqs.append(dq)
        for start in range(to.start, to.stop, block):
            part = (..., slice(start - to.start, min(start + block, to.stop) - to.start))
            dks[start // block] += dk[part]
            dvs[start // block] += dv[part]
    dq, dk, dv = jnp.concatenate(dqs, axis=-2), jnp.concatenate(dks, axis=-1), jnp.concatenate(dvs, axis=-1)
    return (
        heads_last(dq, 1).astype(q.dtype),
        dk.transpose(0, 3, 1, 2).astype(k.dtype),
        dv.transpose(0, 3, 1, 2).astype(v.dtype),
        None,
    )


unrolled.defvjp(_unrolled_forward, unrolled_backward)


# A row of many blocks, all of them as one batched product: for segments of a few blocks at most.
# Each block sees itself and `back` blocks before it.


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def windowed(q, k, v, segment_ids, block, back, precision):
    """q [R, L, K, G, h], k and v [R, L, K, h] -> like q. Block i sees keys of the blocks i - back to i."""
    return _windowed_forward(q, k, v, segment_ids, block, back, precision)[0]


def _cut(x: jax.Array, block: int) -> jax.Array:
    """[R, L, ...] -> [R, blocks, B, ...]; padding is at the end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, block, *x.shape[2:])


def _windows(x: jax.Array, back: int, axis: int, fill: int = 0) -> jax.Array:
    """[R, blocks, ...] -> with W = (back + 1) B along `axis`: each block with those before it."""
    before = jnp.pad(x, ((0, 0), (back, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
    return jnp.concatenate([before[:, i : i + x.shape[1]] for i in range(back + 1)], axis=axis)


def _window_operands(q, k, v, segment_ids, block, back, precision):
    segments = _cut(segment_ids, block)
    mask = mask_of(segments, _windows(segments, back, 2, -1), back * block)
    q, k, v = (operand(_cut(x, block), 2, precision) for x in (q, k, v))
    return q, _windows(k, back, 3), _windows(v, back, 3), mask  # keys and values [R, blocks, K, W, h]


def _windowed_forward(q, k, v, segment_ids, block, back, precision):
    out, log_total = attend_block(*_window_operands(q, k, v, segment_ids, block, back, precision), precision)
    out = heads_last(out, 2).reshape(q.shape[0], -1, *q.shape[2:])[:, : q.shape[1]].astype(q.dtype)
    out, log_total = kept(out, SAVED), kept(log_total, SAVED)
    return out, (q, k, v, segment_ids, out, log_total)


def _windowed_backward(block, back, precision, saved, g):
    q, k, v, segment_ids, out, log_total = saved
    rows, length = segment_ids.shape
    operands = _window_operands(q, k, v, segment_ids, block, back, precision)
    gt, mean = operand(_cut(g, block), 2, precision), mean_of(_cut(out, block), _cut(g, block), 2)
    dq, dk, dv = attend_block_backward(*operands, log_total, mean, gt, precision)
    dq = heads_last(dq, 2).reshape(rows, -1, *q.shape[2:])[:, :length]

    def back_to_row(x: jax.Array) -> jax.Array:
        """[R, blocks, K, h, W] -> [R, L, K, h]: each block sums the results of the windows that contain it."""
        x = x.reshape(*x.shape[:-1], back + 1, block)
        padded = ((0, 0), (0, back), (0, 0), (0, 0), (0, 0))
        total = sum(jnp.pad(x[..., i, :], padded)[:, back - i : back - i + x.shape[1]] for i in range(back + 1))
        return total.transpose(0, 1, 4, 2, 3).reshape(rows, -1, *k.shape[2:])[:, :length]

    return dq.astype(q.dtype), back_to_row(dk).astype(k.dtype), back_to_row(dv).astype(v.dtype), None


windowed.defvjp(_windowed_forward, _windowed_backward)


# A row of many blocks, as a loop in a loop: a program of one size, whatever the row's length.
#
# Each block of queries iterates over the spans of keys from the start of its first query's segment to itself, with a
# running maximum and sum (flash attention, arXiv 2205.14135). The start is read from the segment ids: a packed row
# costs what its segments cost, and no array has the size of the row squared. The queries may be a part of the row:
# query i is at key offset + i. All rows and heads are computed at once, or as many as have `most` scores: on a CPU
# these then stay in its caches.


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def looped(q, k, v, query_segments, key_segments, offset, block, span, most, precision):
    """q [R, L, K, G, h], k and v [R, S, K, h], segments [R, L] and [R, S], offset int32 [] -> like q."""
    return _looped_forward(q, k, v, query_segments, key_segments, offset, block, span, most, precision)[0]


def _pad(x: jax.Array, axis: int, to: int, fill: int = 0) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % to)
    return jnp.pad(x, widths, constant_values=fill)


def _divisor(of: int, most: int) -> int:
    return max(n for n in range(1, of + 1) if of % n == 0 and (n <= most or n == 1))


class _Loop:
    """The steps of a loop over rows, key heads and blocks of queries, and the padded arrays that it takes parts of."""

    def __init__(self, q, k, v, query_segments, key_segments, offset, block, span, most, precision):
        self.block, self.span, self.offset = block, span, offset
        self.length, keys = q.shape[1], k.shape[1]
        self.q = _pad(operand(q, 1, precision), -2, block)
        self.k, self.v = (_pad(operand(x, 1, precision), -2, span) for x in (k, v))
        # Padding is in no segment, and that of queries and that of keys do not match.
        self.query_segments = _pad(query_segments, 1, block, -1)
        self.key_segments = _pad(key_segments, 1, span, -2)
        rows, heads, group = self.q.shape[:3]
        of_head = group * block * span
        self.at_once = _divisor(rows, most // (heads * of_head)), _divisor(heads, most // of_head)
        self.sizes = rows // self.at_once[0], heads // self.at_once[1], self.q.shape[-2] // block
        self.spans = -(-keys // span)
        # Of the segments at each key of the rows at once.
        self.first = jnp.min(segment_starts(key_segments).reshape(self.sizes[0], -1, keys), axis=1)

    @property
    def steps(self) -> jax.Array:
        """[steps, 3]: number of the rows, of the heads, and of the block."""
        return jnp.stack(jnp.meshgrid(*map(jnp.arange, self.sizes), indexing="ij"), axis=-1).reshape(-1, 3)

    def range_of(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The spans of keys, as (from, up to), that the queries of this step can see."""
        start = self.offset + step[2] * self.block
        return self.first[step[0], start] // self.span, jnp.minimum(-(-(start + self.block) // self.span), self.spans)

    def mask(self, step: jax.Array, j: Any) -> jax.Array:
        queries, keys = (
            jax.lax.dynamic_slice(x, (step[0] * self.at_once[0], number * size), (self.at_once[0], size))
            for x, number, size in ((self.query_segments, step[2], self.block), (self.key_segments, j, self.span))
        )
        return mask_of(queries, keys, self.offset + step[2] * self.block - j * self.span)

    def place(self, x: jax.Array, step: jax.Array, number: Any, size: int, axis: int = -2) -> tuple[Any, Any]:
        """Where the rows and heads of this step, and this part of the positions, begin in x [R, K, ...]; its sizes."""
        starts, sizes = [jnp.int32(0)] * x.ndim, list(x.shape)
        starts[0], starts[1], starts[axis] = step[0] * self.at_once[0], step[1] * self.at_once[1], number * size
        sizes[0], sizes[1], sizes[axis] = *self.at_once, size
        return starts, sizes

    def queries(self, x: jax.Array, step: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(x, *self.place(x, step, step[2], self.block))

    def keys(self, x: jax.Array, step: jax.Array, j: Any, axis: int = -2) -> jax.Array:
        return jax.lax.dynamic_slice(x, *self.place(x, step, j, self.span, axis))

    def whole(self, parts: jax.Array) -> jax.Array:
        """[steps, rows, heads, G, B, n] -> [R, K, G, L, n]"""
        x = parts.reshape(*self.sizes, *parts.shape[1:]).transpose(0, 3, 1, 4, 5, 2, 6, 7)
        return x.reshape(*self.q.shape[:-1], x.shape[-1])[..., : self.length, :]


def _looped_forward(q, k, v, query_segments, key_segments, offset, block, span, most, precision):
    loop = _Loop(q, k, v, query_segments, key_segments, offset, block, span, most, precision)

    def of_step(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries = loop.queries(loop.q, step)

        def add(j: jax.Array, carry: Any) -> Any:
            top, total, out = carry
            scores = scores_of(queries, loop.keys(loop.k, step, j), loop.mask(step, j), precision)
            # A query that has not seen its own segment yet sums weights of masked keys; the first real score, at the
            # latest its own, removes them: exp(MASKED - score) is 0.
            new = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            weights, remains = jnp.exp(scores - new), jnp.exp(top - new)
            total = total * remains + jnp.sum(weights, axis=-1, keepdims=True)
            out = out * remains + by_values(weights, loop.keys(loop.v, step, j), precision).reshape(out.shape)
            return new, total, out

        nothing = jnp.zeros((*queries.shape[:-1], 1), jnp.float32)
        start = (nothing + MASKED, nothing, jnp.zeros(queries.shape, jnp.float32))
        top, total, out = jax.lax.fori_loop(*loop.range_of(step), add, start)
        return out / total, top + jnp.log(total)

    out, log_total = jax.lax.map(of_step, loop.steps)
    out, log_total = kept(heads_last(loop.whole(out), 1).astype(q.dtype), SAVED), kept(loop.whole(log_total), SAVED)
    return out, (q, k, v, query_segments, key_segments, offset, out, log_total)


def looped_backward(block, span, most, precision, saved, g):
    q, k, v, query_segments, key_segments, offset, out, log_total = saved
    loop = _Loop(q, k, v, query_segments, key_segments, offset, block, span, most, precision)
    gt, log_total = _pad(operand(g, 1, precision), -2, block), _pad(log_total, -2, block)
    mean = _pad(mean_of(out, g, 1), -2, block)
    # With a barrier, or the product with it would be turned, into one without a fast kernel.
    keys_turned = jax.lax.optimization_barrier(jnp.swapaxes(loop.k, -1, -2))

    def of_step(sums: Any, step: jax.Array) -> tuple[Any, jax.Array]:
        queries, log_sum, average, cotangent = (loop.queries(x, step) for x in (loop.q, log_total, mean, gt))

        def add(j: jax.Array, carry: Any) -> Any:
            keys, values = (loop.keys(x, step, j) for x in (loop.k, loop.v))
            dq, *sums = carry
            by_query, *parts = _backward_by_key(
                queries, keys, values, loop.keys(keys_turned, step, j, -1), loop.mask(step, j), log_sum, average,
                cotangent, precision,
            )  # fmt: skip
            return dq + by_query, *(
                jax.lax.dynamic_update_slice(x, loop.keys(x, step, j) + part, loop.place(x, step, j, span)[0])
                for x, part in zip(sums, parts, strict=True)
            )

        dq, *sums = jax.lax.fori_loop(*loop.range_of(step), add, (jnp.zeros(queries.shape, jnp.float32), *sums))
        return tuple(sums), dq

    empty = jnp.zeros(loop.k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(of_step, (empty, empty), loop.steps)
    dk, dv = (heads_last(x, 1)[:, : k.shape[1]].astype(k.dtype) for x in (dk, dv))
    return heads_last(loop.whole(dq), 1).astype(q.dtype), dk, dv, None, None, None


def _backward_by_key(q, k, v, keys_turned, mask, log_total, mean, g, precision):
    """attend_block_backward, with dk and dv [..., K, W, h]; keys_turned: k as [..., K, h, W].

    It has P' and dS', keys first: all five products are of a kind for which XLA for CPUs has a fast kernel, in bfloat16
    too. On small blocks that kernel is the slower one.
    """
    block, scale = q.shape[-3:-1], 1 / math.sqrt(q.shape[-1])

    def by_key(a: jax.Array, b: jax.Array) -> jax.Array:
        product = _product(a, _rows(b), (1, 1), precision)
        return product.reshape(*product.shape[:-1], *block)  # [..., K, W, G, B]

    def of_query(x: jax.Array) -> jax.Array:
        return x[..., 0][..., None, :, :]

    visible = jnp.swapaxes(mask, -1, -2)[..., None, :, None, :]
    weights = jnp.exp(jnp.where(visible, by_key(k, q) * scale, MASKED) - of_query(log_total))
    by_score = (weights * (by_key(v, g) - of_query(mean)) * scale).astype(q.dtype)
    by_score, weights = (x.reshape(*x.shape[:-2], -1) for x in (by_score, weights.astype(v.dtype)))
    dk, dv = _product(by_score, _rows(q), (1, 0), precision), _product(weights, _rows(g), (1, 0), precision)
    dq = _product(keys_turned, by_score, (1, 0), precision)
    # Without the barrier the compiler swaps the operands to save the transposition of the product's small result.
    dq, dk, dv = jax.lax.optimization_barrier((dq, dk, dv))
    return jnp.swapaxes(dq, -1, -2).reshape(q.shape), dk, dv


looped.defvjp(_looped_forward, looped_backward)

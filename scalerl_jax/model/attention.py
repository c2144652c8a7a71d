"""Causal attention inside the segments of packed rows.

    out_t = sum_s softmax_s(q_t . k_s / sqrt(h)) v_s      over s <= t with the segment of t

Queries are taken a block at a time, and a block looks only at the keys that can matter to it: back to the start of the
row when segments are long, or as many blocks back as the longest segment reaches. The scores of a whole row,
[length, length], never exist, and rows of many short segments cost what their segments cost.

The backward pass is written out. It keeps q, k, v, the output and each query's log of the softmax's sum, makes the
probabilities P again from them, and needs no other pass over the scores than

    dV = P' dO      dS = P * (dO V' - rowsum(dO * O)) / sqrt(h)      dQ = dS K      dK = dS' Q

Products take operands in the dtype given and accumulate in float32; everything between them is float32.

Legend: R rows, L length, K key/value heads, G query heads that share one, h head size, B block, W keys a block sees.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

_BLOCK = 128
_SHORT_BLOCK = 64  # wastes less on short segments, and costs more operations on long ones
_SHORT_SEGMENT = 256
_MAXIMUM_BLOCKS = 32  # of one row, unrolled: compile time grows with it
_MOST_SCORES = 2**28  # that exist at once where all blocks are one product: 1 GiB, and the backward pass has three
_MASKED = -1e30


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    max_segment: int | None = None,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
) -> jax.Array:
    """q [rows, length, heads, h], k and v [rows, length, kv_heads, h], segment_ids [rows, length] -> like q.

    max_segment bounds the length of every segment; tokens further apart are never compared.
    """
    rows, length, heads, size = q.shape
    kv_heads = k.shape[2]
    longest = min(length, max_segment or length)
    block = min(length, _SHORT_BLOCK if longest <= _SHORT_SEGMENT else _BLOCK)
    q = q.reshape(rows, length, kv_heads, heads // kv_heads, size)
    back = math.ceil((longest - 1) / block)  # blocks before its own that a block can see
    window = (back + 1) * block
    few = rows * heads * length * window <= _MOST_SCORES
    if math.ceil(length / block) > _MAXIMUM_BLOCKS and 2 * window <= length and few:
        out = _windowed(q, k, v, segment_ids, block, back, precision)
    else:
        block = max(block, math.ceil(length / _MAXIMUM_BLOCKS / block) * block)
        back = math.ceil((longest - 1) / block)
        out = _triangular(q, k, v, segment_ids, block, back, precision)
    return out.reshape(rows, length, heads, size)


# ---------------------------------------------------------------------------------- block by block, each as it needs


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _triangular(q, k, v, segment_ids, block, back, precision):
    """q [R, L, K, G, h], k and v [R, L, K, h] -> like q. Block i sees keys from block max(0, i - back) to i."""
    return _triangular_forward(q, k, v, segment_ids, block, back, precision)[0]


def _spans(length: int, block: int, back: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and its keys; the last block may be shorter."""
    for start in range(0, length, block):
        stop = min(length, start + block)
        yield slice(start, stop), slice(max(0, start - back * block), stop)


def _in_turn(x: jax.Array, done: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Both as they are, but `x` only once the last of `done` is there.

    The blocks depend on nothing of each other, and a compiler that sees it (XLA's for GPUs) begins with the scores of
    all of them: at 16k tokens and 32 heads that is 18 GiB where one block's take 1 GiB.
    """
    if not done:
        return x, done
    x, last = jax.lax.optimization_barrier((x, done[-1]))
    return x, [*done[:-1], last]


def _triangular_forward(q, k, v, segment_ids, block, back, precision):
    qt, kt, vt = (_heads_first(x, 1) for x in (q, k, v))
    outs, logs = [], []
    for at, to in _spans(q.shape[1], block, back):
        mask = _mask(segment_ids[:, at], segment_ids[:, to], at.start - to.start)
        qt, outs = _in_turn(qt, outs)
        out, log_total = _attend(qt[..., at, :], kt[..., to, :], vt[..., to, :], mask, precision)
        outs.append(out)
        logs.append(log_total)
    out = _heads_last(jnp.concatenate(outs, axis=-2), 1)
    return out, (q, k, v, segment_ids, out, jnp.concatenate(logs, axis=-2))


def _triangular_backward(block, back, precision, saved, g):
    q, k, v, segment_ids, out, log_total = saved
    qt, kt, vt, gt = (_heads_first(x, 1) for x in (q, k, v, g))
    mean = _mean(out, g, 1)
    length = q.shape[1]
    dqs = []
    # Sums of the blocks' parts, one per block of keys: each part is cut where the key blocks meet.
    dks: list[Any] = [0.0] * math.ceil(length / block)
    dvs: list[Any] = [0.0] * math.ceil(length / block)
    for at, to in _spans(length, block, back):
        mask = _mask(segment_ids[:, at], segment_ids[:, to], at.start - to.start)
        qt, dqs = _in_turn(qt, dqs)
        dq, dk, dv = _attend_backward(
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
        _heads_last(dq, 1).astype(q.dtype),
        dk.transpose(0, 3, 1, 2).astype(k.dtype),
        dv.transpose(0, 3, 1, 2).astype(v.dtype),
        None,
    )


_triangular.defvjp(_triangular_forward, _triangular_backward)


# ------------------------------------------------------------------------------- all blocks at once, for very many


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _windowed(q, k, v, segment_ids, block, back, precision):
    """Like _triangular, as one batched product: each block sees itself and `back` blocks before it."""
    return _windowed_forward(q, k, v, segment_ids, block, back, precision)[0]


def _cut(x: jax.Array, block: int) -> jax.Array:
    """[R, L, ...] -> [R, blocks, B, ...]; padding stands at the end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, block, *x.shape[2:])


def _windows(x: jax.Array, back: int, axis: int, fill: int = 0) -> jax.Array:
    """[R, blocks, ...] -> with W = (back + 1) B along `axis`: each block with those before it."""
    before = jnp.pad(x, ((0, 0), (back, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
    return jnp.concatenate([before[:, i : i + x.shape[1]] for i in range(back + 1)], axis=axis)


def _window_operands(q, k, v, segment_ids, block, back):
    segments = _cut(segment_ids, block)
    mask = _mask(segments, _windows(segments, back, 2, -1), back * block)
    keys, values = (_windows(_heads_first(_cut(x, block), 2), back, 3) for x in (k, v))  # [R, blocks, K, W, h]
    return _heads_first(_cut(q, block), 2), keys, values, mask


def _windowed_forward(q, k, v, segment_ids, block, back, precision):
    out, log_total = _attend(*_window_operands(q, k, v, segment_ids, block, back), precision)
    out = _heads_last(out, 2).reshape(q.shape[0], -1, *q.shape[2:])[:, : q.shape[1]]
    return out, (q, k, v, segment_ids, out, log_total)


def _windowed_backward(block, back, precision, saved, g):
    q, k, v, segment_ids, out, log_total = saved
    rows, length = segment_ids.shape
    operands = _window_operands(q, k, v, segment_ids, block, back)
    gt, mean = _heads_first(_cut(g, block), 2), _mean(_cut(out, block), _cut(g, block), 2)
    dq, dk, dv = _attend_backward(*operands, log_total, mean, gt, precision)
    dq = _heads_last(dq, 2).reshape(rows, -1, *q.shape[2:])[:, :length]

    def back_to_row(x: jax.Array) -> jax.Array:
        """[R, blocks, K, h, W] -> [R, L, K, h]: each block gets back what the windows that hold it found."""
        x = x.reshape(*x.shape[:-1], back + 1, block)
        padded = ((0, 0), (0, back), (0, 0), (0, 0), (0, 0))
        total = sum(jnp.pad(x[..., i, :], padded)[:, back - i : back - i + x.shape[1]] for i in range(back + 1))
        return total.transpose(0, 1, 4, 2, 3).reshape(rows, -1, *k.shape[2:])[:, :length]

    return dq.astype(q.dtype), back_to_row(dk).astype(k.dtype), back_to_row(dv).astype(v.dtype), None


_windowed.defvjp(_windowed_forward, _windowed_backward)


# ----------------------------------------------------------------------------------------- one block, or many alike


def _attend(q, k, v, mask, precision):
    """q [..., K, G, B, h], k and v [..., K, W, h], mask [..., B, W] -> (like q, log of the sum [..., K, G, B, 1])."""
    scores = _scores(q, k, mask, precision)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = _product(_rows(weights.astype(v.dtype)), v, (1, 0), precision).reshape(q.shape) / total
    return out.astype(q.dtype), top + jnp.log(total)


def _attend_backward(q, k, v, mask, log_total, mean, g, precision):
    """(dq like q, dk and dv [..., K, h, W]), float32. mean: _mean of the output and its cotangent g."""
    weights = jnp.exp(_scores(q, k, mask, precision) - log_total)
    by_weight = _product(_rows(g), v, (1, 1), precision).reshape(weights.shape)
    by_score = (weights * (by_weight - mean) * (1 / math.sqrt(q.shape[-1]))).astype(q.dtype)
    dq = _product(_rows(by_score), k, (1, 0), precision).reshape(q.shape)
    # The narrow operand first, and the keys last: on a CPU this is several times faster than the other way round.
    dk = _product(_rows(q), _rows(by_score), (0, 0), precision)
    dv = _product(_rows(g), _rows(weights.astype(v.dtype)), (0, 0), precision)
    # Else the compiler turns the products round to save the transposition of their small results.
    return dq, *jax.lax.optimization_barrier((dk, dv))


def _mask(query_segment: jax.Array, key_segment: jax.Array, offset: int) -> jax.Array:
    """[..., B], [..., W] -> [..., B, W]: of one segment, and not later. Query i stands at key offset + i."""
    queries, keys = query_segment.shape[-1], key_segment.shape[-1]
    causal = offset + jnp.arange(queries)[:, None] >= jnp.arange(keys)[None, :]
    return (query_segment[..., :, None] == key_segment[..., None, :]) & causal


def _scores(q, k, mask, precision):
    """[..., K, G, B, W] float32, scaled and masked."""
    scores = _product(_rows(q), k, (1, 1), precision).reshape(*q.shape[:-1], k.shape[-2])
    return jnp.where(mask[..., None, None, :, :], scores * (1 / math.sqrt(q.shape[-1])), _MASKED)


def _mean(out: jax.Array, g: jax.Array, axis: int) -> jax.Array:
    """rowsum(dO * O), the mean of dO V' under P, heads first: [..., K, G, L, 1] float32."""
    return _heads_first(jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True), axis)


def _heads_first(x: jax.Array, axis: int) -> jax.Array:
    """Moves the length from `axis` to the place before the last, so that products are plain matrices in a batch."""
    return jnp.moveaxis(x, axis, -2)


def _heads_last(x: jax.Array, axis: int) -> jax.Array:
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

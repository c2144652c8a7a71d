"""Attention of a row of very many blocks, all of them as one batched product: for segments of a few blocks at most.

Each block sees itself and `back` blocks before it. Legend: R rows, L length, K key/value heads, G query heads that
share one, h head size, B block, W keys a block sees.
"""

import functools

import jax
import jax.numpy as jnp

from scalerl_jax.model.attention.block_products import (
    attend,
    attend_backward,
    heads_first,
    heads_last,
    kept,
    mask_of,
    mean_of,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def windowed(q, k, v, segment_ids, block, back, precision):
    """q [R, L, K, G, h], k and v [R, L, K, h] -> like q. Block i sees keys of the blocks i - back to i."""
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
    mask = mask_of(segments, _windows(segments, back, 2, -1), back * block)
    keys, values = (_windows(heads_first(_cut(x, block), 2), back, 3) for x in (k, v))  # [R, blocks, K, W, h]
    return heads_first(_cut(q, block), 2), keys, values, mask


def _windowed_forward(q, k, v, segment_ids, block, back, precision):
    out, log_total = attend(*_window_operands(q, k, v, segment_ids, block, back), precision)
    out = heads_last(out, 2).reshape(q.shape[0], -1, *q.shape[2:])[:, : q.shape[1]]
    out, log_total = kept(out, log_total)
    return out, (q, k, v, segment_ids, out, log_total)


def _windowed_backward(block, back, precision, saved, g):
    q, k, v, segment_ids, out, log_total = saved
    rows, length = segment_ids.shape
    operands = _window_operands(q, k, v, segment_ids, block, back)
    gt, mean = heads_first(_cut(g, block), 2), mean_of(_cut(out, block), _cut(g, block), 2)
    dq, dk, dv = attend_backward(*operands, log_total, mean, gt, precision)
    dq = heads_last(dq, 2).reshape(rows, -1, *q.shape[2:])[:, :length]

    def back_to_row(x: jax.Array) -> jax.Array:
        """[R, blocks, K, h, W] -> [R, L, K, h]: each block gets back what the windows that hold it found."""
        x = x.reshape(*x.shape[:-1], back + 1, block)
        padded = ((0, 0), (0, back), (0, 0), (0, 0), (0, 0))
        total = sum(jnp.pad(x[..., i, :], padded)[:, back - i : back - i + x.shape[1]] for i in range(back + 1))
        return total.transpose(0, 1, 4, 2, 3).reshape(rows, -1, *k.shape[2:])[:, :length]

    return dq.astype(q.dtype), back_to_row(dk).astype(k.dtype), back_to_row(dv).astype(v.dtype), None


windowed.defvjp(_windowed_forward, _windowed_backward)

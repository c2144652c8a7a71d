"""Attention of a row of few blocks, one after the other, each with the keys that it needs: no loop, and nothing wasted.

The program grows with the number of blocks. Legend: R rows, L length, K key/value heads, G query heads that share one,
h head size.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

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
def unrolled(q, k, v, segment_ids, block, back, precision):
    """q [R, L, K, G, h], k and v [R, L, K, h] -> like q. Block i sees keys from block max(0, i - back) to i."""
    return _unrolled_forward(q, k, v, segment_ids, block, back, precision)[0]


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


def _unrolled_forward(q, k, v, segment_ids, block, back, precision):
    qt, kt, vt = (heads_first(x, 1) for x in (q, k, v))
    outs, logs = [], []
    for at, to in _spans(q.shape[1], block, back):
        mask = mask_of(segment_ids[:, at], segment_ids[:, to], at.start - to.start)
        qt, outs = _in_turn(qt, outs)
        out, log_total = attend(qt[..., at, :], kt[..., to, :], vt[..., to, :], mask, precision)
        outs.append(out)
        logs.append(log_total)
    out = heads_last(jnp.concatenate(outs, axis=-2), 1)
    out, log_total = kept(out, jnp.concatenate(logs, axis=-2))
    return out, (q, k, v, segment_ids, out, log_total)


def unrolled_backward(block, back, precision, saved, g):
    q, k, v, segment_ids, out, log_total = saved
    qt, kt, vt, gt = (heads_first(x, 1) for x in (q, k, v, g))
    mean = mean_of(out, g, 1)
    length = q.shape[1]
    dqs = []
    # Sums of the blocks' parts, one per block of keys: each part is cut where the key blocks meet.
    dks: list[Any] = [0.0] * math.ceil(length / block)
    dvs: list[Any] = [0.0] * math.ceil(length / block)
    for at, to in _spans(length, block, back):
        mask = mask_of(segment_ids[:, at], segment_ids[:, to], at.start - to.start)
        qt, dqs = _in_turn(qt, dqs)
        dq, dk, dv = attend_backward(
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

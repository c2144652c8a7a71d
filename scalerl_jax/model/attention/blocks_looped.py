"""Attention of a row of many blocks, as a loop in a loop: a program of one size, whatever the row's length.

Each block of queries goes over the spans of keys from the start of its first query's segment to itself, with a running
maximum and sum (flash attention, arXiv 2205.14135). Where it starts is read from the segment ids: a packed row costs
what its segments cost, and nothing of the size of the row by the row exists.

The queries may be a part of the row: query i stands at key offset + i. Legend: R rows, L queries, S keys, K key/value
heads, G query heads that share one, h head size, B queries of a block, W keys of a span.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.model.attention.block_products import (
    MASKED,
    attend_backward,
    by_values,
    heads_first,
    heads_last,
    kept,
    mask_of,
    mean_of,
    scores_of,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def looped(q, k, v, query_segments, key_segments, offset, block, span, precision):
    """q [R, L, K, G, h], k and v [R, S, K, h], segments [R, L] and [R, S], offset int32 [] -> like q."""
    return _looped_forward(q, k, v, query_segments, key_segments, offset, block, span, precision)[0]


def _pad(x: jax.Array, axis: int, to: int, fill: int = 0) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % to)
    return jnp.pad(x, widths, constant_values=fill)


def _part(x: jax.Array, number: Any, size: int, axis: int = -2) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _first_keys(key_segments: jax.Array) -> jax.Array:
    """[R, S] -> [S] int32: where the segment of each key starts; of all rows the first."""
    here = jnp.arange(key_segments.shape[1], dtype=jnp.int32)
    changes = jnp.pad(key_segments[:, 1:] != key_segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.min(jax.lax.cummax(jnp.where(changes, here, 0), axis=1), axis=0)


class _Row:
    """Both passes' view of a row: padded to whole blocks and spans, heads first."""

    def __init__(self, q, k, v, query_segments, key_segments, offset, block, span):
        self.block, self.span, self.offset = block, span, offset
        self.length, keys = q.shape[1], k.shape[1]
        self.first = _first_keys(key_segments)
        self.q = _pad(heads_first(q, 1), -2, block)
        self.k, self.v = (_pad(heads_first(x, 1), -2, span) for x in (k, v))
        # Of no segment, and not of each other's.
        self.query_segments = _pad(query_segments, 1, block, -1)
        self.key_segments = _pad(key_segments, 1, span, -2)
        self.blocks = self.q.shape[-2] // block
        self.spans = -(-keys // span)

    def range_of(self, i: Any) -> tuple[jax.Array, jax.Array]:
        """The spans of keys, from and up to, that the queries of block i can see."""
        start = self.offset + i * self.block
        return self.first[start] // self.span, jnp.minimum(-(-(start + self.block) // self.span), self.spans)

    def mask(self, i: Any, j: Any) -> jax.Array:
        queries = _part(self.query_segments, i, self.block, 1)
        keys = _part(self.key_segments, j, self.span, 1)
        return mask_of(queries, keys, self.offset + i * self.block - j * self.span)

    def whole(self, parts: jax.Array) -> jax.Array:
        """[blocks, R, K, G, B, n] -> [R, K, G, L, n]"""
        joined = jnp.moveaxis(parts, 0, 3)
        return joined.reshape(*joined.shape[:3], -1, joined.shape[-1])[..., : self.length, :]


def _looped_forward(q, k, v, query_segments, key_segments, offset, block, span, precision):
    row = _Row(q, k, v, query_segments, key_segments, offset, block, span)

    def of_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries = _part(row.q, i, block)

        def add(j: jax.Array, carry: Any) -> Any:
            top, total, out = carry
            scores = scores_of(queries, _part(row.k, j, span), row.mask(i, j), precision)
            # A query that has seen nothing of its own yet sums up weights of masked keys; the first real score, at the
            # latest its own, takes them away: exp(MASKED - score) is 0.
            new = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            weights, kept = jnp.exp(scores - new), jnp.exp(top - new)
            total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
            out = out * kept + by_values(weights, _part(row.v, j, span), precision).reshape(out.shape)
            return new, total, out

        nothing = jnp.zeros((*queries.shape[:-1], 1), jnp.float32)
        start = (nothing + MASKED, nothing, jnp.zeros(queries.shape, jnp.float32))
        top, total, out = jax.lax.fori_loop(*row.range_of(i), add, start)
        return (out / total).astype(q.dtype), top + jnp.log(total)

    out, log_total = jax.lax.map(of_block, jnp.arange(row.blocks))
    out, log_total = kept(heads_last(row.whole(out), 1), row.whole(log_total))
    return out, (q, k, v, query_segments, key_segments, offset, out, log_total)


def looped_backward(block, span, precision, saved, g):
    q, k, v, query_segments, key_segments, offset, out, log_total = saved
    row = _Row(q, k, v, query_segments, key_segments, offset, block, span)
    gt, log_total = _pad(heads_first(g, 1), -2, block), _pad(log_total, -2, block)
    mean = _pad(mean_of(out, g, 1), -2, block)

    def of_block(sums: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        own = [_part(x, i, block) for x in (row.q, log_total, mean, gt)]

        def add(j: jax.Array, carry: Any) -> Any:
            queries, log_sum, average, cotangent = own
            parts = attend_backward(
                queries, _part(row.k, j, span), _part(row.v, j, span), row.mask(i, j), log_sum, average, cotangent,
                precision,
            )  # fmt: skip
            dq, *sums = carry
            return dq + parts[0], *(
                jax.lax.dynamic_update_slice_in_dim(x, _part(x, j, span, -1) + part, j * span, -1)
                for x, part in zip(sums, parts[1:], strict=True)
            )

        dq, *sums = jax.lax.fori_loop(*row.range_of(i), add, (jnp.zeros(own[0].shape, jnp.float32), *sums))
        return tuple(sums), dq.astype(q.dtype)

    empty = jnp.zeros((*row.k.shape[:-2], row.k.shape[-1], row.k.shape[-2]), jnp.float32)  # [R, K, h, S]
    (dk, dv), dq = jax.lax.scan(of_block, (empty, empty), jnp.arange(row.blocks))
    keys = k.shape[1]
    return (
        heads_last(row.whole(dq), 1),
        dk[..., :keys].transpose(0, 3, 1, 2).astype(k.dtype),
        dv[..., :keys].transpose(0, 3, 1, 2).astype(v.dtype),
        None,
        None,
        None,
    )


looped.defvjp(_looped_forward, looped_backward)

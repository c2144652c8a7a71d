"""The products of a block of queries with a span of keys: what every way of cutting attention into blocks is made of.

The backward pass is written out. It keeps q, k, v, the output and each query's log of the softmax's sum, makes the
probabilities P again from them, and needs no other pass over the scores than

    dV = P' dO      dS = P * (dO V' - rowsum(dO * O)) / sqrt(h)      dQ = dS K      dK = dS' Q

Products take operands in the dtype given and accumulate in float32; everything between them is float32.

Legend: K key/value heads, G query heads that share one, h head size, B queries of a block, W keys that it sees.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from scalerl_jax.model.attention.backend import SAVED

MASKED = -1e30


def attend(q, k, v, mask, precision):
    """q [..., K, G, B, h], k and v [..., K, W, h], mask [..., B, W] -> (like q, log of the sum [..., K, G, B, 1])."""
    scores = scores_of(q, k, mask, precision)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = by_values(weights, v, precision).reshape(q.shape) / total
    return out.astype(q.dtype), top + jnp.log(total)


def attend_backward(q, k, v, mask, log_total, mean, g, precision):
    """(dq like q, dk and dv [..., K, h, W]), float32. mean: mean_of the output and its cotangent g."""
    weights = jnp.exp(scores_of(q, k, mask, precision) - log_total)
    by_weight = _product(_rows(g), v, (1, 1), precision).reshape(weights.shape)
    by_score = (weights * (by_weight - mean) * (1 / math.sqrt(q.shape[-1]))).astype(q.dtype)
    dq = _product(_rows(by_score), k, (1, 0), precision).reshape(q.shape)
    # The narrow operand first, and the keys last: on a CPU this is several times faster than the other way round.
    dk = _product(_rows(q), _rows(by_score), (0, 0), precision)
    dv = _product(_rows(g), _rows(weights.astype(v.dtype)), (0, 0), precision)
    # Else the compiler turns the products round to save the transposition of their small results.
    return dq, *jax.lax.optimization_barrier((dk, dv))


def mask_of(query_segment: jax.Array, key_segment: jax.Array, offset: Any) -> jax.Array:
    """[..., B], [..., W] -> [..., B, W]: of one segment, and not later. Query i stands at key offset + i."""
    queries, keys = query_segment.shape[-1], key_segment.shape[-1]
    causal = offset + jnp.arange(queries)[:, None] >= jnp.arange(keys)[None, :]
    return (query_segment[..., :, None] == key_segment[..., None, :]) & causal


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


def kept(out: jax.Array, log_total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are, under the name by which a remat policy may keep them: then no score is computed again."""
    return checkpoint_name(out, SAVED), checkpoint_name(log_total, SAVED)


def heads_first(x: jax.Array, axis: int) -> jax.Array:
    """Moves the length from `axis` to the place before the last, so that products are plain matrices in a batch."""
    return jnp.moveaxis(x, axis, -2)


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

"""Packed rows and the plain formula, which the tests of every backend of attention share."""

import jax
import jax.numpy as jnp
import numpy as np

HIGHEST = jax.lax.Precision.HIGHEST


def plain(q, k, v, segment_ids):
    """Attention with the whole [length, length] square of scores, heads repeated, softmax by jax.nn."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("rqhd,rkhd->rhqk", q, k, precision=HIGHEST) / np.sqrt(q.shape[-1])
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & np.tril(np.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("rhqk,rkhd->rqhd", weights, v, precision=HIGHEST)


def segments(lengths, seq_len):
    """One row: segments of these lengths from the left, the rest padding (0)."""
    ids = np.zeros(seq_len, np.int32)
    start = 0
    for number, length in enumerate(lengths, 1):
        ids[start : start + length] = number
        start += length
    assert start <= seq_len
    return ids


def inputs(segment_ids, *, heads=4, kv_heads=2, size=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shape = segment_ids.shape
    q = jnp.asarray(rng.normal(size=(*shape, heads, size)) * 2, dtype)
    k, v = (jnp.asarray(rng.normal(size=(*shape, kv_heads, size)), dtype) for _ in range(2))
    return q, k, v


def value_and_gradients(function, args, at):
    """(output, dq, dk, dv) for the cotangent `at`, compiled as one program."""

    def run(*args):
        out, back = jax.vjp(function, *args)
        return (out, *back(at.astype(out.dtype)))

    return jax.jit(run)(*args)


def cotangent(shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)

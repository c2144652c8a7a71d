"""Both ways of computing packed attention against the plain formula, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.model import attention
from tests.support.params import every_variable

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


@pytest.mark.parametrize(
    ("lengths", "seq_len", "max_segment", "path"),
    [
        pytest.param([[37], [30]], 37, None, "triangular", id="one long segment, odd length"),
        pytest.param([[16, 16], [32]], 32, None, "triangular", id="whole blocks"),
        pytest.param([[5, 7, 3, 9, 1], [9, 9, 9, 2]], 30, 9, "triangular", id="short segments, bound given"),
        pytest.param([[11, 2, 11, 11, 5], [3] * 17], 51, 11, "windowed", id="many blocks, odd length, a bound"),
        pytest.param([[8] * 8, [1] * 60], 64, 8, "windowed", id="many blocks, segments of a block's length"),
        pytest.param([[60]], 64, 60, "triangular", id="many blocks, bound too wide for windows"),
    ],
)
def test_equals_the_plain_formula(monkeypatch, lengths, seq_len, max_segment, path):
    monkeypatch.setattr(attention, "_BLOCK", 8)
    monkeypatch.setattr(attention, "_SHORT_BLOCK", 4)
    monkeypatch.setattr(attention, "_SHORT_SEGMENT", 10)
    monkeypatch.setattr(attention, "_MAXIMUM_BLOCKS", 10 if path == "triangular" and seq_len < 60 else 5)
    taken = []
    for name in ("_windowed", "_triangular"):
        original = getattr(attention, name)
        monkeypatch.setattr(
            attention,
            name,
            lambda *a, _name=name, _original=original, **k: (taken.append(_name), _original(*a, **k))[1],
        )
    ids = np.stack([segments(row, seq_len) for row in lengths])
    args = inputs(ids)

    def ours(q, k, v):
        return attention.packed_attention(q, k, v, ids, max_segment=max_segment, precision=HIGHEST)

    at = jnp.asarray(np.random.default_rng(1).normal(size=args[0].shape), jnp.float32)
    mine = value_and_gradients(ours, args, at)
    assert taken == [f"_{path}"]
    for got, wanted in zip(mine, value_and_gradients(lambda *a: plain(*a, ids), args, at)):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_default_blocks_on_a_row_of_2200():
    ids = segments([1500, 600], 2200)[None]
    args = inputs(ids, heads=2, kv_heads=1)
    ours = jax.jit(lambda *a: attention.packed_attention(*a, ids, precision=HIGHEST))(*args)
    np.testing.assert_allclose(ours, jax.jit(plain)(*args, ids), atol=3e-6)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=6))
def test_a_segment_sees_only_itself(lengths):
    """Whatever stands in the other segments, and in the padding, changes no bit of a segment's output."""
    ids = segments(lengths, 80)[None]
    q, k, v = inputs(ids)
    chosen = (ids == len(lengths))[0]
    noise = np.where(chosen[None, :, None, None], 0.0, 100.0).astype(np.float32)
    first, second = (short_segments(q, k + n, v - n, ids) for n in (0 * noise, noise))
    np.testing.assert_array_equal(first[:, chosen], second[:, chosen])


@jax.jit
def short_segments(q, k, v, ids):
    return attention.packed_attention(q, k, v, ids, max_segment=13)


def test_large_scores_stay_finite():
    """Scores of several thousand, both signs, and rows that are padding only."""
    ids = np.stack([segments([20], 24), segments([], 24)])
    q, k, v = inputs(ids)
    args = (q * 1000, k * 100, v)
    found = value_and_gradients(lambda *a: attention.packed_attention(*a, ids), args, jnp.ones(q.shape))
    assert all(np.isfinite(x).all() for x in found)


def test_bfloat16_stays_near_float32():
    """Operands in bf16, everything between them in float32: outputs and gradients within 2 % of float32's norm."""
    ids = segments([100, 90], 192)[None]
    args = inputs(ids, size=32)
    low = tuple(x.astype(jnp.bfloat16) for x in args)
    exact = tuple(x.astype(jnp.float32) for x in low)
    at = jnp.asarray(np.random.default_rng(1).normal(size=args[0].shape), jnp.float32)

    def ours(q, k, v):
        return attention.packed_attention(q, k, v, ids)

    for got, wanted in zip(value_and_gradients(ours, low, at), value_and_gradients(ours, exact, at)):
        assert got.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(got, np.float32) - wanted) < 0.02 * np.linalg.norm(wanted)


def test_the_square_of_scores_never_exists():
    """No array of a compiled forward and backward pass is as large as [length, length] for one head."""
    length = 4096
    ids = np.ones((1, length), np.int32)
    args = inputs(ids, heads=1, kv_heads=1, size=8)

    def loss(q, k, v):
        return jnp.sum(attention.packed_attention(q, k, v, ids) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*args)
    sizes = [np.prod(var.aval.shape) for var in every_variable(jaxpr.jaxpr)]
    assert max(sizes) <= length * length / 16


def test_the_scores_that_exist_at_once_are_bounded():
    """A row of 16k tokens of a model of a billion parameters, segments of up to 4k: at most 1 GiB of scores."""
    shape = (1, 16_384)
    q = jax.ShapeDtypeStruct((*shape, 32, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((*shape, 8, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)

    def loss(q, k, v, ids):
        return jnp.sum(attention.packed_attention(q, k, v, ids, max_segment=4096).astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, kv, kv, ids)
    assert max(v.aval.size for v in every_variable(jaxpr.jaxpr)) <= 2**28

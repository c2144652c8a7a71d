"""Every way of cutting packed attention into blocks against the plain formula, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.model import attention
from scalerl_jax.model.attention import blocks
from tests.model.attention_cases import HIGHEST, cotangent, inputs, plain, segments, value_and_gradients
from tests.support.params import every_variable


@pytest.mark.parametrize(
    ("lengths", "seq_len", "max_segment", "path"),
    [
        pytest.param([[37], [30]], 37, None, "unrolled", id="one long segment, odd length"),
        pytest.param([[16, 16], [32]], 32, None, "unrolled", id="whole blocks"),
        pytest.param([[5, 7, 3, 9, 1], [9, 9, 9, 2]], 30, 9, "unrolled", id="short segments, bound given"),
        pytest.param([[11, 2, 11, 11, 5], [3] * 17], 51, 11, "windowed", id="many blocks, odd length, a bound"),
        pytest.param([[8] * 8, [1] * 60], 64, 8, "windowed", id="many blocks, segments of a block's length"),
        pytest.param([[20, 9, 22], [1, 43, 2]], 51, None, "looped", id="many blocks, two rows, odd length"),
        pytest.param([[60]], 64, 60, "looped", id="many blocks, bound too wide for windows"),
    ],
)
def test_equals_the_plain_formula(monkeypatch, lengths, seq_len, max_segment, path):
    monkeypatch.setattr(blocks, "BLOCK", 8)
    monkeypatch.setattr(blocks, "_SHORT_BLOCK", 4)
    monkeypatch.setattr(blocks, "_SHORT_SEGMENT", 10)
    monkeypatch.setattr(blocks, "_LOOP_BLOCK", 8)
    monkeypatch.setattr(blocks, "LOOP_SPAN", 12)
    monkeypatch.setattr(blocks, "MOST_UNROLLED", 10 if path == "unrolled" else 5)
    taken = []
    for name in ("windowed", "unrolled", "looped"):
        original = getattr(blocks, name)
        monkeypatch.setattr(
            blocks,
            name,
            lambda *a, _name=name, _original=original, **k: (taken.append(_name), _original(*a, **k))[1],
        )
    ids = np.stack([segments(row, seq_len) for row in lengths])
    args = inputs(ids)

    def ours(q, k, v):
        return attention.packed_attention(q, k, v, ids, max_segment=max_segment, precision=HIGHEST)

    at = cotangent(args[0].shape)
    mine = value_and_gradients(ours, args, at)
    assert taken == [path]
    for got, wanted in zip(mine, value_and_gradients(lambda *a: plain(*a, ids), args, at)):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cores", "scores"),
    [
        pytest.param(8, 4, 2, 1, id="a row and a head at a time"),
        pytest.param(8, 4, 2, 2 * 2 * 8 * 12, id="two heads of a row"),
        pytest.param(6, 3, 2, 6 * 2 * 8 * 12, id="two rows, one loop"),
        pytest.param(4, 2, 64, 2**20, id="all at once"),
    ],
)
def test_parts_of_rows_and_heads_on_a_cpu(monkeypatch, heads, kv_heads, cores, scores):
    """Loops side by side, each over as many rows and key heads at once as its scores allow."""
    monkeypatch.setattr(blocks, "_LOOP_BLOCK", 8)
    monkeypatch.setattr(blocks, "LOOP_SPAN", 12)
    monkeypatch.setattr(blocks, "MOST_UNROLLED", 1)
    monkeypatch.setattr(blocks, "_CACHED_SCORES", scores)
    monkeypatch.setattr(blocks.os, "cpu_count", lambda: cores)
    ids = np.stack([segments(row, 51) for row in ([20, 9, 22], [1, 43, 2], [], [51])])
    args = inputs(ids, heads=heads, kv_heads=kv_heads)
    at = cotangent(args[0].shape) * (ids > 0)[..., None, None]

    def ours(q, k, v):
        return attention.packed_attention(q, k, v, ids, precision=HIGHEST, backend=attention.plain_on("cpu"))

    found = value_and_gradients(ours, args, at)
    for got, wanted in zip(found, value_and_gradients(lambda *a: plain(*a, ids), args, at)):
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


@pytest.mark.parametrize("backend", [attention.BLOCKS, attention.plain_on("cpu")], ids=["any", "cpu"])
@pytest.mark.parametrize(
    ("lengths", "seq_len", "on_cpu"),
    [
        pytest.param([100, 90], 192, 0.003, id="unrolled"),
        pytest.param([60] * 20, 1200, 0.003, id="windowed"),
        pytest.param([1100], 1200, 0.02, id="looped"),
    ],
)
def test_bfloat16_stays_near_float32(lengths, seq_len, on_cpu, backend):
    """Everything between the operands of products is float32: outputs and gradients, as shares of float32's norm. On a
    CPU the operands are too, but for those of the loop."""
    off = on_cpu if backend.cpu else 0.02
    ids = segments(lengths, seq_len)[None]
    args = inputs(ids, heads=2, kv_heads=1, size=32)
    low = tuple(x.astype(jnp.bfloat16) for x in args)
    exact = tuple(x.astype(jnp.float32) for x in low)
    at = cotangent(args[0].shape).astype(jnp.bfloat16)

    def ours(q, k, v):
        return attention.packed_attention(q, k, v, ids, max_segment=max(lengths), backend=backend)

    for got, wanted in zip(value_and_gradients(ours, low, at), value_and_gradients(ours, exact, at)):
        assert got.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(got, np.float32) - wanted) < off * np.linalg.norm(wanted)


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


def test_the_program_does_not_grow_with_the_row():
    """From 4k tokens to 34k: as many operations, forward and backward."""

    def operations(length):
        q, kv = (jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (4, 2))
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(q, k, v, ids):
            return jnp.sum(attention.packed_attention(q, k, v, ids))

        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, kv, kv, ids)
        return len(list(every_variable(jaxpr.jaxpr)))

    assert operations(4096) == operations(34_816) < 1000


def test_a_loop_reads_only_what_its_segments_hold():
    """Keys far before a block's segments may be anything, NaN too: they are masked nowhere, for they are not read."""
    ids = segments([512, 512, 300], 1536)[None]
    q, k, v = inputs(ids, heads=2, kv_heads=1)
    poisoned = [x.at[:, :512].set(jnp.nan) for x in (k, v)]

    def attend(q, k, v):
        return attention.packed_attention(q, k, v, ids, precision=HIGHEST)

    wanted, got = attend(q, k, v), attend(q, *poisoned)
    np.testing.assert_array_equal(got[:, 512:], wanted[:, 512:])


def test_a_part_of_a_row():
    """Queries that begin anywhere in it, values and the gradients of all keys."""
    ids = np.stack([segments([20, 9, 22], 51), segments([1, 43], 51)])
    q, k, v = inputs(ids)
    at = cotangent(q.shape)
    part = slice(17, 41)

    def whole(q, k, v):
        return plain(q, k, v, ids)[:, part]

    def ours(q, k, v):
        return blocks.attend(q[:, part], k, v, blocks.Segments(ids[:, part], ids, jnp.int32(17), 51), HIGHEST)

    got = value_and_gradients(ours, (q, k, v), at[:, part])
    for mine, wanted in zip(got, value_and_gradients(whole, (q, k, v), at[:, part]), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5)


def test_a_remat_policy_may_keep_the_output():
    """By its name: then the scores are computed twice, forward and backward, and not a third time."""
    ids = segments([60], 64)[None]  # one block
    args = inputs(ids, heads=1, kv_heads=1)

    def products(policy):
        def loss(q, k, v):
            return jnp.sum(attention.packed_attention(q, k, v, ids))

        jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2)))(*args)
        return str(jaxpr).count("dot_general")

    kept = jax.checkpoint_policies.save_only_these_names(attention.SAVED)
    # Forward 2, backward 5; and forward once more where nothing is kept.
    assert products(jax.checkpoint_policies.nothing_saveable) == 9
    assert products(kept) == 7

"""Stages in blocks of rows, and attention in tiles: a row's bits do not depend on how many rows there are, or where."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model import row_blocks
from scalerl_jax.model.attention import BLOCKS, TILES, packed_attention
from scalerl_jax.model.attention.tiles import attend_slots, attend_slots_on_cpu
from scalerl_jax.model.decoder import Precision, final_norm, rotation_of
from tests.support import families
from tests.support.models import toy_decoder

CONFIG, PRECISION = toy_decoder(head_dim=16), Precision(numerics="bitwise")
RNG = np.random.default_rng(0)
WEIGHT, SCALE = RNG.normal(size=(40, 96)).astype(np.float32), RNG.normal(size=96).astype(np.float32)
STAGES = {
    "product": lambda x: row_blocks.product(x, WEIGHT, PRECISION.dot, lead=1),
    "norm": lambda x: final_norm(x, SCALE, CONFIG, PRECISION, lead=1),
    "log of a sum": lambda x: row_blocks.log_sum(x, lead=1),
    "rotation": lambda x: rotation_of(CONFIG, (1000 * abs(x[:, 0])).astype(jnp.int32), PRECISION)[1],
}


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.int32)


def test_what_it_does_not_compute_is_named():
    for decoder, seq_len, fault in (
        (toy_decoder(), 100, "a multiple of 32"),
        (families.decoder("qwen3_moe-two-of-eight"), 64, "not with experts, and the model has 8"),
        (dataclasses.replace(toy_decoder(), attention_chunk=16), 64, "not with attention in chunks"),
    ):
        assert row_blocks.alignment(Precision(), decoder, seq_len) == 1
        with pytest.raises(ValueError, match=fault):
            row_blocks.alignment(PRECISION, decoder, seq_len)


@pytest.mark.parametrize("stage", STAGES)
def test_a_row_has_the_same_bits_alone_and_among_others(stage):
    x = RNG.normal(size=(200, 96)).astype(np.float32)
    run = jax.jit(STAGES[stage])
    whole = bits(run(x))
    for start, count in ((0, 1), (7, 1), (130, 64), (60, 65)):
        assert (bits(run(x[start : start + count])) == whole[start : start + count]).all(), (start, count)


@pytest.fixture(scope="module")
def rows():
    """q, k, v of two rows of 160, and segments that start at multiples of a tile."""
    q = RNG.normal(size=(2, 160, 4, 16)).astype(np.float32)
    k, v = RNG.normal(size=(2, 2, 160, 2, 16)).astype(np.float32)
    segments = np.zeros((2, 160), np.int32)
    for row, number, start, length in ((0, 1, 0, 70), (0, 2, 96, 64), (1, 1, 0, 33), (1, 2, 64, 9), (1, 3, 96, 40)):
        segments[row, start : start + length] = number
    return q, k, v, segments


@pytest.mark.parametrize("attend", [attend_slots, attend_slots_on_cpu])
def test_attention_has_the_same_bits_in_rows_and_in_slots(rows, attend):
    q, k, v, segments = rows
    out = bits(packed_attention(q, k, v, segments, precision=PRECISION.dot, backend=TILES))
    slots = [(row, start, p) for row, start, n in ((0, 0, 70), (0, 96, 64), (1, 64, 9)) for p in (0, 3, n // 2, n - 1)]
    keys, values = np.zeros((12, 2, 16, 96), np.float32), np.zeros((12, 2, 96, 16), np.float32)
    for i, (row, start, place) in enumerate(slots):
        keys[i, :, :, : place + 1] = k[row, start : start + place + 1].transpose(1, 2, 0)
        values[i, :, : place + 1] = v[row, start : start + place + 1].transpose(1, 0, 2)
    queries = np.stack([q[row, start + place] for row, start, place in slots])
    places = np.array([place for _, _, place in slots], np.int32)
    found = bits(jax.jit(functools.partial(attend, precision=PRECISION.dot))(queries, keys, values, places))
    assert (found == np.stack([out[row, start + place] for row, start, place in slots])).all()
    assert not out[segments == 0].any()  # padding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "heads", "kv_heads", "size", "length"),
    [
        (1, 4, 4, 8, 64),
        (5, 4, 4, 8, 64),
        (5, 8, 1, 10, 160),
        (64, 8, 2, 16, 96),
        (5, 4, 2, 32, 320),
        (64, 14, 2, 64, 512),
        (5, 16, 8, 128, 192),
    ],
)
def test_all_tiles_at_once_have_the_bits_of_one_after_the_other(slots, heads, kv_heads, size, length):
    """Costs .6 CPU seconds a case."""
    q = RNG.normal(size=(slots, heads, size)).astype(np.float32)
    k, v = RNG.normal(size=(2, slots, kv_heads, size, length)).astype(np.float32)
    places = np.concatenate([[0, length - 1], RNG.integers(0, length, slots)])[-slots:].astype(np.int32)
    one, other = (
        bits(jax.jit(functools.partial(attend, precision=PRECISION.dot))(q, k, v.swapaxes(2, 3), places))
        for attend in (attend_slots, attend_slots_on_cpu)
    )
    assert (one == other).all()


def test_attention_and_its_gradient_are_those_of_the_blocks(rows):
    q, k, v, segments = rows
    weights = RNG.normal(size=q.shape).astype(np.float32) * (segments > 0)[..., None, None]

    @functools.partial(jax.jit, static_argnums=3)
    def run(q, k, v, backend):
        def loss(*qkv):
            return jnp.sum(weights * packed_attention(*qkv, segments, precision=PRECISION.dot, backend=backend))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    (ours, gradients), (theirs, expected) = run(q, k, v, TILES), run(q, k, v, BLOCKS)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=1e-5)

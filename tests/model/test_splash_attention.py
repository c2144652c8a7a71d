"""The splash kernels, interpreted on the CPU, against the plain formula: values and gradients. No TPU ran them."""

import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model.attention import Backend, packed_attention, splash
from scalerl_jax.model.attention.blocks import Segments
from tests.model.attention_cases import HIGHEST, cotangent, inputs, plain, segments, value_and_gradients

INTERPRETED = Backend("splash", interpret=True)
IDS = np.stack([segments([110, 20, 100], 256), segments([1, 130, 5, 90], 256)])
LONG = np.stack([segments(lengths, 640) for lengths in ([128, 200, 60, 150], [1, 639], [300], [50] * 12)])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_equals_the_plain_formula(kv_heads):
    args = inputs(IDS, heads=4, kv_heads=kv_heads, size=16)
    at = cotangent(args[0].shape)

    def ours(q, k, v):
        return packed_attention(q, k, v, IDS, precision=HIGHEST, backend=INTERPRETED)

    wanted = value_and_gradients(lambda *a: plain(*a, IDS), args, at)
    for mine, theirs in zip(value_and_gradients(ours, args, at), wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("ids", "part", "longest", "block"),
    [(IDS, 0, 130, 1024), (IDS, 1, 130, 1024), (LONG, 0, 640, 128), (LONG, 1, 640, 128), (LONG, 4, 640, 128)],
)
def test_a_part_of_a_row(monkeypatch, ids, part, longest, block):
    """What a device of several along `context` computes: with a bound on segments, and with blocks that are skipped."""
    monkeypatch.setattr(splash, "_BLOCK", block)
    args, here = inputs(ids, size=16), slice(128 * part, 128 * part + 128)
    at = cotangent(args[0].shape)[:, here]

    def ours(q, k, v):
        of_part = Segments(ids[:, here], ids, jnp.int32(128 * part), longest)
        return splash.attend(q[:, here], k, v, of_part, interpret=True)

    wanted = value_and_gradients(lambda *a: plain(*a, ids)[:, here], args, at)
    for mine, theirs in zip(value_and_gradients(ours, args, at), wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.parametrize("longest", [640, 200])
def test_blocks_without_a_segment_in_common_are_skipped(monkeypatch, longest):
    """Values and gradients are those of the formula, and what is in a block that is skipped does not matter."""
    monkeypatch.setattr(splash, "_BLOCK", 128)
    ids = LONG if longest == 640 else LONG[[0, 3]]
    args = inputs(ids, heads=4, kv_heads=2, size=16)
    at = cotangent(args[0].shape)

    def ours(q, k, v):
        return splash.attend(q, k, v, Segments(ids, ids, None, longest), interpret=True)

    wanted = value_and_gradients(lambda *a: plain(*a, ids), args, at)
    for mine, theirs in zip(value_and_gradients(ours, args, at), wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    # The first block of the first row is a segment by itself. Masked, its NaN would still be in every product's sums.
    q, k, v = (x.at[0, :128].set(jnp.nan) for x in args)
    for mine, theirs in zip(value_and_gradients(ours, (q, k, v), at), wanted, strict=True):
        assert np.isnan(mine[0, :128]).all()
        np.testing.assert_allclose(mine[0, 128:], theirs[0, 128:], atol=2e-5)


def test_which_blocks_meet():
    """Each pair of blocks with a segment in common, and none that has none where segments end with blocks."""
    meet = np.asarray(splash._meet(Segments(LONG, LONG, None, 640), (128, 128)))
    blocks = LONG.reshape(len(LONG), 5, 128)
    common = np.array([[[bool(set(a) & set(b)) for b in row] for a in row] for row in blocks])
    np.testing.assert_array_equal(meet, common)


def test_blocks_divide_every_row():
    for length in (128, 640, 16_384, 34_816, 34_816 // 4):
        for chip in ("TPU v4", "TPU v5", "TPU v6 lite"):
            for size in splash.block_sizes(chip, 128, length, 2 * length):
                assert size % 128 == 0 and 2 * length % size == 0 and size <= 1024

"""What is handed to cuDNN, with a stand-in for it that computes what cuDNN's documentation says; and that it lowers.

tests/accelerator/test_numerics.py compares the real one, where there is a GPU.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from scalerl_jax.model.attention import Backend, cudnn, packed_attention
from scalerl_jax.model.decoder import abstract_params, forward
from tests.model.attention_cases import HIGHEST, cotangent, inputs, plain, segments, value_and_gradients
from tests.support.models import toy_decoder

IDS = np.stack([segments([11, 2, 20], 40), segments([40], 40), segments([], 40)])


def within(q, k, v, starts, lengths):
    """(output, which of it is of a segment): segment by segment, each at its offset."""
    here = jnp.arange(q.shape[1])
    inside = (here >= starts[:, :-1, None]) & (here < starts[:, :-1, None] + lengths[..., None])
    ids = jnp.sum(jnp.where(inside, jnp.arange(1, lengths.shape[1] + 1)[:, None], 0), axis=1)
    return plain(q, k, v, ids), (ids > 0)[..., None, None]


@jax.custom_vjp
def documented(q, k, v, starts, lengths):
    """What is in no segment is left as it was in memory, which here is NaN; in the gradients too."""
    assert k.shape[2] == q.shape[2], "offsets count the query's heads"
    out, real = within(q, k, v, starts, lengths)
    return jnp.where(real, out, jnp.nan)


def backward(saved, g):
    *args, starts, lengths = saved
    _, back, real = jax.vjp(lambda *a: within(*a, starts, lengths), *args, has_aux=True)
    return *(jnp.where(real, x, jnp.nan) for x in back(jnp.where(real, g, 0))), None, None


documented.defvjp(lambda *args: (documented(*args), args), backward)


@pytest.mark.parametrize("most", [3, 40])
def test_equals_the_plain_formula(monkeypatch, most):
    """Of rows with padding; with room for more segments than there are, too."""
    monkeypatch.setattr(cudnn, "_flash", documented)
    args = inputs(IDS)
    real = jnp.asarray(IDS > 0)[..., None, None]
    at = jnp.where(real, cotangent(args[0].shape), 0)

    def ours(q, k, v):
        return packed_attention(q, k, v, IDS, precision=HIGHEST, backend=Backend("cudnn", segments=most))

    got = value_and_gradients(ours, args, at)
    wanted = value_and_gradients(lambda *a: plain(*a, IDS), args, at)
    for mine, theirs in zip(got, wanted, strict=True):
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(jnp.where(real, mine, 0), jnp.where(real, theirs, 0), atol=1e-5)


def test_segments_are_found():
    starts, lengths = cudnn.segments_of(jnp.asarray(IDS), 4)
    np.testing.assert_array_equal(starts, [[0, 11, 13, -1, -1], [0, -1, -1, -1, -1], [-1] * 5])
    np.testing.assert_array_equal(lengths, [[11, 2, 20, -1], [40, -1, -1, -1], [-1] * 4])


@pytest.mark.parametrize(
    ("seq_len", "longest", "most"),
    [(16_384, 13_000, 16), (16_384, 4_096, 32), (16_384, 64, 64), (512, 64, 64), (4, 4, 4)],
)
def test_room_for_segments(seq_len, longest, most):
    assert cudnn.most_segments(seq_len, longest) == most


def test_a_chunk_of_a_segment_is_one_of_its_own():
    """Of Llama 4's local layers: so many more than the row has segments."""
    decoder = toy_decoder(family="llama4_text", layers=4, nope_interval=4, attention_chunk=8)
    seen = []

    def record(q, k, v, segments, *, most):
        seen.append(most)
        return q

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "attend_packed", record)
        ids = jnp.ones((1, 20), jnp.int32)
        run = functools.partial(forward, config=decoder, attention=Backend("cudnn", segments=3))
        jax.eval_shape(lambda p: run(p, tokens=ids, positions=ids, segment_ids=ids), abstract_params(decoder))
    assert set(seen) == {3 + 20 // 8}


@pytest.mark.parametrize(("name", "call"), [("cudnn", "fmhaSoftmax"), ("cudnn_mask", "fmhaScaleBiasSoftmax")])
def test_lowers_for_cuda(monkeypatch, name, call):
    """The versions that are asked for while lowering are said to be there."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91_100)
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: True)
    ids = np.stack([segments([100, 28], 128)])
    args = inputs(ids, size=64, dtype=jnp.bfloat16)

    def loss(q, k, v):
        return jnp.sum(packed_attention(q, k, v, ids, backend=Backend(name, segments=8)).astype(jnp.float32))

    exported = export.export(
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call(f"__cudnn${call}{way}") for way in ("", "Backward")],
    )(*args)
    called = set(re.findall(r"__cudnn\$\w+", exported.mlir_module()))
    assert called == {f"__cudnn${call}", f"__cudnn${call}Backward"}
    if name == "cudnn":
        assert "PADDING_CAUSAL" in exported.mlir_module() and r"max_seg_per_batch\22: 8," in exported.mlir_module()

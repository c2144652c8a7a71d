"""What is rounded, where, and what a bf16 forward costs in accuracy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from scalerl_jax.model import Precision, forward, token_logprobs
from scalerl_jax.model.decoder import project, rms_norm
from tests.support.params import DECODER, packed, params_of, relative, rounded

LENGTHS = [[40, 23], [64]]
# Norm of the difference of the whole gradient from float32's, as a share of float32's norm.
BF16_GRADIENT_TOLERANCE = 0.03
BF16_LOGPROB_TOLERANCE = 0.06  # of a token, in nats, at the size of toys.DECODER


def logprobs_and_gradient(params, precision, weights=None):
    tokens, positions, segment_ids = packed(LENGTHS, 64)
    targets = np.roll(tokens, -1, axis=1)
    at = np.random.default_rng(3).normal(size=tokens.shape).astype(np.float32) if weights is None else weights

    def loss(params):
        hidden = forward(params, DECODER, tokens, positions, segment_ids, precision=precision)
        logp = token_logprobs(params, DECODER, hidden, targets, precision=precision, chunk=16)
        return (logp * at).sum(), logp

    gradient, logp = jax.jit(jax.grad(loss, has_aux=True))(params)
    return np.asarray(logp), gradient


def test_every_weight_is_rounded_to_the_wire_and_the_rounding_is_straight_through():
    """Float32 compute over a bf16 wire: the values and the gradient of the rounded weights, bit for bit."""
    params = params_of()
    ours = logprobs_and_gradient(params, Precision(compute="float32", sync="bfloat16"))
    exact = logprobs_and_gradient(rounded(params), Precision())
    unrounded = logprobs_and_gradient(params, Precision())
    np.testing.assert_allclose(ours[0], exact[0], atol=2e-6)
    assert np.abs(ours[0] - unrounded[0]).max() > 1e-3
    for path, got in jax.tree_util.tree_leaves_with_path(ours[1]):
        wanted = exact[1]
        for key in path:
            wanted = wanted[key.key]
        assert relative(got, wanted) < 2e-6, jax.tree_util.keystr(path)


def test_bfloat16_gradients_are_float32_and_near():
    params = params_of()
    precision = Precision(compute="bfloat16", sync="bfloat16")
    logp, gradient = logprobs_and_gradient(params, precision)
    wanted_logp, wanted = logprobs_and_gradient(rounded(params), Precision())
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    assert logp.dtype == np.float32
    np.testing.assert_allclose(logp, wanted_logp, atol=BF16_LOGPROB_TOLERANCE)
    assert relative(gradient, wanted) < BF16_GRADIENT_TOLERANCE


def test_no_weight_cotangent_passes_through_bfloat16():
    """Every leaf has values that bf16 cannot hold: none was rounded on its way."""
    _, gradient = logprobs_and_gradient(params_of(), Precision(compute="bfloat16", sync="bfloat16"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        leaf = np.asarray(leaf)
        used = leaf[leaf != 0]
        exactly = (used.astype(jnp.bfloat16).astype(np.float32) == used).mean()
        # A row of the embedding that one token uses is that token's own cotangent, which is in the compute dtype.
        assert exactly < (0.9 if "embed" in str(path) else 0.1), jax.tree_util.keystr(path)


def test_a_weight_cotangent_is_summed_in_float32():
    """2048 tokens of one sign: a bf16 sum would stall long before the end."""
    x = jnp.ones((2048, 8), jnp.bfloat16)
    weight = jnp.ones((8, 4), jnp.float32)
    precision = Precision(compute="bfloat16", sync="bfloat16")
    out, back = jax.vjp(lambda w: project(x, w, precision), weight)
    np.testing.assert_array_equal(back(jnp.full(out.shape, 1 + 2**-7, out.dtype))[0], 2048 * (1 + 2**-7))
    scale = jnp.ones(8)
    out, back = jax.vjp(lambda s: rms_norm(x, s, 0.0, precision), scale)
    np.testing.assert_array_equal(back(jnp.full(out.shape, 1 + 2**-7, out.dtype))[0], 2048 * (1 + 2**-7))


def test_a_product_is_summed_in_float32_and_rounded_once():
    """Forward and dx, of thousands of terms: as the exact sum, to half a unit in the last place of bfloat16."""
    rng = np.random.default_rng(0)
    x, weight, g = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((8, 4096), (4096, 2048), (8, 2048)))
    precision = Precision(compute="bfloat16", sync="bfloat16")
    out, back = jax.vjp(lambda x: project(x, weight.astype(jnp.float32), precision), x)
    for got, a, b in ((out, x, weight), (back(g)[0], g, weight.T)):
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(("platform", "narrow"), [("cpu", False), ("cuda", True), ("tpu", True)])
def test_products_of_the_update_have_the_result_that_is_fast_on_the_platform(platform, narrow):
    """On a CPU float32 from bfloat16 operands, everywhere: a bfloat16 result is six times slower there."""
    precision = Precision(compute="bfloat16", sync="bfloat16")
    tokens, positions, segment_ids = packed(LENGTHS, 64)

    def loss(params):
        hidden = forward(params, DECODER, tokens, positions, segment_ids, precision=precision)
        return token_logprobs(params, DECODER, hidden, tokens, precision=precision, chunk=16).sum()

    module = export.export(jax.jit(jax.grad(loss)), platforms=[platform])(params_of()).mlir_module()
    products = re.findall(r"dot_general.*: \(tensor<\S*x(\w+)>, tensor<\S*x(\w+)>\) -> tensor<\S*x(\w+)>", module)
    assert len(products) > 20
    assert {product[:2] for product in products} == {("bf16", "bf16")}
    results = {product[2] for product in products}
    assert results == ({"f32", "bf16"} if narrow else {"f32"})


@pytest.mark.parametrize("head", ["default", "highest"])
def test_a_bfloat16_head_keeps_float32_logits(head):
    """Against float64 with the same hidden states and weights: far nearer than logits rounded to bf16 could be."""
    params = rounded(params_of())
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(4 * rng.normal(size=(2, 24, DECODER.hidden_size)), jnp.bfloat16)
    targets = rng.integers(0, DECODER.vocab_size, (2, 24)).astype(np.int32)
    precision = Precision(compute="bfloat16", sync="bfloat16", head=head)
    logp = token_logprobs(params, DECODER, hidden, targets, precision=precision)
    logits = np.asarray(hidden, np.float64) @ np.asarray(params["head"], np.float64).T
    exact = np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(logp, exact, atol=1e-5)

"""Chunked log-probabilities against a float64 log-softmax; what they hold in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model import DecoderConfig, Precision, logits, token_logprobs
from tests.support.params import DECODER, every_variable, log_softmax64, params_of

ROWS, LENGTH = 2, 37


def inputs(scale=3.0):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(scale * rng.normal(size=(ROWS, LENGTH, DECODER.hidden_size)), jnp.float32)
    return hidden, rng.integers(0, DECODER.vocab_size, (ROWS, LENGTH)).astype(np.int32)


@pytest.mark.parametrize("chunk", [1, 16, 37, 512])
def test_values_entropy_and_gradient_whatever_the_chunk(chunk):
    params, (hidden, targets) = params_of(), inputs()
    at = np.random.default_rng(1).normal(size=(ROWS, LENGTH)).astype(np.float32)

    def run(params, hidden):
        logp, entropy = token_logprobs(params, DECODER, hidden, targets, chunk=chunk, entropy=True)
        return (logp * at).sum() + (0 * entropy).sum(), (logp, entropy)

    (dparams, dhidden), (logp, entropy) = jax.jit(jax.grad(run, (0, 1), has_aux=True))(params, hidden)
    weight = np.asarray(params["head"], np.float64)
    exact = log_softmax64(np.asarray(hidden, np.float64) @ weight.T)
    p = np.exp(exact)
    one_hot = np.eye(DECODER.vocab_size)[targets]
    np.testing.assert_allclose(logp, (exact * one_hot).sum(-1), atol=1e-5)
    np.testing.assert_allclose(entropy, -(p * exact).sum(-1), atol=1e-5)
    dlogits = at[..., None] * (one_hot - p)
    np.testing.assert_allclose(dhidden, dlogits @ weight, atol=1e-5)
    np.testing.assert_allclose(dparams["head"], np.einsum("rlv,rld->vd", dlogits, hidden), atol=1e-4)


def test_log_probs_of_several_tokens_and_their_gradient():
    """Beside the targets' and the entropy, which stay what they are."""
    params, (hidden, targets) = params_of(), inputs()
    rng = np.random.default_rng(1)
    ids = rng.integers(-1, DECODER.vocab_size, (ROWS, LENGTH, 3)).astype(np.int32)
    at = rng.normal(size=ids.shape).astype(np.float32) * (ids >= 0)

    def run(params, hidden):
        *before, others = token_logprobs(params, DECODER, hidden, targets, chunk=16, entropy=True, ids=ids)
        return (others * at).sum(), (before, others)

    (dparams, dhidden), (before, others) = jax.jit(jax.grad(run, (0, 1), has_aux=True))(params, hidden)
    alone = jax.jit(lambda p, h: token_logprobs(p, DECODER, h, targets, chunk=16, entropy=True))(params, hidden)
    for one, other in zip(before, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    weight = np.asarray(params["head"], np.float64)
    exact = log_softmax64(np.asarray(hidden, np.float64) @ weight.T)
    wanted = np.take_along_axis(exact, np.maximum(ids, 0), axis=-1)
    np.testing.assert_allclose(np.where(ids >= 0, others - wanted, 0), 0, atol=1e-5)
    one_hot = np.eye(DECODER.vocab_size)[np.maximum(ids, 0)]
    dlogits = (at[..., None] * (one_hot - np.exp(exact)[:, :, None])).sum(axis=2)
    np.testing.assert_allclose(dhidden, dlogits @ weight, atol=1e-5)
    np.testing.assert_allclose(dparams["head"], np.einsum("rlv,rld->vd", dlogits, hidden), atol=1e-4)


def test_entropy_has_no_gradient():
    params, (hidden, targets) = params_of(), inputs()
    grad = jax.grad(lambda h: token_logprobs(params, DECODER, h, targets, entropy=True)[1].sum())(hidden)
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("chunk", [16, 512])
def test_the_gradient_of_the_entropy(chunk):
    """d H / d logit_j = - p_j (log p_j + H)"""
    params, (hidden, targets) = params_of(), inputs()
    at = np.random.default_rng(1).normal(size=(ROWS, LENGTH)).astype(np.float32)

    def bonus(params, hidden):
        scored = token_logprobs(params, DECODER, hidden, targets, chunk=chunk, entropy=True, entropy_gradient=True)
        return (scored[1] * at).sum()

    dparams, dhidden = jax.jit(jax.grad(bonus, (0, 1)))(params, hidden)
    weight = np.asarray(params["head"], np.float64)
    exact = log_softmax64(np.asarray(hidden, np.float64) @ weight.T)
    p = np.exp(exact)
    dlogits = -at[..., None] * p * (exact - (p * exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(dhidden, dlogits @ weight, atol=1e-5)
    np.testing.assert_allclose(dparams["head"], np.einsum("rlv,rld->vd", dlogits, hidden), atol=1e-4)


def test_logits_rounded_to_bfloat16():
    """In sampling and in training the same ones; what comes after them is float32, and the gradient goes straight
    through."""
    params, (hidden, targets) = params_of(), inputs()
    precision = Precision(head="bfloat16")
    exact = logits(params, DECODER, hidden)
    rounded = logits(params, DECODER, hidden, precision=precision)
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16).astype(jnp.float32))
    assert rounded.dtype == jnp.float32 and (rounded != exact).mean() > 0.9

    def logp(params, hidden):
        return token_logprobs(params, DECODER, hidden, targets, precision=precision)

    wanted = log_softmax64(np.asarray(rounded, np.float64))
    one_hot = np.eye(DECODER.vocab_size)[targets]
    np.testing.assert_allclose(logp(params, hidden), (wanted * one_hot).sum(-1), atol=1e-5)
    weight = np.asarray(params["head"], np.float64)
    gradient = jax.grad(lambda h: logp(params, h).sum())(hidden)
    np.testing.assert_allclose(gradient, (one_hot - np.exp(wanted)) @ weight, atol=1e-5)


def test_extreme_logits_stay_exact():
    """Logits in the thousands: no overflow, and the likeliest token has log-probability 0."""
    params, (hidden, _) = params_of(), inputs(scale=3000.0)
    best = np.asarray(logits(params, DECODER, hidden)).argmax(-1).astype(np.int32)
    logp = np.asarray(token_logprobs(params, DECODER, hidden, best))
    assert np.isfinite(logp).all() and np.abs(logp).max() < 2


def test_a_tied_head_is_the_embedding():
    tied = DecoderConfig(**(vars(DECODER) | {"tied_embeddings": True}))
    params, (hidden, targets) = params_of(), inputs()
    ours = token_logprobs({"embed": params["head"]}, tied, hidden, targets)
    np.testing.assert_array_equal(ours, token_logprobs(params, DECODER, hidden, targets))


def test_tokens_by_vocabulary_never_exists():
    """Forward and backward, at a vocabulary much wider than the rest: nothing near [tokens, vocabulary]."""
    length, chunk, vocabulary = 512, 32, 4099
    config = DecoderConfig(
        vocab_size=vocabulary, hidden_size=16, layers=1, heads=1, kv_heads=1, head_dim=8, intermediate_size=8
    )
    params = {"head": jax.ShapeDtypeStruct((vocabulary, 16), jnp.float32)}
    hidden = jax.ShapeDtypeStruct((2, length, 16), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((2, length), jnp.int32)
    ids = jax.ShapeDtypeStruct((2, length, 8), jnp.int32)

    def loss(params, hidden, targets, ids):
        logp, entropy, others = token_logprobs(params, config, hidden, targets, chunk=chunk, entropy=True, ids=ids)
        return logp.sum() + others.sum(), entropy

    step = jax.grad(loss, (0, 1), has_aux=True)
    sizes = [np.prod(v.aval.shape) for v in every_variable(jax.make_jaxpr(step)(params, hidden, targets, ids).jaxpr)]
    assert max(sizes) <= 2 * chunk * vocabulary
    compiled = jax.jit(step).lower(params, hidden, targets, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * length * vocabulary * 4 / 2

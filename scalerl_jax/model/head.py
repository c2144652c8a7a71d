"""From hidden states to log-probabilities, with float32 logits, never holding [tokens, vocabulary].

    logp_t = logit_t[target_t] - logsumexp(logit_t)

`default`: operands in the compute dtype, products accumulated and returned in float32 (the error of a bf16 head sits in
rounding the logits, not in the products). `highest`: float32 operands too, the literal FP32 head.
The chunks of a row are scanned under jax.checkpoint; the weight is cast inside the scan, so dW accumulates in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from scalerl_jax.model.decoder import Params, Precision
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.sharding import ROWS, constrain


def head_weight(params: Params, config: DecoderConfig) -> jax.Array:
    """[V, D]; the embedding itself where the two are tied."""
    return params["embed"] if config.tied_embeddings else params["head"]


def _operands(precision: Precision) -> tuple[str, jax.lax.Precision]:
    dtype = "float32" if precision.head == "highest" else precision.compute
    return dtype, Precision(dtype).dot


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _logits(hidden: jax.Array, weight: jax.Array, precision: Precision) -> jax.Array:
    dtype, dot = _operands(precision)
    return jax.lax.dot_general(
        hidden.astype(dtype), precision.cast(weight, dtype), (((hidden.ndim - 1,), (1,)), ((), ())),
        precision=dot, preferred_element_type=jnp.float32,
    )  # fmt: skip


def _logits_forward(hidden: jax.Array, weight: jax.Array, precision: Precision) -> tuple[jax.Array, Any]:
    return _logits(hidden, weight, precision), (hidden, weight)


def _logits_backward(precision: Precision, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden, weight = saved
    dtype, dot = _operands(precision)
    g, tokens = g.astype(dtype), tuple(range(hidden.ndim - 1))
    dh = jnp.dot(g, precision.cast(weight, dtype), precision=dot, preferred_element_type=jnp.float32)
    dw = jax.lax.dot_general(
        g, hidden.astype(dtype), ((tokens, tokens), ((), ())), precision=dot, preferred_element_type=jnp.float32
    )
    return dh.astype(hidden.dtype), dw.astype(weight.dtype)


_logits.defvjp(_logits_forward, _logits_backward)


def logits(
    params: Params, config: DecoderConfig, hidden: jax.Array, *, precision: Precision = Precision()
) -> jax.Array:
    """hidden [..., D] -> [..., V] float32. For decode loops; training uses token_logprobs."""
    return _logits(hidden, head_weight(params, config), precision)


def token_logprobs(
    params: Params,
    config: DecoderConfig,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    precision: Precision = Precision(),
    chunk: int = 128,
    entropy: bool = False,
    mesh: Mesh | None = None,
) -> Any:
    """log p(target | hidden) at temperature 1.

    Args:
      hidden: [rows, length, width] from decoder.forward.
      targets: [rows, length] int32.
      chunk: tokens of each row whose logits exist at once: [rows, chunk, vocabulary] float32.
      entropy: also return the entropy of each distribution, in nats, without gradient.

    Returns: [rows, length] float32; a pair of them with `entropy`.
    """
    rows, length, _ = hidden.shape
    chunk = min(chunk, length)
    padding = -length % chunk
    weight = head_weight(params, config)

    @jax.checkpoint
    def one(weight: jax.Array, hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logit = constrain(_logits(hidden, weight, precision), mesh, ROWS, None, "tensor")
        top = jax.lax.stop_gradient(jnp.max(logit, axis=-1, keepdims=True))
        shifted = logit - top
        exponent = jnp.exp(shifted)
        total = jnp.sum(exponent, axis=-1)
        # A masked sum and not a gather: with the vocabulary cut over devices it is one reduction, and on a CPU it
        # fuses where a gather's scatter-add in the backward pass does not.
        vocabulary = jax.lax.broadcasted_iota(jnp.int32, logit.shape, logit.ndim - 1)
        target = jnp.sum(jnp.where(vocabulary == targets[..., None], shifted, 0.0), axis=-1)
        spread = jnp.log(total)
        nats = spread - jnp.sum(exponent * shifted, axis=-1) / total if entropy else jnp.zeros_like(spread)
        return target - spread, jax.lax.stop_gradient(nats)

    def cut(x: jax.Array) -> jax.Array:
        """[R, L, ...] -> [chunks, R, chunk, ...]"""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

    _, (logp, nats) = jax.lax.scan(lambda _, xs: (None, one(weight, *xs)), None, (cut(hidden), cut(targets)))

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length]

    return (join(logp), join(nats)) if entropy else join(logp)

"""From hidden states to log-probabilities, with float32 logits, never holding [tokens, vocabulary].

    logp_t = logit_t[target_t] - logsumexp(logit_t)

`default`: operands in the compute dtype, products accumulated and returned in float32 (the error of a bf16 head comes
from rounding the logits, not from the products). `highest`: float32 operands too, the literal FP32 head. `bfloat16`: as
`default`, with the logits rounded to it, as recipes without an FP32 head have them; later operations are float32.
The chunks of a row are scanned under jax.checkpoint, and dW accumulates in float32.

On a mesh each device scans its own part of its own rows, against its part of the vocabulary. The weight is rounded and
gathered once, in the dtype of the products, before the scan, and its cotangent is summed over the devices once, after
it: inside the scan, both would be communicated for every chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from scalerl_jax.model import row_blocks
from scalerl_jax.model.decoder import Params, Precision
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.lora import LowRank, partition_of_factors, split
from scalerl_jax.model.precision import rounded as rounded_to
from scalerl_jax.model.sharding import ROWS, spec

_KEPT = "head sums"
Axes = tuple[str, ...]  # of the mesh; empty if one device has everything


def chunk_of(chunk: int, platform: str) -> int:
    """Tokens of a row whose logits exist at once; 0: chosen for the platform. Each chunk reads the weight, and reads
    and writes the float32 sums of its gradient: 128 tokens fit a CPU's caches, but make an accelerator wait for its
    memory."""
    return chunk or (128 if platform == "cpu" else 1024)


def head_weight(params: Params, config: DecoderConfig) -> jax.Array:
    """[V, D]; the embedding itself if the two are tied."""
    return params["embed"] if config.tied_embeddings else params["head"]


def _operands(precision: Precision) -> tuple[str, jax.lax.Precision]:
    dtype = "float32" if precision.head == "highest" else precision.compute
    return dtype, Precision(dtype).dot


def logits(
    params: Params, config: DecoderConfig, hidden: jax.Array, *, precision: Precision = Precision()
) -> jax.Array:
    """hidden [..., D] -> [..., V] float32. For decode loops; training uses token_logprobs."""
    return _product(hidden, precision.cast(head_weight(params, config), _operands(precision)[0]), precision)


def _product(hidden: jax.Array, weight: jax.Array, precision: Precision) -> jax.Array:
    dtype, dot = _operands(precision)
    hidden = hidden.astype(dtype)
    if precision.bitwise:
        product = row_blocks.product(hidden, weight, dot, lead=hidden.ndim - 1)
    else:
        product = jax.lax.dot_general(
            hidden, weight, (((hidden.ndim - 1,), (1,)), ((), ())), precision=dot, preferred_element_type=jnp.float32
        )
    return as_rounded(product, precision)


def as_rounded(logits: jax.Array, precision: Precision) -> jax.Array:
    """Logits, float32, rounded as precision.head says."""
    return rounded_to(logits, "bfloat16") if precision.head == "bfloat16" else logits


def spread_of(logit: jax.Array, precision: Precision) -> tuple[jax.Array, jax.Array]:
    """logit [N, V] float32 -> (shifted so that the largest of each row is 0, log of the sum of its exponentials [N,
    1]): their difference is the log-probs, as in training."""
    shifted = logit - jnp.max(logit, axis=-1, keepdims=True)
    if precision.bitwise:
        return shifted, row_blocks.log_sum(shifted, lead=1)[:, None]
    return shifted, jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _logits(hidden: jax.Array, weight: jax.Array, factors: Any, sink: Any, precision: Precision) -> jax.Array:
    """[..., D], [V, D] in the products' dtype -> [..., V]. The weight's cotangent goes to `sink`, so it is float32.
    factors: () or an adapter's (left [V, rank], right [rank, D]), whose cotangents go to the two arrays of `sink`."""
    return _product(hidden, weight, precision)


def _logits_forward(hidden, weight, factors, sink, precision):
    return _product(hidden, weight, precision), (hidden, weight, factors)


def _logits_backward(precision, saved, g):
    hidden, weight, factors = saved
    dtype, dot = _operands(precision)
    g, tokens = g.astype(dtype), tuple(range(hidden.ndim - 1))

    def times(x, matrix):
        return jnp.dot(x, matrix, precision=dot, preferred_element_type=jnp.float32)

    def outer(g, x):
        return jax.lax.dot_general(
            g, x.astype(dtype), ((tokens, tokens), ((), ())), precision=dot, preferred_element_type=jnp.float32
        )

    if factors:
        left, right = factors
        back = times(g, left).astype(dtype)
        sums = outer(g, times(hidden.astype(dtype), right.T)), outer(back, hidden)
    else:
        sums = outer(g, hidden)
    zeros = jax.tree.map(jnp.zeros_like, (weight, factors))
    return times(g, weight).astype(hidden.dtype), *zeros, sums


_logits.defvjp(_logits_forward, _logits_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _sink(weight: jax.Array, width: int, axes: Axes) -> jax.Array:
    """Zeros [V, width]; their cotangent becomes the weight's [V, D], scattered over the width along the axes."""
    return jnp.zeros((weight.shape[0], width), jnp.float32)


def _sink_backward(width, axes, kind, g):
    if axes:
        g = jax.lax.psum_scatter(g, axes, scatter_dimension=1, tiled=True)
    return (g.astype(kind.dtype),)


_sink.defvjp(lambda weight, width, axes: (_sink(weight, width, axes), weight[:0, :0]), _sink_backward)


@jax.custom_vjp
def _picked(logit: jax.Array, places: jax.Array) -> jax.Array:
    """logit [R, C, V] float32 at places [R, C]; anything where a place does not exist.

    The sum of a mask, which fuses, costs a GPU three passes: XLA takes the mask's constants out of the scan and reads
    them, as large as the logits, in every chunk. A TPU reads elements one at a time.
    """

    def summed(logit: jax.Array, places: jax.Array) -> jax.Array:
        return jnp.sum(_at(places, logit.shape[-1], logit), axis=-1)

    def gathered(logit: jax.Array, places: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logit, places[..., None], axis=-1, mode="clip")[..., 0]

    return jax.lax.platform_dependent(logit, places, tpu=summed, default=gathered)


def _at(places: jax.Array, vocabulary: int, x: jax.Array) -> jax.Array:
    """[R, C, V]: x at these places, 0 elsewhere."""
    token = jax.lax.broadcasted_iota(jnp.int32, (*places.shape, vocabulary), places.ndim)
    return jnp.where(token == places[..., None], x, 0.0)


def _picked_backward(saved, g):
    places, like = saved
    return _at(places, like.shape[-1], g[..., None]), None  # which fuses, unlike the scatter-add of a gather


_picked.defvjp(lambda logit, places: (_picked(logit, places), (places, logit[:0])), _picked_backward)


@jax.named_scope("head")
def token_logprobs(
    params: Params,
    config: DecoderConfig,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    precision: Precision = Precision(),
    chunk: int = 128,
    entropy: bool = False,
    entropy_gradient: bool = False,
    ids: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """log p(target | hidden) at temperature 1.

    Args:
      hidden: [rows, length, width] from decoder.forward.
      targets: [rows, length] int32.
      chunk: tokens of each row whose logits exist at once: [rows, chunk, vocabulary] float32.
      entropy: also return the entropy of each distribution, in nats.
      entropy_gradient: differentiate the entropy.
      ids: [rows, length, k] int32, tokens whose log-probs are returned too; ids below 0 are no token, and their values
        are arbitrary.

    Returns: [rows, length] float32; with `entropy`, another one after it; with `ids`, [rows, length, k] after these.
    """
    weight, adapter = split(head_weight(params, config))
    scan = functools.partial(
        _scan, precision=precision, chunk=chunk, entropy=entropy, entropy_gradient=entropy_gradient
    )
    scanned = (hidden, targets) if ids is None else (hidden, targets, ids)
    if mesh is None or mesh.size == 1:
        logp, nats, *others = scan(weight, adapter, *scanned)
    else:
        of_weight = spec(weight.shape, ("vocabulary", "width"), mesh)
        of_rows = PartitionSpec(ROWS, "context")
        specs = (of_weight, partition_of_factors(adapter, of_weight), *[of_rows] * len(scanned))
        # Sums over the vocabulary's parts are explicit inside, so that check_vma is not needed.
        logp, nats, *others = jax.shard_map(
            functools.partial(scan, vocabulary=of_weight[0] or (), width=of_weight[1] or ()),
            mesh=mesh, in_specs=specs, out_specs=of_rows, check_vma=False,
        )(weight, adapter, *scanned)  # fmt: skip
    wanted = (logp, nats, *others) if entropy else (logp, *others)
    return wanted if len(wanted) > 1 else logp


def _scan(
    weight: jax.Array,
    adapter: LowRank | None,
    hidden: jax.Array,
    targets: jax.Array,
    *ids: jax.Array,
    precision: Precision,
    chunk: int,
    entropy: bool,
    entropy_gradient: bool,
    vocabulary: Axes = (),
    width: Axes = (),
) -> tuple[jax.Array, ...]:
    """(log-probs, entropies) [R, L] of one device's part of the rows, and log-probs [R, L, k] of the `ids`, if any;
    `weight` and `adapter` are its part along these axes."""
    rows, length, size = hidden.shape
    chunk = min(chunk, length)
    padding = -length % chunk
    dtype = _operands(precision)[0]

    def gathered(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, width, axis=1, tiled=True) if width else x

    rounded = gathered(precision.cast(jax.lax.stop_gradient(weight), dtype))
    factors: Any = ()
    if adapter is None:
        sink: Any = _sink(weight, size, width)
    else:
        left, right = jax.lax.stop_gradient(adapter).factors(dtype)
        factors = left, gathered(right)
        sink = _sink(adapter.left, left.shape[1], ()), _sink(adapter.right, size, width)
    first = jax.lax.axis_index(vocabulary) * weight.shape[0] if vocabulary else 0

    def over_vocabulary(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, vocabulary) if vocabulary else x

    def named(shifted: jax.Array, ids: jax.Array) -> jax.Array:
        """[R, chunk, k]. A gather: masked sums would read the vocabulary k times."""
        here = (ids >= first) & (ids < first + weight.shape[0])
        found = jnp.take_along_axis(shifted, jnp.where(here, ids - first, 0), axis=-1, mode="clip")
        return over_vocabulary(jnp.where(here, found, 0.0))

    # Kept for the backward pass, which computes the logits again: two numbers a token, each a pass over its logits.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_KEPT))
    def one(hidden: jax.Array, targets: jax.Array, *ids: jax.Array) -> tuple[jax.Array, ...]:
        logit = _logits(hidden, rounded, factors, sink, precision)
        top = jnp.max(jax.lax.stop_gradient(logit), axis=-1)
        top = checkpoint_name(jax.lax.pmax(top, vocabulary) if vocabulary else top, _KEPT)
        shifted = logit - top[..., None]
        exponent = jnp.exp(shifted)
        total = checkpoint_name(over_vocabulary(jnp.sum(exponent, axis=-1)), _KEPT)
        places = targets - first
        here = (places >= 0) & (places < logit.shape[-1])
        target = over_vocabulary(jnp.where(here, _picked(logit, places) - top, 0.0))
        spread = row_blocks.log_sum(shifted, lead=2) if precision.bitwise else jnp.log(total)
        others = [named(shifted, wanted) - spread[..., None] for wanted in ids]
        if not entropy:
            return target - spread, jnp.zeros_like(spread), *others
        products = exponent * shifted
        if entropy_gradient:
            return target - spread, spread - over_vocabulary(jnp.sum(products, axis=-1)) / total, *others
        mean = over_vocabulary(jnp.sum(jax.lax.stop_gradient(products), axis=-1)) / total
        return target - spread, jax.lax.stop_gradient(spread - mean), *others

    def cut(x: jax.Array) -> jax.Array:
        """[R, L, ...] -> [chunks, R, chunk, ...]"""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, -1, *x.shape[3:])[:, :length]

    _, scanned = jax.lax.scan(lambda _, xs: (None, one(*xs)), None, tuple(map(cut, (hidden, targets, *ids))))
    return tuple(map(join, scanned))

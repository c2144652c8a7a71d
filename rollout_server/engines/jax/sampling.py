"""One token per row from float32 logits, on the device.

    p = softmax(filter(logits / temperature))       filter keeps the top_k largest, then the smallest set of mass top_p
    token ~ p by inverting its cumulative sum, in two levels of about sqrt(V):
        block b:  C_b <= u1 < C_(b+1)               then a token of the block, in the same way, with u2
    logprob = log p(token)

Two uniform numbers per token instead of V Gumbel numbers: at a vocabulary of 150k the random bits would cost more than
the head. They are a pure function of (seed, position), so a token does not depend on its slot, on the other slots or on
how steps are cut into chunks. The filter searches its threshold bit by bit instead of sorting: 32 passes over the
logits per bound, and exact, ties included.

Left out on purpose: greedy decoding (temperature 0), penalties, logit biases.

Legend: B rows (slots), V vocabulary, N steps.
"""

import math

import jax
import jax.numpy as jnp


def uniforms(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """seeds [B, 2] uint32, positions [N, B] int32 -> [N, B, 2] float32 in [0, 1), multiples of 2^-24."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        # A folded key is the Threefry hash of the position under the seed: 64 random bits.
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position))

    bits = jax.vmap(jax.vmap(one), (None, 0))(seeds, positions)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def keep_likely(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """logits [B, V] with -inf where top_k (0: off) or top_p (1: off) drops the token; ties with the last kept stay."""
    order = _order(logits)
    wanted = jnp.where(top_k > 0, top_k, logits.shape[-1]).astype(jnp.float32)
    likely = order >= _highest_threshold(order, jnp.ones_like(logits), wanted)
    p = jax.nn.softmax(jnp.where(likely, logits, -jnp.inf), axis=-1)
    # top_p = 1 must drop nothing, and a rounded sum may reach 1 before the tail.
    mass = jnp.where(top_p < 1, top_p, jnp.inf)
    return jnp.where(likely & (order >= _highest_threshold(order, p, mass)), logits, -jnp.inf)


def _order(x: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _highest_threshold(order: jax.Array, weight: jax.Array, wanted: jax.Array) -> jax.Array:
    """The highest t [B, 1] such that the weight of {order >= t} is at least wanted [B]; 0 where there is none."""

    def set_bit(i: jax.Array, t: jax.Array) -> jax.Array:
        higher = t | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        enough = jnp.sum(jnp.where(order >= higher, weight, 0.0), axis=-1, keepdims=True) >= wanted[:, None]
        return jnp.where(enough, higher, t)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros((order.shape[0], 1), jnp.uint32))


def sample(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, u: jax.Array, *, filtered: bool
) -> tuple[jax.Array, jax.Array]:
    """logits [B, V] float32, parameters [B], u [B, 2] -> (tokens [B] int32, logprobs [B] float32).

    filtered: whether any row has a top_k or top_p that drops a token. The host decides it: when a GPU decided it in
    every step, it waited for the host each time, a fifth of the step.
    """
    # From here on the largest logit is 0, which no filter drops. Shifted first, so that no temperature overflows.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    if filtered:
        logits = keep_likely(logits, top_k, top_p)

    rows, vocabulary = logits.shape
    size = max(16, math.isqrt(vocabulary - 1) + 1)
    padding = -vocabulary % size
    weight = jnp.pad(jnp.exp(logits), ((0, 0), (0, padding))).reshape(rows, -1, size)
    block, total = _pick(jnp.sum(weight, axis=-1), u[:, 0])
    inside, _ = _pick(jnp.take_along_axis(weight, block[:, None, None], axis=1)[:, 0], u[:, 1])
    token = block * size + inside
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jnp.log(total)


def _pick(weight: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """weight [B, n] >= 0, u [B] in [0, 1) -> (index [B] int32 with probability proportional to weight, total [B]).

    Every partial sum adds the same terms in the same order, zeros in place of those left out, so the sums rise exactly
    where a weight is above 0, and u * total < total: an index of weight 0 is never picked.
    """
    n = weight.shape[-1]
    upto = jnp.arange(n)[None, :] <= jnp.arange(n)[:, None]
    sums = jnp.sum(jnp.where(upto, weight[:, None, :], 0.0), axis=-1)
    total = sums[:, -1]
    return jnp.sum(sums <= (u * total)[:, None], axis=-1, dtype=jnp.int32), total

"""Sums and quantiles over the loss tokens of each segment of packed rows, in float32.

A segment stands in one row, on end, so none of these depends on what it is packed with: what is added up starts anew
with each segment, and is never the difference of two sums over the row.

All arrays are [rows, length]; `segment_ids` is int32, 1.. in each row, 0 is padding. Values are 0 wherever there is no
loss token.
"""

import jax
import jax.numpy as jnp


def total(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The sum over each position's segment."""
    return jnp.take_along_axis(sums(values, segment_ids), segment_ids, axis=1)


def sums(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """[rows, length + 1]: the sum over each segment, at its number."""
    segments = segment_ids.shape[1] + 1  # as many as a row has positions, and padding
    return jax.vmap(lambda v, ids: jax.ops.segment_sum(v, ids, num_segments=segments))(values, segment_ids)


def before(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The sum over the positions of each one's segment that come before it."""
    previous = jnp.roll(segment_ids, 1, axis=1).at[:, 0].set(-1)
    first = segment_ids != previous

    def add(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    through, _ = jax.lax.associative_scan(add, (values, first), axis=1)
    return jnp.where(first, 0.0, jnp.roll(through, 1, axis=1))


def quantile(values: jax.Array, loss_token: jax.Array, segment_ids: jax.Array, share: float) -> jax.Array:
    """The quantile over the loss tokens of each position's segment, linear between the two nearest; 0 without any."""
    length = segment_ids.shape[1]
    key = jnp.where(loss_token, segment_ids, length + 1)  # the others come last
    _, ordered = jax.lax.sort((key, values), dimension=1, num_keys=2)
    count = sums(loss_token.astype(jnp.int32), segment_ids)
    start = jnp.cumsum(count, axis=1) - count
    count, start = (jnp.take_along_axis(x, segment_ids, axis=1) for x in (count, start))
    place = share * jnp.maximum(count - 1, 0).astype(jnp.float32)
    lower = jnp.floor(place).astype(jnp.int32)
    upper = jnp.minimum(lower + 1, jnp.maximum(count - 1, 0))
    low, high = (jnp.take_along_axis(ordered, jnp.minimum(start + x, length - 1), axis=1) for x in (lower, upper))
    return jnp.where(count > 0, low + (place - lower) * (high - low), 0.0)

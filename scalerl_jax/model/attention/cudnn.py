"""Attention on NVIDIA GPUs: cuDNN's flash attention, of packed rows or with a mask.

`attend_packed` gives cuDNN each segment's start and length: nothing outside the segments is computed. JAX has no public
call for that, so the private one stands in one function, `_flash`, for the versions of jax in which it was read; Hopper
or later. A row of more than MAXIMUM_SEGMENTS segments is computed in blocks.

`attend_masked` is the public call, which takes a mask of [length, keys] beside a row: for older GPUs, other versions of
jax, and rows that are cut along `context`.

Neither was ever run on a GPU: what is tested is what is handed to cuDNN, and that it lowers.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.model.attention import blocks
from scalerl_jax.model.attention.backend import Backend
from scalerl_jax.model.attention.block_products import mask_of

FLASH_VERSIONS = ((0, 10, 0), (0, 13, 0))  # of jax, from and below
# cuDNN keeps the softmax's sums of [rows x MAXIMUM_SEGMENTS, heads, length]: 134 MB for 32 heads and 16k tokens.
MAXIMUM_SEGMENTS = 64


def attend_packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    *,
    offset: None,
    max_segment: int,
    precision: jax.lax.Precision,
    backend: Backend,
) -> jax.Array:
    """As blocks.attend, of whole rows; 0 for padding."""
    del offset
    in_blocks = functools.partial(
        blocks.attend, offset=None, max_segment=max_segment, precision=precision, backend=backend
    )
    starts, lengths, number = segments_of(key_segments, min(MAXIMUM_SEGMENTS, key_segments.shape[1]))

    def in_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # What cuDNN leaves at the padding, of the output and of the gradients, is whatever was in that memory.
        real = (key_segments > 0)[..., None, None]
        q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))
        # Its offsets of keys are counted in the query's heads, in all versions read: so the keys get as many.
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return jnp.where(real, _flash(q, k, v, starts, lengths), 0)

    return jax.lax.cond(
        number > lengths.shape[1],
        lambda q, k, v: in_blocks(q, k, v, query_segments, key_segments),
        in_cudnn,
        q, k, v,
    )  # fmt: skip


def attend_masked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    *,
    offset: jax.Array | None,
    max_segment: int,
    precision: jax.lax.Precision,
    backend: Backend,
) -> jax.Array:
    """As blocks.attend, through the public call."""
    del max_segment, precision, backend
    mask = mask_of(query_segments, key_segments, 0 if offset is None else offset)
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], is_causal=offset is None, implementation="cudnn")


def segments_of(segment_ids: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[rows, length] -> starts [rows, most + 1] and lengths [rows, most] int32, -1 where there is none; and how many
    segments the fullest row has. Padding, id 0, is no segment."""
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    after = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    begins = (segment_ids > 0) & (segment_ids != before)
    ends = (segment_ids > 0) & (segment_ids != after)
    places = jax.vmap(functools.partial(jnp.flatnonzero, size=most, fill_value=-1))
    first, last = places(begins).astype(jnp.int32), places(ends).astype(jnp.int32)
    lengths = jnp.where(first >= 0, last - first + 1, -1)
    return jnp.pad(first, ((0, 0), (0, 1)), constant_values=-1), lengths, jnp.max(jnp.sum(begins, axis=1))


def has_packed_call() -> bool:
    """Whether `_flash` was read in this version of jax."""
    first, end = FLASH_VERSIONS
    return first <= jax.__version_info__[:3] < end


def _flash(q: Any, k: Any, v: Any, starts: jax.Array, lengths: jax.Array) -> jax.Array:
    """The private call: jax >= 0.10.0, < 0.13 (FLASH_VERSIONS)."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn.dot_product_attention(
        q, k, v, None, None, lengths, lengths, starts, starts,
        scale=1 / math.sqrt(q.shape[-1]), mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )  # fmt: skip

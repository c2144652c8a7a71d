"""Attention on NVIDIA GPUs: cuDNN's flash attention, of packed rows or with a mask.

`attend_packed` passes cuDNN each segment's start and length: nothing outside the segments is computed. JAX has no
public call for that, so the private one is wrapped in one function, `_flash`, for the versions of jax that were
checked; Hopper or later. The most segments of a row are part of the program, and cost: for each absent one cuDNN's
backward pass still visits every position, and it keeps the softmax's sums as [rows x segments, heads, length].

`attend_masked` is the public call, with a mask of [length, keys] per row: for older GPUs, other versions of jax, and
rows that are sharded along `context`.

`attend_prefixes` is for decoding: a few queries a row over the row's first positions, and none is read after them.
"""

import contextlib
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.model.attention.blocks import Segments, mask_of

FLASH_VERSIONS = ((0, 10, 0), (0, 13, 0))  # of jax, from and below
_MOST_SUMS = 2**20  # segments times length of a row: the softmax's sums take 134 MB for 32 heads


def attend_packed(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, *, most: int) -> jax.Array:
    """As blocks.attend, for whole rows of at most so many segments; 0 for padding."""
    starts, lengths = segments_of(segments.keys, most)
    # At padding cuDNN leaves arbitrary memory, in the output and in the gradients.
    real = (segments.keys > 0)[..., None, None]
    q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))
    # cuDNN counts key offsets in query heads, in all versions checked: so the keys get as many heads.
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    return jnp.where(real, _flash(q, k, v, starts, lengths), 0)


def most_segments(seq_len: int, longest: int) -> int:
    """The segments that a row can hold: enough if their average is an eighth of the longest."""
    return min(8 * -(-seq_len // longest), max(8, _MOST_SUMS // seq_len), seq_len)


def attend_masked(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
    """As blocks.attend, through the public call."""
    whole = segments.offset is None
    mask = mask_of(segments.queries, segments.keys, 0 if whole else segments.offset)
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], is_causal=whole, implementation="cudnn")


def attend_prefixes(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, K, G, h] over the first `lengths` [B] int32, at least 1, positions of k and v [B, K, S, h],
    and the logarithm of the sum of exp(score), [B, K, G] float32. Through the private call."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn.dot_product_attention(
        q, k, v, None, None, jnp.full(len(lengths), q.shape[2], jnp.int32), lengths,
        scale=1 / math.sqrt(q.shape[-1]), mask_type=cudnn.MaskType.PADDING, qkv_layout="BNTH", return_residual=True,
    )  # fmt: skip


def capability_of(device: jax.Device) -> tuple[int, ...]:
    """The compute capability of an NVIDIA GPU; (0,) for any other device."""
    found = str(getattr(device, "compute_capability", ""))
    return tuple(map(int, found.split("."))) if re.fullmatch(r"\d+\.\d+", found) else (0,)


def largest_head(capability: tuple[int, ...]) -> int:
    """The size of the largest heads, which must be multiples of 8; 0: no such GPU, and cuDNN cannot be used."""
    return 0 if capability < (8, 0) else 128 if capability < (9, 0) else 256


def has_head(capability: tuple[int, ...], size: int) -> bool:
    """Whether cuDNN has attention with heads of this size on this GPU."""
    return size % 8 == 0 and size <= largest_head(capability)


def segments_of(segment_ids: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """[rows, length] -> starts [rows, most + 1] and lengths [rows, most] int32, -1 for absent segments. Padding, id 0,
    is no segment."""
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    after = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    begins = (segment_ids > 0) & (segment_ids != before)
    ends = (segment_ids > 0) & (segment_ids != after)
    places = jax.vmap(functools.partial(jnp.flatnonzero, size=most, fill_value=-1))
    first, last = places(begins).astype(jnp.int32), places(ends).astype(jnp.int32)
    lengths = jnp.where(first >= 0, last - first + 1, -1)
    return jnp.pad(first, ((0, 0), (0, 1)), constant_values=-1), lengths


def has_packed_call() -> bool:
    """Whether the private calls were checked with this version of jax."""
    first, end = FLASH_VERSIONS
    return first <= jax.__version_info__[:3] < end


@contextlib.contextmanager
def compiled_for(capability: tuple[int, ...], *, version: int) -> Iterator[None]:
    """Compiles for another GPU, which may be absent: inside, JAX sees this compute capability and cuDNN version (90100
    is 9.1) instead of this machine's."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    asked = cudnn.check_compute_capability, cudnn.check_cudnn_version
    cudnn.check_compute_capability = lambda least: capability >= tuple(map(int, least.split(".")))
    cudnn.check_cudnn_version = lambda: version
    try:
        yield
    finally:
        cudnn.check_compute_capability, cudnn.check_cudnn_version = asked


def _flash(q: Any, k: Any, v: Any, starts: jax.Array, lengths: jax.Array) -> jax.Array:
    """The private call: jax >= 0.10.0, < 0.13 (FLASH_VERSIONS)."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn.dot_product_attention(
        q, k, v, None, None, lengths, lengths, starts, starts,
        scale=1 / math.sqrt(q.shape[-1]), mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )  # fmt: skip

"""Attention on TPUs: the splash kernels of JAX's Pallas library, with segment ids.

The kernels skip, a block at a time, what the static mask excludes: later keys, and those further back than the longest
segment. What they skip is in small arrays, which are made anew for each row: its blocks without a segment in common are
skipped, too. Grouped queries share their keys in the kernel.

Queries that are a part of their row (`context`) need a part of the mask: it is made for all parts at once, and each
device selects its part by its offset.

Products are of bfloat16 operands; 1 / sqrt(h) is multiplied into the queries and rounded there. The sizes of blocks
were chosen to compile in every chip's memory, and never timed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.model.attention.blocks import SAVED, Segments

LANES = 128  # a row's parts are multiples of this
# The most queries and keys of a block: such that forward and backward compile in the memory of a core.
_BLOCK = 1024
_SMALL_BLOCK = 512
_SMALL_CHIPS = ("v2", "v3", "v4")
_LARGE_HEAD = 128
_COMPUTED = 512  # keys of one product


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, *, chip: str = "", interpret: bool = False
) -> jax.Array:
    """As blocks.attend. Lengths are multiples of LANES. chip, interpret: as in Backend."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    length, keys = q.shape[1], k.shape[1]
    sizes = block_sizes(chip, q.shape[3], length, keys)
    kernel = _kernel(q.shape[2], length, keys, segments.longest, sizes, interpret)
    if segments.offset is not None:
        kernel = _part(kernel, segments.offset // length, keys // length)
    q = (q * (1 / q.shape[-1] ** 0.5)).astype(q.dtype)
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]  # [rows, heads, length, h]

    def of_row(meet: jax.Array, *row: Any) -> jax.Array:
        by_queries = [_skipping(info, meet) for info in (kernel.fwd_mask_info, kernel.dq_mask_info)]
        return type(kernel)(*by_queries, _skipping(kernel.dkv_mask_info, meet.T, by_keys=True), **kernel.kwargs)(*row)

    meet = _meet(segments, sizes)
    out = jax.vmap(of_row)(meet, *heads_first, kernels.SegmentIds(segments.queries, segments.keys))
    return jnp.swapaxes(out, 1, 2)


def _meet(segments: Segments, sizes: tuple[int, int]) -> jax.Array:
    """[rows, blocks of queries, blocks of keys] bool: whether they may have a segment in common. The ids of a row rise,
    but for the padding at its end, which is a segment of its own here."""
    most = jnp.iinfo(jnp.int32).max
    edges = []
    for ids, size in zip((segments.queries, segments.keys), sizes):
        of_block = jnp.where(ids == 0, most, ids).reshape(ids.shape[0], -1, size)
        edges.append((of_block.min(axis=2), of_block.max(axis=2)))
    (first, last), (first_key, last_key) = edges
    return (first[:, :, None] <= last_key[:, None]) & (first_key[:, None] <= last[:, :, None])


def _skipping(info: Any, meet: jax.Array, *, by_keys: bool = False) -> Any:
    """The mask info of a kernel that also skips the blocks that do not meet, for one row.

    The kernel goes through the inner blocks of each outer one. `data_next` names the inner block that a step needs, or
    for one that is skipped the next that any needs: nothing else is loaded. meet: [outer blocks, inner blocks]; the
    outer ones are those of queries, or with by_keys of keys, and then the arrays of `info` are transposed.
    """
    steps, inner = info.block_mask[0], info.data_next[0].astype(jnp.int32)
    if by_keys:
        steps, inner = steps.T, inner.T
    needed = (steps > 0) & jnp.take_along_axis(meet, inner, axis=1)
    none = meet.shape[1]
    ahead = jax.lax.cummin(jnp.where(needed, inner, none), axis=1, reverse=True)
    first = ahead[:, :1]  # keys come once for each head, queries for all heads in turn
    ahead = jnp.where(ahead < none, ahead, first if by_keys else jnp.roll(first, -1, axis=0))
    steps, ahead = jnp.where(needed, steps, 0), jnp.where(ahead < none, ahead, 0)
    if by_keys:
        steps, ahead = steps.T, ahead.T
    return info._replace(block_mask=steps[None], data_next=ahead.astype(info.data_next.dtype)[None])


def block_sizes(chip: str, head_dim: int, length: int, keys: int) -> tuple[int, int]:
    """(queries, keys) of a block: the largest sizes that divide, and that fit the chip."""
    small = head_dim > _LARGE_HEAD or any(part in chip for part in _SMALL_CHIPS)
    most = _SMALL_BLOCK if small else _BLOCK
    return _dividing(length, most), _dividing(keys, most)


def _dividing(length: int, most: int) -> int:
    return max(size for size in range(LANES, min(length, most) + 1, LANES) if length % size == 0)


def _kernel(heads: int, length: int, keys: int, longest: int, sizes: tuple[int, int], interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (keys, keys)
    mask = masks.CausalMask(shape) if longest >= keys else masks.LocalMask(shape, (longest - 1, 0), 0)
    queries, block = sizes
    computed = _dividing(block, _COMPUTED)
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=queries,
            block_kv=block,
            block_kv_compute=computed,
            block_q_dkv=queries,
            block_kv_dkv=block,
            block_kv_dkv_compute=computed,
            block_q_dq=queries,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=keys // length,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )


def _part(kernel: Any, number: jax.Array, parts: int) -> Any:
    """The kernel of one part of the row's queries, from that of all parts."""

    def of(x: jax.Array | None, axis: int) -> jax.Array | None:
        if x is None:
            return None
        size = x.shape[axis] // parts
        return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)

    def of_mask(info: Any) -> Any:
        # If the kernel computes the mask, there are no mask blocks to be split.
        assert info.partial_mask_blocks is None
        steps = {name: of(getattr(info, name), 1) for name in ("data_next", "mask_next", "block_mask")}
        return info._replace(**steps, q_sequence=of(info.q_sequence, 0))

    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    return type(kernel)(*(of_mask(info) for info in infos), **kernel.kwargs)

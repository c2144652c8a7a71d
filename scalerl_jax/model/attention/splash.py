"""Attention on TPUs: the splash kernels of JAX's Pallas library, with segment ids.

The kernels skip what the static mask excludes, a block at a time: later keys, and those further back than the longest
segment. Segments that end inside it are masked, not skipped. Grouped queries share their keys in the kernel.

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
    out = jax.vmap(kernel)(*heads_first, kernels.SegmentIds(segments.queries, segments.keys))
    return jnp.swapaxes(out, 1, 2)


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

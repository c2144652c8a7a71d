"""packed_attention: the single entry point of attention, for every backend and every sharding of the rows.

On a mesh each device works on its own rows and heads (`jax.shard_map`). If positions are sharded along `context`, a
device keeps its queries and gathers the keys and values of their whole rows: with grouped-query attention these are the
smaller part, and the gather's transpose sums their cotangents on the device they came from.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scalerl_jax.model.attention import blocks, cudnn, splash, tiles
from scalerl_jax.model.attention.backend import BLOCKS, Backend
from scalerl_jax.model.sharding import ROWS

# Arguments: q [rows, length, heads, h], k and v [rows, keys, kv_heads, h], query_segments, key_segments; offset: of the
# first query in its row, None if the queries are the whole row
BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "blocks": blocks.attend,
    "splash": splash.attend,
    "cudnn": cudnn.attend_packed,
    "cudnn_mask": cudnn.attend_masked,
    "tiles": tiles.attend,
}


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    max_segment: int | None = None,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
    mesh: Mesh | None = None,
    backend: Backend = BLOCKS,
) -> jax.Array:
    """Causal attention inside the segments of packed rows.

        out_t = sum_s softmax_s(q_t . k_s / sqrt(h)) v_s      over s <= t with the segment of t

    Args:
      q, k, v: [rows, length, heads, h] and, with kv_heads, k and v. heads is a multiple of kv_heads.
      segment_ids: [rows, length] int32. The tokens of a segment are contiguous. To restrict attention further, for
        example to chunks of a segment, give each part a separate id.
      max_segment: bounds the length of every segment; None: the row's.
      mesh: rows are sharded along ROWS, positions along context, heads along tensor. None: a single device.
      backend: as returned by `choose`; its name is one of BACKENDS.

    Returns: like q.
    """
    longest = min(segment_ids.shape[1], max_segment or segment_ids.shape[1])
    attend = BACKENDS[backend.name]
    settings: dict[str, Any] = {"max_segment": longest, "precision": precision, "backend": backend}
    if mesh is None or mesh.size == 1:
        return attend(q, k, v, segment_ids, segment_ids, offset=None, **settings)

    heads, k, v = _cut_heads(q, k, v, mesh)
    rows = P(ROWS, "context", heads, None)
    parts = mesh.shape["context"]

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        if parts == 1:
            return attend(q, k, v, segments, segments, offset=None, **settings)
        k, v, of_row = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v, segments))
        offset = jax.lax.axis_index("context") * segments.shape[1]
        return attend(q, k, v, segments, of_row, offset=offset, **settings)

    # Kernels and collectives inside do not declare over which axes values vary, so that is not checked.
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, rows, rows, P(ROWS, "context")), out_specs=rows, check_vma=False
    )
    return mapped(q, k, v, segment_ids)


def _cut_heads(q: jax.Array, k: jax.Array, v: jax.Array, mesh: Mesh) -> tuple[str | None, jax.Array, jax.Array]:
    """The axis that shards heads, and keys and values with as many heads as that needs."""
    parts, heads, kv_heads = mesh.shape["tensor"], q.shape[2], k.shape[2]
    if heads % parts:
        return None, k, v
    if kv_heads % parts == 0:
        return "tensor", k, v
    if parts % kv_heads == 0:  # several devices share a key head: each has a copy
        return "tensor", *(jax.numpy.repeat(x, parts // kv_heads, axis=2) for x in (k, v))
    return None, k, v

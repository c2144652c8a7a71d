"""packed_attention: the single entry point of attention, for every backend and every sharding of the rows.

On a mesh each device works on its own rows and heads (`jax.shard_map`). If positions are sharded along `context`, a
device keeps its queries and gathers the keys and values of their whole rows: with grouped-query attention these are the
smaller part, and the gather's transpose sums their cotangents on the device they came from.

The backend is chosen once, at the start, by the platform and the shapes:

    TPU     splash, for bfloat16 and rows whose parts are multiples of 128 tokens
    NVIDIA  cudnn, for bfloat16: packed rows on Hopper or later with a known version of jax, else with a mask
    other   blocks, which works everywhere and is never refused
"""

import dataclasses

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scalerl_jax.model.attention import blocks, cudnn, splash, tiles
from scalerl_jax.model.attention.blocks import Segments
from scalerl_jax.model.sharding import ROWS

_MOST_MASK = 2**29  # the largest mask of a row in bfloat16, in bytes, that `auto` accepts: 16k tokens


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend and its parameters, by name so that it can be a static argument; made by `choose`."""

    name: str = "blocks"  # blocks | splash | cudnn | cudnn_mask | tiles
    cpu: bool = False  # blocks, tiles: for a CPU's kernels and caches
    segments: int = 0  # cudnn: the most segments in a row
    chip: str = ""  # splash: device kind, which decides the sizes of its blocks
    interpret: bool = False  # splash: run its kernels step by step in XLA, for tests without a TPU

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, precision: jax.lax.Precision
    ) -> jax.Array:
        """q [rows, length, heads, h], k and v [rows, keys, kv_heads, h] -> like q."""
        match self.name:
            case "splash":
                return splash.attend(q, k, v, segments, chip=self.chip, interpret=self.interpret)
            case "cudnn":
                return cudnn.attend_packed(q, k, v, segments, most=self.segments)
            case "cudnn_mask":
                return cudnn.attend_masked(q, k, v, segments)
            case "tiles":
                return tiles.attend(q, k, v, segments, precision, cpu=self.cpu)
        assert self.name == "blocks", self.name
        return blocks.attend(q, k, v, segments, precision, cpu=self.cpu)


BLOCKS, TILES = Backend(), Backend("tiles")


def plain_on(platform: str, *, bitwise: bool = False) -> Backend:
    """The backend in plain XLA: blocks, or tiles for config.numerics=bitwise."""
    return Backend("tiles" if bitwise else "blocks", cpu=platform == "cpu")


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The requirements for a backend."""

    seq_len: int  # of a row, all its parts together
    head_dim: int
    compute_dtype: str
    context: int = 1  # parts that a row is cut into
    longest: int | None = None  # positions of a segment; None: seq_len
    bitwise: bool = False  # config.numerics


class CannotHere(ValueError):
    """A backend is not available on this device, or for these shapes."""


def choose(wanted: str, device: jax.Device, shapes: Shapes) -> tuple[Backend, str]:
    """The backend for config.model.attention, and a line on it. Raises ValueError if it is not available here."""
    if shapes.bitwise:
        return plain_on(device.platform, bitwise=True), "attention: tiles, in plain XLA (config.numerics=bitwise)"
    if wanted == "blocks":
        return plain_on(device.platform), "attention: blocks, in plain XLA"
    choices = {"splash": _splash, "cudnn": _cudnn}
    own = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}.get(device.platform)
    name = own if wanted == "auto" else wanted
    if name is None:
        return plain_on(device.platform), f"attention: blocks, in plain XLA ({device.platform})"
    try:
        return choices[name](device, shapes, any_size=wanted != "auto")
    except CannotHere as error:
        if wanted != "auto":
            raise ValueError(f"config.model.attention={wanted}: {error}") from error
        return plain_on(device.platform), f"attention: blocks, in plain XLA; not {name}: {error}"


def _splash(device: jax.Device, shapes: Shapes, *, any_size: bool) -> tuple[Backend, str]:
    if device.platform != "tpu":
        raise CannotHere(f"needs a TPU, and this is {device.device_kind} ({device.platform})")
    _only_bfloat16(shapes)
    if shapes.seq_len % (splash.LANES * shapes.context):
        raise CannotHere(
            f"needs rows of a multiple of {splash.LANES * shapes.context} tokens, and they have {shapes.seq_len}"
        )
    part = shapes.seq_len // shapes.context
    sizes = splash.block_sizes(device.device_kind, shapes.head_dim, part, shapes.seq_len)
    note = f"attention: splash on {device.device_kind}, blocks of {sizes[0]} queries and {sizes[1]} keys"
    return Backend("splash", chip=device.device_kind), note


def _cudnn(device: jax.Device, shapes: Shapes, *, any_size: bool) -> tuple[Backend, str]:
    capability = cudnn.capability_of(device)
    most = cudnn.largest_head(capability)
    if not most:
        raise CannotHere(f"needs an NVIDIA GPU from Ampere on, and this is {device.device_kind} ({device.platform})")
    _only_bfloat16(shapes)
    if not cudnn.has_head(capability, shapes.head_dim):
        raise CannotHere(f"needs heads of a multiple of 8 up to {most}, and they are of {shapes.head_dim}")
    lacks = []
    if capability < (9, 0):
        lacks.append("older than Hopper")
    if shapes.context > 1:
        lacks.append(f"config.learner.context={shapes.context}")
    if not cudnn.has_packed_call():
        lacks.append(f"jax {jax.__version__}, whose cuDNN call was not read")
    if not lacks:
        segments = cudnn.most_segments(shapes.seq_len, shapes.longest or shapes.seq_len)
        note = f"attention: cuDNN on {device.device_kind}, packed rows of up to {segments} segments"
        return Backend("cudnn", segments=segments), note
    size = 2 * shapes.seq_len**2 // shapes.context
    if size > _MOST_MASK and not any_size:
        raise CannotHere(f"it would take a mask of {size / 2**30:.1f} GiB a row ({', '.join(lacks)})")
    return Backend("cudnn_mask"), f"attention: cuDNN on {device.device_kind} with a mask ({', '.join(lacks)})"


def _only_bfloat16(shapes: Shapes) -> None:
    if shapes.compute_dtype != "bfloat16":
        raise CannotHere(f"needs config.model.compute_dtype=bfloat16, and it is {shapes.compute_dtype}")


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
      backend: as returned by `choose`.

    Returns: like q.
    """
    longest = min(segment_ids.shape[1], max_segment or segment_ids.shape[1])
    if mesh is None or mesh.size == 1:
        return backend.attend(q, k, v, Segments(segment_ids, segment_ids, None, longest), precision)

    heads, k, v = _cut_heads(q, k, v, mesh)
    rows = P(ROWS, "context", heads, None)
    parts = mesh.shape["context"]

    def local(q: jax.Array, k: jax.Array, v: jax.Array, own: jax.Array) -> jax.Array:
        if parts == 1:
            return backend.attend(q, k, v, Segments(own, own, None, longest), precision)
        k, v, of_row = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v, own))
        offset = jax.lax.axis_index("context") * own.shape[1]
        return backend.attend(q, k, v, Segments(own, of_row, offset, longest), precision)

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

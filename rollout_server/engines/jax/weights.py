"""The weights in the decode loop's layout, made once per version, off the decode path.

    DecodeWeights = {"embed" [V,D], "head" [V,D] (absent when tied), "final_norm" [D],
                     "layers": [{"attention_norm" [D], "query_key_value" [(H+2K)h,D], "output" [D,Hh], ...}, ...]}

Matrices of layers are [out, in], as in the files (see below); routers are [in, out], as the trainer's are.

One array per layer instead of a stack: a slice of a stack would be copied in every decode step. Weights that are fused
into one parameter in vLLM share one product here too: they are concatenated in one array, named by their leaves. Every
value has been rounded to the sync dtype, so that the policy is the trainer's, and is held in the dtype of its use:
matrices in the compute dtype, vectors and routers in float32, embedding and head in the head's.

A version in which little changed is made from the one held: a changed array is copied on the device and the new values
are scattered into the copy; the other arrays are shared. No array is ever written to, so a chunk that was started with
one version continues with it.

Legend: V vocabulary, D width, H query heads, K key/value heads, h head size.

The products of a decode step: few rows, one for each slot, times weights [out, in] as the files hold them.

    y = x W'        x [rows, in], W [out, in]

XLA for CPUs rearranges the right operand of a product in every call, which at few rows costs several times the product
itself. So on CPUs W is the left operand, y' = W x', and only the small rows are rearranged. Without a barrier after it
the compiler would swap the operands back, to save the transposition of the result.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.contract.weight_delta import Change
from scalerl_jax.model import row_blocks
from scalerl_jax.model.attention.cudnn import capability_of
from scalerl_jax.model.decoder import Layer, Params, Precision, RowLayer, param_tree
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.families.dense import WeightRow
from scalerl_jax.model.tensor_layout import Tensor, check_shapes, hf_tensors, layout

DecodeWeights = Mapping[str, Any]
Place = tuple[int | None, str]  # layer (None: not in a layer), name in DecodeWeights

_NOTHING = Change(np.zeros(0, np.int64), np.zeros(0, np.float32))


@dataclasses.dataclass(frozen=True)
class DecodePrecision(Precision):
    """Precision plus the platform that the programs are compiled for, which this process need not have."""

    platform: str = "cpu"  # as of jax.Device
    capability: tuple[int, ...] = (0,)  # the compute capability of an NVIDIA GPU

    @property
    def on_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def keys_last(self) -> bool:
        """Whether positions are the last dimension of cached keys, rather than the second to last as in values."""
        return self.on_cpu or self.bitwise

    @property
    def kept_apart(self) -> bool:
        """Whether the keys and values of a chunk are kept apart from the caches until the chunk ends."""
        return self.platform == "tpu" and not self.bitwise

    @property
    def cache(self) -> str:
        """The dtype that stores keys and values, which are always rounded to the compute dtype.

        On a CPU it is float32: XLA widens a whole bf16 array there to write one element.
        """
        return "float32" if self.on_cpu else self.compute


def decode_precision(precision: Precision, device: jax.Device | str) -> DecodePrecision:
    """The precision to compute with on decode weights, which are already rounded to the sync dtype. device: one, or a
    platform's name."""
    platform, capability = (device, (0,)) if isinstance(device, str) else (device.platform, capability_of(device))
    return DecodePrecision(precision.compute, "float32", precision.head, precision.numerics, platform, capability)


def decode_weights(
    tensors: Mapping[str, Any],
    config: DecoderConfig,
    precision: Precision,
    *,
    held: DecodeWeights | None = None,
    changes: Mapping[str, Change | None] | None = None,
) -> DecodeWeights:
    """Host arrays under their Hugging Face names -> decode weights on the device, sharing no memory with `tensors`.

    held, changes: the decode weights of an earlier version, and the changes since then (`tensors` in sync dtype). A
    tensor not named is unchanged; one with None may differ anywhere. Without both all arrays are rebuilt.

    Raises ValueError naming a tensor that is missing or has another shape.
    """
    check_shapes(config, {name: tensors[name].shape for name in hf_tensors(config) if name in tensors})
    made: dict[str, Any] = {"layers": [{} for _ in range(config.layers)]}
    for (layer, leaf), parts in places(config).items():
        found = [None if changes is None else changes.get(name, _NOTHING) for name, _ in parts]
        if held is None or any(change is None for change in found):
            array = _put(tensors, parts, precision)
        else:
            array = _scattered(_group(held, layer)[leaf], [tensor for _, tensor in parts], found)
        _group(made, layer)[leaf] = array
    return jax.block_until_ready(made)


def _group(weights: Any, layer: int | None) -> Any:
    """The arrays of a layer, or for None those outside the layers."""
    return weights if layer is None else weights["layers"][layer]


def places(config: DecoderConfig) -> dict[Place, list[tuple[str, Tensor]]]:
    """Every array of the decode weights, and the tensors concatenated in it."""
    parts: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in layout(config).items():
        parts.setdefault(tensor.fused, []).append((name, tensor))
    return {(same[0][1].layer, "_".join(tensor.row.leaf for _, tensor in same)): same for same in parts.values()}


def _turned(row: WeightRow) -> bool:
    """Whether the array has the trainer's layout instead of the files'."""
    return row.transposed and not lies_as_in_files(row)


def _side(row: WeightRow) -> int:
    """The axis of the outputs, along which the parts of an array are concatenated."""
    return 0 if lies_as_in_files(row) else row.side


def _dtype(row: WeightRow, precision: Precision) -> np.dtype:
    in_float32 = len(row.dimensions) == 1 or "router" in row.dimensions
    if in_float32 or ("vocabulary" in row.dimensions and precision.head == "highest"):
        return np.dtype("float32")
    return jnp.dtype(precision.compute)


def abstract_weights(config: DecoderConfig, precision: Precision) -> DecodeWeights:
    """Shapes and dtypes of the decode weights, from the config alone."""
    made: dict[str, Any] = {"layers": [{} for _ in range(config.layers)]}
    for (layer, leaf), parts in places(config).items():
        row = parts[0][1].row
        shapes = [tensor.shape[::-1] if _turned(row) else tensor.shape for _, tensor in parts]
        shape, side = list(shapes[0]), _side(row)
        shape[side] = sum(one[side] for one in shapes)
        _group(made, layer)[leaf] = jax.ShapeDtypeStruct(tuple(shape), _dtype(row, precision))
    return made


def _put(tensors: Mapping[str, Any], parts: list[tuple[str, Tensor]], precision: Precision) -> jax.Array:
    """Makes one array from whole tensors."""
    blocks = [np.asarray(tensors[name]).astype(jnp.dtype(precision.sync)) for name, _ in parts]
    row = parts[0][1].row
    joined = np.concatenate([block.T if _turned(row) else block for block in blocks], axis=_side(row))
    # Always a copy: on a CPU, device_put may keep the host's memory, which the next version overwrites.
    return jax.device_put(np.array(joined, _dtype(row, precision), order="C"))


def _scattered(before: jax.Array, parts: list[Tensor], changes: list[Change]) -> jax.Array:
    """A copy of `before` with the changes of its parts; `before` itself without changes."""
    indices, outputs, side = [], 0, _side(parts[0].row)
    for tensor, change in zip(parts, changes):
        index = np.unravel_index(change.positions, tensor.shape)
        index = index[::-1] if _turned(tensor.row) else index
        where = np.stack(index)
        where[side] += outputs
        indices.append(where)
        outputs += tensor.tree_shape[tensor.row.side]
    where = np.concatenate(indices, axis=1)  # [dimensions, changed]
    count = where.shape[1]
    if not count:
        return before
    # Padded to a power of two, so that few programs are compiled; indices outside of the array are dropped.
    padded = max(1024, 1 << (count - 1).bit_length())
    where = np.pad(where, ((0, 0), (0, padded - count)), constant_values=np.iinfo(np.int32).max).astype(np.int32)
    values = np.concatenate([change.values for change in changes]).astype(before.dtype)
    return _scatter(before, where, np.pad(values, (0, padded - count)))


@jax.jit
def _scatter(before: jax.Array, where: jax.Array, values: jax.Array) -> jax.Array:
    return before.at[tuple(where)].set(values, mode="drop")


def model_params(weights: DecodeWeights, config: DecoderConfig) -> Params:
    """The same weights in the layout of scalerl_jax.model. Pure: for use inside jit, where the copy is short-lived."""
    leaves: dict[str, list[jax.Array]] = {}
    for (layer, leaf), parts in places(config).items():
        row = parts[0][1].row
        ends = list(itertools.accumulate(tensor.tree_shape[row.side] for _, tensor in parts))
        for (_, tensor), part in zip(parts, jnp.split(_group(weights, layer)[leaf], ends[:-1], axis=_side(row))):
            leaves.setdefault(tensor.row.leaf, []).append(part.T if lies_as_in_files(row) else part)
    return param_tree(config, lambda row, _: jnp.stack(leaves[row.leaf]) if row.layered else leaves[row.leaf][0])


MOST_ROWS = 64  # with more rows, rearranging the weights costs less than transposing the result
_LEAST_ROWS = 2  # for a single row XLA widens all bfloat16 weights


def lies_as_in_files(row: WeightRow) -> bool:
    """Whether a decode weight is [out, in], unlike the trainer's. Routers keep the trainer's layout."""
    return row.transposed and "router" not in row.dimensions


def product(x: jax.Array, weight: jax.Array, *, on_cpu: bool) -> jax.Array:
    """x [..., in] times weight [out, in] of the same dtype, accumulated and returned in float32: [..., out]."""
    dot = Precision(str(x.dtype)).dot
    count = x.size // x.shape[-1]
    if not on_cpu or count > MOST_ROWS:
        return jax.lax.dot_general(
            x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=dot, preferred_element_type=jnp.float32
        )
    few = x.reshape(count, -1)
    few = jnp.pad(few, ((0, max(0, _LEAST_ROWS - count)), (0, 0)))
    turned = jax.lax.dot_general(
        weight, few, (((1,), (1,)), ((), ())), precision=dot, preferred_element_type=jnp.float32
    )
    return jax.lax.optimization_barrier(turned).T[:count].reshape(*x.shape[:-1], -1)


class DecodeLayer(Layer):
    """A layer on decode weights (weights.py)."""

    _precision: DecodePrecision

    def project(self, x: jax.Array, *leaves: str) -> object:
        on_cpu = self._precision.on_cpu
        return self._each(leaves, lambda weight: product(x, weight, on_cpu=on_cpu).astype(x.dtype))


class DecodeRowLayer(RowLayer):
    """A layer on decode weights, computed in blocks of rows."""

    def project(self, x: jax.Array, *leaves: str) -> object:
        def use(weight: jax.Array) -> jax.Array:
            return row_blocks.product(x, weight, self._precision.dot, lead=self._lead).astype(x.dtype)

        return self._each(leaves, use)

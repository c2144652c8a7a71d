"""The weights as the decode loop wants them, made once per version, off the decode path.

    DecodeWeights = {"embed" [V,D], "head" [V,D] (absent when tied), "final_norm" [D],
                     "layers": [{"attention_norm" [D], "query_key_value" [D,(H+2K)h], "output" [Hh,D], ...}, ...]}

One array per layer and not a stack: a slice of a stack would be copied in every decode step. Weights that are one fused
parameter of vLLM's share one product here too: they stand side by side in one array, named by their leaves. Every value
has been rounded to the sync dtype, so that the policy is the trainer's, and is held in the dtype of its use: matrices
in the compute dtype, norms in float32, embedding and head in the head's.

A version in which little changed is made from the one held: an array in which something changed is copied on the device
and the new values are scattered into the copy; the others are shared. No array is ever written to, so a chunk that was
started with one version goes on with it.

Legend: V vocabulary, D width, H query heads, K key/value heads, h head size.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.contract.weight_delta import Change
from scalerl_jax.model.decoder import Params, Precision, param_tree
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import Tensor, check_shapes, hf_tensors, layout

DecodeWeights = Mapping[str, Any]
Place = tuple[int | None, str]  # layer (None: of none), name in DecodeWeights

_NOTHING = Change(np.zeros(0, np.int64), np.zeros(0, np.float32))


def decode_precision(precision: Precision) -> Precision:
    """The precision to compute with on decode weights: they are rounded already, once is enough."""
    return Precision(compute=precision.compute, sync="float32", head=precision.head)


def decode_weights(
    tensors: Mapping[str, Any],
    config: DecoderConfig,
    precision: Precision,
    *,
    held: DecodeWeights | None = None,
    changes: Mapping[str, Change | None] | None = None,
) -> DecodeWeights:
    """Host arrays under their Hugging Face names -> decode weights on the device, sharing no memory with `tensors`.

    held, changes: the decode weights of another version, and what changed since in `tensors` (in sync dtype): one that
    is not named is as it was; None: it may differ anywhere. Without them all are made anew.

    Raises ValueError naming a tensor that is missing or of another shape.
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
    """The arrays of a layer, or of none."""
    return weights if layer is None else weights["layers"][layer]


def places(config: DecoderConfig) -> dict[Place, list[tuple[str, Tensor]]]:
    """Every array of the decode weights, and the tensors that stand side by side in it."""
    parts: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in layout(config).items():
        parts.setdefault(tensor.fused, []).append((name, tensor))
    return {(same[0][1].layer, "_".join(tensor.row.leaf for _, tensor in same)): same for same in parts.values()}


def _put(tensors: Mapping[str, Any], parts: list[tuple[str, Tensor]], precision: Precision) -> jax.Array:
    """One array, from whole tensors."""
    blocks = [np.asarray(tensors[name]).astype(jnp.dtype(precision.sync)) for name, _ in parts]
    joined = [block.T if tensor.row.transposed else block for block, (_, tensor) in zip(blocks, parts)]
    row, dtype = parts[0][1].row, precision.compute
    if row.initial == "ones" or ("vocabulary" in row.dimensions and precision.head == "highest"):
        dtype = "float32"
    # A copy in any case: on a CPU, device_put may keep the host's memory, which the next version overwrites.
    return jax.device_put(np.array(np.concatenate(joined, axis=-1), jnp.dtype(dtype), order="C"))


def _scattered(before: jax.Array, parts: list[Tensor], changes: list[Change]) -> jax.Array:
    """A copy of `before` with the changes of its parts; itself where there are none."""
    indices, columns = [], 0
    for tensor, change in zip(parts, changes):
        index = np.unravel_index(change.positions, tensor.shape)
        index = index[::-1] if tensor.row.transposed else index
        indices.append(np.stack([*index[:-1], index[-1] + columns]))
        columns += tensor.tree_shape[-1]
    where = np.concatenate(indices, axis=1)  # [dimensions, changed]
    count = where.shape[1]
    if not count:
        return before
    # Padded to a power of two, so that few programs are compiled; places outside of the array are dropped.
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
        ends = list(itertools.accumulate(tensor.tree_shape[-1] for _, tensor in parts))
        for (_, tensor), part in zip(parts, jnp.split(_group(weights, layer)[leaf], ends[:-1], axis=-1)):
            leaves.setdefault(tensor.row.leaf, []).append(part)
    return param_tree(config, lambda row, _: jnp.stack(leaves[row.leaf]) if row.layered else leaves[row.leaf][0])

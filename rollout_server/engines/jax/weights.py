"""The weights as the decode loop wants them, made once per version, off the decode path.

    DecodeWeights = {"embed" [V,D], "head" [V,D] (absent when tied), "final_norm" [D],
                     "layers": [{"attention_norm" [D], "qkv" [D,(H+2K)h], "query_norm" [h], "key_norm" [h] (as the model
                                 has them), "output" [Hh,D], "mlp_norm" [D], "gate_up" [D,2F], "down" [F,D]}, ...]}

One array per layer and not a stack: a slice of a stack would be copied in every decode step. q, k and v share one
product, gate and up another. Every value has been rounded to the sync dtype, so that the policy is the trainer's, and
is held in the dtype of its use: matrices in the compute dtype, norms in float32, embedding and head in the head's.

A version in which little changed is made from the one held: an array in which something changed is copied on the device
and the new values are scattered into the copy; the others are shared. No array is ever written to, so a chunk that was
started with one version goes on with it.

Legend: V vocabulary, D width, H query heads, K key/value heads, h head size, F MLP width.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.contract.decoder_config import DecoderConfig
from scalerl_jax.contract.tensor_layout import Tensor, hf_tensors, layout
from scalerl_jax.contract.weight_delta import Change
from scalerl_jax.model import Precision
from scalerl_jax.model.decoder import Params

DecodeWeights = Mapping[str, Any]
Place = tuple[int | None, str]  # layer (None: of none), name in DecodeWeights

# Leaves of the parameter tree that share an array, in the order of the table.
_JOINED = {"query": "qkv", "key": "qkv", "value": "qkv", "gate": "gate_up", "up": "gate_up"}
_NOTHING = Change(np.zeros(0, np.int64), np.zeros(0, np.float32))


def decode_precision(precision: Precision) -> Precision:
    """The precision to compute with on decode weights: they are rounded already, once is enough."""
    return Precision(compute=precision.compute, sync="float32", head=precision.head)


def decode_weights(tensors: Mapping[str, Any], config: DecoderConfig, precision: Precision) -> DecodeWeights:
    """Host arrays under their Hugging Face names -> decode weights on the device, sharing no memory with `tensors`.

    Raises ValueError naming a tensor that is missing or of another shape.
    """
    _check(tensors, config)
    arrays = {place: _put(tensors, parts, place, precision) for place, parts in _places(config).items()}
    return jax.block_until_ready(_tree(arrays, config))


def changed_weights(
    held: DecodeWeights,
    tensors: Mapping[str, Any],
    changes: Mapping[str, Change | None],
    *,
    config: DecoderConfig,
    precision: Precision,
) -> DecodeWeights:
    """The decode weights of `tensors` (host arrays in sync dtype), made from those held by what changed in them.

    A tensor that `changes` does not name is as it was; None: it may differ anywhere. Raises as decode_weights does.
    """
    _check(tensors, config)
    arrays = {}
    for place, parts in _places(config).items():
        layer, leaf = place
        before = held[leaf] if layer is None else held["layers"][layer][leaf]
        found = [changes.get(name, _NOTHING) for name, _ in parts]
        if any(change is None for change in found):
            arrays[place] = _put(tensors, parts, place, precision)
        else:
            arrays[place] = _scattered(before, [tensor for _, tensor in parts], found)
    return jax.block_until_ready(_tree(arrays, config))


def _check(tensors: Mapping[str, Any], config: DecoderConfig) -> None:
    for name, shape in hf_tensors(config).items():
        if name not in tensors:
            raise ValueError(f"tensor {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"tensor {name} has shape {tuple(tensors[name].shape)}, not {shape}")


def _places(config: DecoderConfig) -> dict[Place, list[tuple[str, Tensor]]]:
    """Every array of the decode weights, and the tensors that stand side by side in it."""
    places: dict[Place, list[tuple[str, Tensor]]] = {}
    for name, tensor in layout(config).items():
        layer = int(name.split(".")[2]) if tensor.row.layered else None  # model.layers.N.
        places.setdefault((layer, _JOINED.get(tensor.row.leaf, tensor.row.leaf)), []).append((name, tensor))
    return places


def _tree(arrays: Mapping[Place, jax.Array], config: DecoderConfig) -> DecodeWeights:
    layers: list[dict[str, jax.Array]] = [{} for _ in range(config.layers)]
    weights: dict[str, Any] = {"layers": layers}
    for (layer, leaf), array in arrays.items():
        (weights if layer is None else layers[layer])[leaf] = array
    return weights


def _put(tensors: Mapping[str, Any], parts: list[tuple[str, Tensor]], place: Place, precision: Precision) -> jax.Array:
    """One array, from whole tensors."""
    blocks = [np.asarray(tensors[name]).astype(jnp.dtype(precision.sync)) for name, _ in parts]
    joined = [block.T if tensor.row.transposed else block for block, (_, tensor) in zip(blocks, parts)]
    dtype = precision.compute
    if place[1].endswith("_norm") or (place[1] in ("embed", "head") and precision.head == "highest"):
        dtype = "float32"
    # A copy in any case: on a CPU, device_put may keep the host's memory, which the next version overwrites.
    return jax.device_put(np.array(np.concatenate(joined, axis=-1), jnp.dtype(dtype), order="C"))


def _scattered(before: jax.Array, parts: list[Tensor], changes: list[Change]) -> jax.Array:
    """A copy of `before` with the changes of its parts; itself where there are none."""
    places, columns = [], 0
    for tensor, change in zip(parts, changes):
        index = np.unravel_index(change.positions, tensor.shape)
        index = index[::-1] if tensor.row.transposed else index
        places.append(np.stack([*index[:-1], index[-1] + columns]))
        columns += tensor.shape[0]
    where = np.concatenate(places, axis=1)  # [dimensions, changed]
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
    c = config
    query, key = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def one(layer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        q, k, v = jnp.split(layer["qkv"], [query, query + key], axis=1)
        gate, up = jnp.split(layer["gate_up"], 2, axis=1)
        rest = {name: value for name, value in layer.items() if name not in ("qkv", "gate_up")}
        return {**rest, "query": q, "key": k, "value": v, "gate": gate, "up": up}

    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[one(layer) for layer in weights["layers"]])
    return {**{name: value for name, value in weights.items() if name != "layers"}, "layers": layers}

"""The policy under its Hugging Face names: one table, both directions, and folders of safetensors.

A name in `_TABLE` maps to a leaf of the parameter tree; matrices are [out, in] in the files and [in, out] here.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from scalerl_jax.model.config import DecoderConfig
from scalerl_jax.model.decoder import Params, abstract_params, weight_table

# leaf of the tree -> (name in the files, transposed)
_LAYER_TABLE = {
    "attention_norm": ("input_layernorm.weight", False),
    "query": ("self_attn.q_proj.weight", True),
    "key": ("self_attn.k_proj.weight", True),
    "value": ("self_attn.v_proj.weight", True),
    "output": ("self_attn.o_proj.weight", True),
    "query_norm": ("self_attn.q_norm.weight", False),
    "key_norm": ("self_attn.k_norm.weight", False),
    "mlp_norm": ("post_attention_layernorm.weight", False),
    "gate": ("mlp.gate_proj.weight", True),
    "up": ("mlp.up_proj.weight", True),
    "down": ("mlp.down_proj.weight", True),
}
_TABLE = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}


def _layer_name(layer: int, leaf: str) -> str:
    return f"model.layers.{layer}.{_LAYER_TABLE[leaf][0]}"


def hf_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor, in the order they are sent and stored."""
    table = weight_table(config)
    out: dict[str, tuple[int, ...]] = {_TABLE["embed"]: table["embed"].shape}
    for layer in range(config.layers):
        for leaf, (_, transposed) in _LAYER_TABLE.items():
            if leaf in table["layers"]:
                shape = table["layers"][leaf].shape[1:]
                out[_layer_name(layer, leaf)] = shape[::-1] if transposed else shape
    for leaf in ("final_norm", "head"):
        if leaf in table:
            out[_TABLE[leaf]] = table[leaf].shape
    return out


def to_hf(params: Params, config: DecoderConfig, dtype: Any) -> dict[str, jax.Array]:
    """The parameters under their names in `dtype`, in the order of hf_tensors. Pure: it may run inside jit."""
    out = {_TABLE["embed"]: params["embed"].astype(dtype)}
    for layer in range(config.layers):
        for leaf, (_, transposed) in _LAYER_TABLE.items():
            if leaf in params["layers"]:
                weight = params["layers"][leaf][layer].astype(dtype)
                out[_layer_name(layer, leaf)] = weight.T if transposed else weight
    for leaf in ("final_norm", "head"):
        if leaf in params:
            out[_TABLE[leaf]] = params[leaf].astype(dtype)
    return out


def from_hf(tensors: Mapping[str, Any], config: DecoderConfig, dtype: Any = np.float32) -> dict[str, Any]:
    """Host arrays under their names -> the parameter tree, as host arrays. Raises ValueError naming a tensor."""
    expected = hf_tensors(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise ValueError(f"tensor {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"tensor {name} has shape {tuple(tensors[name].shape)}, not {shape}")

    def leaf(name: str, transposed: bool) -> np.ndarray:
        value = np.asarray(tensors[name])
        return (value.T if transposed else value).astype(dtype)

    table = weight_table(config)
    layers = {
        key: np.stack([leaf(_layer_name(i, key), _LAYER_TABLE[key][1]) for i in range(config.layers)])
        for key in table["layers"]
    }
    rest = {key: leaf(_TABLE[key], False) for key in table if key != "layers"}
    return {**rest, "layers": layers}


def read_config(path: str) -> DecoderConfig:
    """The decoder config of a model folder. Raises ValueError naming the file."""
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        raise ValueError(f"{path}: no config.json there, so it is not a Hugging Face model folder")
    try:
        with open(file) as opened:
            return DecoderConfig.from_hf(json.load(opened))
    except (json.JSONDecodeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


class Tensors(Mapping[str, Any]):
    """The safetensors of a folder, opened lazily: `tensors[name]` reads one of them."""

    def __init__(self, path: str):
        files = sorted(f for f in os.listdir(path) if f.endswith(".safetensors")) if os.path.isdir(path) else []
        if not files:
            raise ValueError(f"{path}: no weights there (*.safetensors)")
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                opened = safe_open(os.path.join(path, file), "np")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{os.path.join(path, file)}: {error}") from error
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                self._where[name] = opened

    def __getitem__(self, name: str) -> np.ndarray:
        return self._where[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Any:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def read(self, name: str, index: Any) -> np.ndarray:
        """Part of a tensor, without reading the rest."""
        return self._where[name].get_slice(name)[index]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())


def load_hf(path: str, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> tuple[DecoderConfig, Params]:
    """A Hugging Face folder as (config, parameters in `dtype`); on a mesh each device reads only its own part.

    Raises ValueError naming the folder, file or tensor that is missing, unsupported or of another shape.
    """
    config = read_config(path)
    tensors = Tensors(path)
    for name, shape in hf_tensors(config).items():
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name} is missing")
        if tensors.shape(name) != shape:
            raise ValueError(f"{path}: tensor {name} has shape {tensors.shape(name)}, not {shape}")

    def part(name: str, transposed: bool, index: tuple[slice, ...]) -> np.ndarray:
        value = tensors.read(name, index[::-1] if transposed else index)
        return np.asarray(value.T if transposed else value).astype(dtype)

    def make(leaf: str, struct: jax.ShapeDtypeStruct, stacked: bool) -> jax.Array:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            if not stacked:
                return part(_TABLE[leaf], False, index)
            layers = range(config.layers)[index[0]]
            return np.stack([part(_layer_name(i, leaf), _LAYER_TABLE[leaf][1], index[1:]) for i in layers])

        if struct.sharding is None:
            return jnp.asarray(read((slice(None),) * len(struct.shape)))
        return jax.make_array_from_callback(struct.shape, struct.sharding, read)

    abstract = abstract_params(config, mesh, dtype)
    params = {k: make(k, s, False) for k, s in abstract.items() if k != "layers"}
    return config, {**params, "layers": {k: make(k, s, True) for k, s in abstract["layers"].items()}}

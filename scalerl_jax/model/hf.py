"""The policy under its Hugging Face names, both directions, and folders of safetensors.

Names and shapes are those of scalerl_jax/contract/tensor_layout.py, on which the generators stand too. Matrices of
layers are [out, in] in the files and [in, out], stacked over layers, here.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from scalerl_jax.contract.decoder_config import DecoderConfig, read_config
from scalerl_jax.contract.tensor_layout import LAYER_ROWS, OTHER_ROWS, hf_tensors, layer_name, layout
from scalerl_jax.model.decoder import Params, abstract_params, weight_table


def to_hf(params: Params, config: DecoderConfig, dtype: Any) -> dict[str, jax.Array]:
    """The parameters under their names in `dtype`, in the order of hf_tensors. Pure: it may run inside jit."""
    leaves: dict[str, jax.Array] = {}
    for leaf, row in OTHER_ROWS.items():
        if leaf in params:
            leaves[row.name] = params[leaf].astype(dtype)
    for leaf, stacked in params["layers"].items():
        row = LAYER_ROWS[leaf]
        for layer in range(config.layers):
            weight = stacked[layer].astype(dtype)
            leaves[layer_name(layer, row.name)] = weight.T if row.transposed else weight
    return {name: leaves[name] for name in layout(config)}


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
        key: np.stack([leaf(layer_name(i, row.name), row.transposed) for i in range(config.layers)])
        for key, row in LAYER_ROWS.items()
        if key in table["layers"]
    }
    rest = {key: leaf(row.name, False) for key, row in OTHER_ROWS.items() if key in table}
    return {**rest, "layers": layers}


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
                return part(OTHER_ROWS[leaf].name, False, index)
            row, layers = LAYER_ROWS[leaf], range(config.layers)[index[0]]
            return np.stack([part(layer_name(i, row.name), row.transposed, index[1:]) for i in layers])

        if struct.sharding is None:
            return jnp.asarray(read((slice(None),) * len(struct.shape)))
        return jax.make_array_from_callback(struct.shape, struct.sharding, read)

    abstract = abstract_params(config, mesh, dtype)
    params = {k: make(k, s, False) for k, s in abstract.items() if k != "layers"}
    return config, {**params, "layers": {k: make(k, s, True) for k, s in abstract["layers"].items()}}

"""The policy under its Hugging Face names, both directions, and folders of safetensors.

Names and shapes are those of tensor_layout.py, on which the generators stand too. Matrices of layers are [out, in] in
the files and [in, out], stacked over layers, here.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open

from scalerl_jax.model.decoder import Params, param_tree
from scalerl_jax.model.decoder_config import DecoderConfig, read_config
from scalerl_jax.model.families.rows import WeightRow
from scalerl_jax.model.sharding import spec
from scalerl_jax.model.tensor_layout import check_shapes, layout


def flat(params: Params) -> dict[str, Any]:
    """Leaf -> array, of layers and outside of them."""
    return {**{leaf: value for leaf, value in params.items() if leaf != "layers"}, **params["layers"]}


def to_hf(params: Params, config: DecoderConfig, dtype: Any) -> dict[str, jax.Array]:
    """The parameters under their names in `dtype`, in the order of hf_tensors. Pure: it may run inside jit."""
    leaves, out = flat(params), {}
    for name, tensor in layout(config).items():
        weight = leaves[tensor.row.leaf]
        weight = (weight if tensor.layer is None else weight[tensor.layer]).astype(dtype)
        out[name] = weight.T if tensor.row.transposed else weight
    return out


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
    config, tensors = read_config(path), Tensors(path)
    check_shapes(config, {name: tensors.shape(name) for name in tensors}, f"{path}: ")
    names: dict[str, list[str]] = {}
    for name, tensor in layout(config).items():
        names.setdefault(tensor.row.leaf, []).append(name)

    def make(row: WeightRow, shape: tuple[int, ...]) -> jax.Array:
        def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
            value = tensors.read(name, index[::-1] if row.transposed else index)
            return np.asarray(value.T if row.transposed else value).astype(dtype)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            if not row.layered:
                return part(names[row.leaf][0], index)
            return np.stack([part(name, index[1:]) for name in names[row.leaf][index[0]]])

        if mesh is None:
            return jnp.asarray(read((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec(shape, row.tree_dimensions, mesh)), read)

    return config, param_tree(config, make)

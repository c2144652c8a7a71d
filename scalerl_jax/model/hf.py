"""The policy under its Hugging Face names, both directions, and folders of safetensors.

Names and shapes are those of tensor_layout.py, which the generators use too. Matrices of layers are [out, in] in
the files and [in, out], stacked over layers, here.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from scalerl_jax.model.decoder import Params, param_tree
from scalerl_jax.model.decoder_config import DecoderConfig, read_config
from scalerl_jax.model.families.dense import WeightRow
from scalerl_jax.model.lora import merged
from scalerl_jax.model.safetensors_folder import Tensors
from scalerl_jax.model.sharding import spec
from scalerl_jax.model.tensor_layout import check_shapes, layout

_BLOCK_BYTES = 16 * 2**20  # of float32


def flat(params: Params) -> dict[str, Any]:
    """Leaf -> array, both in layers and outside of them."""
    return {**{leaf: value for leaf, value in params.items() if leaf != "layers"}, **params["layers"]}


def to_hf(params: Params, config: DecoderConfig, dtype: Any) -> dict[str, jax.Array]:
    """The parameters under their names in `dtype`, in the order of hf_tensors. Pure: it may run inside jit."""
    leaves, out = flat(params), {}
    for name, tensor in layout(config).items():
        weight = leaves[tensor.row.leaf]
        weight = merged(weight if tensor.layer is None else weight[tensor.layer]).astype(dtype)
        out[name] = weight.T if tensor.row.transposed else weight
    return out


def load_hf(path: str, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> tuple[DecoderConfig, Params]:
    """A Hugging Face folder as (config, parameters in `dtype`); on a mesh each device reads only its own part.

    Besides the parameters it needs host memory for a few blocks of a tensor. Raises ValueError naming the folder, file
    or tensor that is missing, unsupported, not finite, of another shape, or not of this model.
    """
    config = read_config(path)
    tensors = Tensors(path, config)
    check_shapes(config, {name: tensors.shape(name) for name in tensors}, f"{path}: ")
    names: dict[str, list[str]] = {}
    for name, tensor in layout(config).items():
        names.setdefault(tensor.row.leaf, []).append(name)

    def make(row: WeightRow, shape: tuple[int, ...]) -> jax.Array:
        own = names[row.leaf]
        if mesh is None:
            return _load(tensors, own, row, [range(size) for size in shape], [None], dtype)[0]
        sharding = NamedSharding(mesh, spec(shape, row.tree_dimensions, mesh))
        devices: dict[tuple[range, ...], list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            parts = tuple(range(*part.indices(size)) for part, size in zip(index or (), shape, strict=True))
            devices.setdefault(parts, []).append(device)
        held = [array for parts, same in devices.items() for array in _load(tensors, own, row, parts, same, dtype)]
        return jax.make_array_from_single_device_arrays(shape, sharding, held)

    return config, param_tree(config, make)


def _load(
    tensors: Tensors, names: Sequence[str], row: WeightRow, parts: Sequence[range], devices: Sequence[Any], dtype: Any
) -> list[jax.Array]:
    """One shard of a leaf, on each of these devices (None: the default).

    It is filled block by block on the device, where each block is also transposed and converted: the host never holds
    more than a block. A shard no larger than a block is made on the host: that compiles nothing.
    """
    shape = [len(part) for part in parts]
    blocks = _blocks(tensors, names[parts[0].start : parts[0].stop] if row.layered else names, row, parts)
    if math.prod(shape) * np.dtype(np.float32).itemsize <= _BLOCK_BYTES:
        whole = np.empty(shape, dtype)
        for corner, block in blocks:
            block = block.T if row.transposed else block
            sizes = (1,) * (len(shape) - block.ndim) + block.shape
            whole[tuple(slice(start, start + size) for start, size in zip(corner, sizes))] = block
        return [jax.device_put(whole, device) for device in devices]
    held = [jnp.zeros(shape, dtype, device=device) for device in devices]
    for corner, block in blocks:
        held = [
            _put(filled, jax.device_put(block, device), corner, row.transposed) for filled, device in zip(held, devices)
        ]
        jax.block_until_ready(held)  # at most one block in transfer
    return held


def _blocks(
    tensors: Tensors, names: Sequence[str], row: WeightRow, parts: Sequence[range]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(position of the block in the shard of the tree, block as in the files), for one tensor after the other."""
    own = parts[1:] if row.layered else parts
    first, *others = own[::-1] if row.transposed else own
    bytes_each = math.prod(len(part) for part in others) * np.dtype(np.float32).itemsize
    step = max(1, _BLOCK_BYTES // max(1, bytes_each))
    for place, name in enumerate(names):
        for start in range(first.start, first.stop, step):
            rows = slice(start, min(start + step, first.stop))
            block = tensors.read(name, [rows, *(slice(part.start, part.stop) for part in others)])
            corner = [start - first.start, *[0] * len(others)]
            corner = corner[::-1] if row.transposed else corner
            yield np.array([place, *corner] if row.layered else corner, np.int32), block


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(whole: jax.Array, block: jax.Array, corner: jax.Array, transposed: bool) -> jax.Array:
    block = (block.T if transposed else block).astype(whole.dtype)
    block = jnp.expand_dims(block, range(whole.ndim - block.ndim))
    return jax.lax.dynamic_update_slice(whole, block, tuple(corner))

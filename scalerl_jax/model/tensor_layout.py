"""The tensors of the policy, from its family's rows: names, shapes, order, and the place of each in vLLM.

    layout     config -> {Hugging Face name: Tensor}, in the order in which weights are sent and stored
    pieces     (config, rank, workers) -> where one worker of vLLM holds which part of each tensor

Of W workers, worker r holds of each tensor the part r n/W to (r+1) n/W along its dimension in CUT, and all of a tensor
without one. With fewer key/value heads K than workers, W/K workers in a row hold the same head; the vocabulary is first
rounded up to a multiple of 64, and no tensor fills the padding. Along the same dimension the parts of a fused parameter
follow one another: q, k and v make qkv_proj, gate and up make gate_up_proj.

Nothing here depends on torch, jax or vLLM. A tensor may have any number of dimensions: experts [E, out, in] are one
row, one tensor on the wire and in vLLM; published folders hold each expert separately (`stored`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.families import FAMILIES
from scalerl_jax.model.families.dense import WeightRow

# vLLM rounds the vocabulary up to this before it is split.
VOCABULARY_PADDING = 64
# Split among vLLM's workers; a tensor has at most one of these.
CUT = ("vocabulary", "heads", "kv_heads", "mlp", "expert_mlp")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor under its Hugging Face name."""

    row: WeightRow
    layer: int | None  # None: outside of layers
    shape: tuple[int, ...]
    fused: str  # full name of the parameter that holds it

    @property
    def tree_shape(self) -> tuple[int, ...]:
        """The shape of one layer in the trainer's tree."""
        return self.shape[::-1] if self.row.transposed else self.shape


def rows(config: DecoderConfig) -> dict[str, WeightRow]:
    """Leaf -> its row, for the family's rows that this model has."""
    own = FAMILIES[config.family].ROWS
    return {row.leaf: row for row in own if not (config.tied_embeddings and row.leaf == "head")}


def sizes(config: DecoderConfig) -> dict[str, int]:
    """The size of every dimension that a row may name."""
    return {
        "layers": config.layers,
        "vocabulary": config.vocab_size,
        "width": config.hidden_size,
        "scale": config.hidden_size,
        "heads": config.heads * config.head_dim,
        "kv_heads": config.kv_heads * config.head_dim,
        "head": config.head_dim,
        "mlp": config.intermediate_size,
        "experts": config.experts,
        "router": config.experts,
        "expert_mlp": config.moe_intermediate_size,
    }


@functools.cache
def layout(config: DecoderConfig) -> Mapping[str, Tensor]:
    """Every tensor of a model by its Hugging Face name, in the order they are sent and stored."""
    size, own = sizes(config), list(rows(config).values())
    layered = [i for i, row in enumerate(own) if row.layered]
    before, after = own[: layered[0]], own[layered[-1] + 1 :]
    in_order: list[tuple[WeightRow, int | None]] = [(row, None) for row in before]
    in_order += [(own[i], layer) for layer in range(config.layers) for i in layered]
    in_order += [(row, None) for row in after]
    out = {}
    for row, layer in in_order:
        prefix = "" if layer is None else f"model.layers.{layer}."
        shape = tuple(size[dimension] for dimension in row.dimensions)
        out[prefix + row.name] = Tensor(row, layer, shape, prefix + (row.fused or row.name))
    return out


def stored(config: DecoderConfig) -> dict[str, list[str]]:
    """Hugging Face name -> its tensors in the files: itself, each expert's in order, or one that also holds others."""
    out = {}
    for name, tensor in layout(config).items():
        row, prefix = tensor.row, name.removesuffix(tensor.row.name)
        each = [prefix + row.stored.format(number) for number in range(1 if row.columns else config.experts)]
        out[name] = each if row.stored else [name]
    return out


def hf_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor, in the order they are sent and stored."""
    return {name: tensor.shape for name, tensor in layout(config).items()}


def check_shapes(config: DecoderConfig, shapes: Mapping[str, Sequence[int]], of: str = "") -> None:
    """Raises ValueError naming the first tensor (after `of`) that is missing or has another shape."""
    for name, shape in hf_tensors(config).items():
        if name not in shapes:
            raise ValueError(f"{of}tensor {name} is missing")
        if tuple(shapes[name]) != shape:
            raise ValueError(f"{of}tensor {name} has shape {tuple(shapes[name])}, not {shape}")


@dataclasses.dataclass(frozen=True)
class TensorPiece:
    """The part of one tensor that one worker holds: tensor[source] is parameter[target], both with a slice per
    dimension."""

    parameter: str  # full name
    shape: tuple[int, ...]  # the tensor's
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    size: tuple[int, ...]  # extent of all tensors in the parameter; vLLM's may have more rows, which pad the vocabulary

    def scatter(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Flat positions in the tensor -> (which of them this worker holds [n] bool, their positions in the parameter).

        Args:
          positions: [n] int64, row-major.

        Returns positions [held] int64 in the worker's whole parameter, row-major, in the order of those held.
        """
        index = np.unravel_index(positions, self.shape)
        held = np.ones(len(positions), bool)
        for places, part in zip(index, self.source):
            held &= (places >= part.start) & (places < part.stop)
        shifts = [target.start - part.start for part, target in zip(self.source, self.target)]
        return held, np.ravel_multi_index([places[held] + shift for places, shift in zip(index, shifts)], self.size)


def pieces(config: DecoderConfig, rank: int = 0, workers: int = 1) -> dict[str, TensorPiece]:
    """Hugging Face name -> the part that worker `rank` of `workers` holds; a tensor it holds nothing of has no rows.

    Raises ValueError naming what cannot be split over so many workers.
    """
    check_workers(config, workers)
    parts, filled = {}, dict[str, int]()  # parameter -> extent of its parts so far along the split dimension
    for name, tensor in layout(config).items():
        cut = next((i for i, dimension in enumerate(tensor.row.dimensions) if dimension in CUT), None)
        source = [slice(0, size) for size in tensor.shape]
        if cut is not None:
            source[cut] = _share(config, tensor.row.dimensions[cut], tensor.shape[cut], rank, workers)
        along, start = cut or 0, filled.get(tensor.fused, 0)
        target = [slice(0, part.stop - part.start) for part in source]
        filled[tensor.fused] = start + target[along].stop
        target[along] = slice(start, filled[tensor.fused])
        parts[name] = tensor, along, tuple(source), tuple(target)
    out = {}
    for name, (tensor, along, source, target) in parts.items():
        size = tuple(filled[tensor.fused] if i == along else part.stop for i, part in enumerate(target))
        out[name] = TensorPiece(tensor.fused, tensor.shape, source, target, size)
    return out


def check_workers(config: DecoderConfig, workers: int) -> None:
    """Raises ValueError if a model cannot be split over so many workers."""
    if workers < 1:
        raise ValueError(f"{workers} workers: at least one is needed")
    size = sizes(config)
    cut = {dimension for row in rows(config).values() for dimension in row.dimensions}
    counted = {"query heads": config.heads}
    for what, dimension in (("MLP columns", "mlp"), ("columns of each expert", "expert_mlp")):
        if dimension in cut:
            counted[what] = size[dimension]
    for what, count in counted.items():
        if count % workers:
            raise ValueError(f"{count} {what} cannot be split evenly over {workers} workers")
    if config.kv_heads % workers and workers % config.kv_heads:
        raise ValueError(f"{config.kv_heads} key/value heads cannot be split or copied evenly over {workers} workers")


def _share(config: DecoderConfig, dimension: str, size: int, rank: int, workers: int) -> slice:
    """The part of a dimension that a worker holds."""
    if dimension == "vocabulary":
        each = -(-size // VOCABULARY_PADDING) * VOCABULARY_PADDING // workers
        return slice(min(size, rank * each), min(size, (rank + 1) * each))
    if dimension == "kv_heads" and workers > config.kv_heads:
        rank, workers = rank // (workers // config.kv_heads), config.kv_heads
    each = size // workers
    return slice(rank * each, (rank + 1) * each)

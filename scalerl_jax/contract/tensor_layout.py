"""The tensors of the policy, once: names, shapes, order, and where each lies in a generator that fuses and splits them.

    TABLE      one row a tensor: the leaf of the trainer's parameter tree, its Hugging Face name, its shape in symbols,
               the fused parameter that holds it in vLLM, and along which dimension tensor-parallel workers cut it
    layout     config -> {Hugging Face name: Tensor}, in the order in which weights are sent and stored
    pieces     (config, rank, workers) -> where one worker holds what of each tensor

A fused parameter is its parts' rows one after another: q, k and v make qkv_proj, gate and up make gate_up_proj. Of W
workers, worker r holds

    rows 0           rows r n/W to (r+1) n/W of an [n, m] matrix (column-parallel: each makes some of the outputs)
    columns 1        the same of its columns (row-parallel: each takes some of the inputs)
    heads            as rows; with fewer key/value heads K than workers, W/K workers in a row hold the same head
    vocabulary       as rows, of the vocabulary rounded up to a multiple of 64; what lies beyond it is nobody's
    whole            everything

Nothing here knows torch, jax or vLLM. Left out on purpose: experts. A row for them gets one dimension more in `shape`
(the expert) and a `cut` of its own; nothing else asks for two dimensions.

Legend: V vocabulary, D width, Q = H h query rows (H heads of size h), K = key/value rows, h head size, F MLP width.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from scalerl_jax.contract.decoder_config import DecoderConfig

# vLLM rounds the vocabulary up to this before it is split.
VOCABULARY_PADDING = 64


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table; `name` and `fused` are within a layer where `layered`."""

    leaf: str  # of scalerl_jax's parameter tree
    name: str  # Hugging Face's
    shape: str  # one symbol a dimension
    cut: str = "whole"  # whole | rows | columns | heads | vocabulary
    fused: str = ""  # the parameter that holds it; empty: one of its own, of the same name
    layered: bool = True

    @property
    def transposed(self) -> bool:
        """Matrices of layers are [out, in] in the files and [in, out] in the trainer's tree."""
        return self.layered and len(self.shape) == 2


_QKV, _GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"

# Parts of one fused parameter stand in their order in it.
TABLE = (
    Row("embed", "model.embed_tokens.weight", "VD", "vocabulary", layered=False),
    Row("attention_norm", "input_layernorm.weight", "D"),
    Row("query", "self_attn.q_proj.weight", "QD", "rows", _QKV),
    Row("key", "self_attn.k_proj.weight", "KD", "heads", _QKV),
    Row("value", "self_attn.v_proj.weight", "KD", "heads", _QKV),
    Row("output", "self_attn.o_proj.weight", "DQ", "columns"),
    Row("query_norm", "self_attn.q_norm.weight", "h"),
    Row("key_norm", "self_attn.k_norm.weight", "h"),
    Row("mlp_norm", "post_attention_layernorm.weight", "D"),
    Row("gate", "mlp.gate_proj.weight", "FD", "rows", _GATE_UP),
    Row("up", "mlp.up_proj.weight", "FD", "rows", _GATE_UP),
    Row("down", "mlp.down_proj.weight", "DF", "columns"),
    Row("final_norm", "model.norm.weight", "D", layered=False),
    Row("head", "lm_head.weight", "VD", "vocabulary", layered=False),
)
LAYER_ROWS = {row.leaf: row for row in TABLE if row.layered}
OTHER_ROWS = {row.leaf: row for row in TABLE if not row.layered}


def layer_name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor under its Hugging Face name."""

    row: Row
    shape: tuple[int, ...]
    fused: str  # full name of the parameter that holds it


def layout(config: DecoderConfig) -> dict[str, Tensor]:
    """Every tensor of a model by its Hugging Face name, in the order they are sent and stored."""
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "Q": config.heads * config.head_dim,
        "K": config.kv_heads * config.head_dim,
        "h": config.head_dim,
        "F": config.intermediate_size,
    }
    absent = ("query_norm", "key_norm") * (not config.qk_norm) + ("head",) * config.tied_embeddings

    def tensors(rows: dict[str, Row], full_name: str) -> Iterator[tuple[str, Tensor]]:
        for row in rows.values():
            if row.leaf not in absent:
                shape = tuple(sizes[symbol] for symbol in row.shape)
                yield full_name.format(row.name), Tensor(row, shape, full_name.format(row.fused or row.name))

    before = {"embed": OTHER_ROWS["embed"]}
    after = {leaf: row for leaf, row in OTHER_ROWS.items() if leaf not in before}
    out = dict(tensors(before, "{}"))
    for layer in range(config.layers):
        out.update(tensors(LAYER_ROWS, layer_name(layer, "{}")))
    out.update(tensors(after, "{}"))
    return out


def hf_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor, in the order they are sent and stored."""
    return {name: tensor.shape for name, tensor in layout(config).items()}


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one worker holds of one tensor: tensor[source] is parameter[target], both with a slice per dimension."""

    parameter: str  # full name
    shape: tuple[int, ...]  # the tensor's
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    columns: int  # of the parameter; 1 where it has one dimension

    def scatter(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Flat positions in the tensor -> (which of them this worker holds [n] bool, where those are in the parameter).

        Args:
          positions: [n] int64, row-major.

        Returns positions [held] int64 in the worker's whole parameter, row-major, in the order of those held.
        """
        rows, columns = np.divmod(positions, self.shape[1]) if len(self.shape) == 2 else (positions, 0 * positions)
        source, target = [*self.source, slice(0, 1)][:2], [*self.target, slice(0, 1)][:2]
        held = (rows >= source[0].start) & (rows < source[0].stop)
        held &= (columns >= source[1].start) & (columns < source[1].stop)
        to_row = rows[held] + (target[0].start - source[0].start)
        return held, to_row * self.columns + columns[held] + (target[1].start - source[1].start)


def pieces(config: DecoderConfig, rank: int = 0, workers: int = 1) -> dict[str, Piece]:
    """Hugging Face name -> what worker `rank` of `workers` holds of it; a tensor it holds nothing of has no rows.

    Raises ValueError naming what cannot be split over so many workers.
    """
    check_workers(config, workers)
    out, filled = {}, dict[str, int]()  # parameter -> rows taken by its parts so far
    for name, tensor in layout(config).items():
        source = [slice(0, size) for size in tensor.shape]
        if (dimension := {"whole": None, "columns": 1}.get(tensor.row.cut, 0)) is not None:
            source[dimension] = _share(config, tensor, dimension, rank, workers)
        start = filled.get(tensor.fused, 0)
        kept = [part.stop - part.start for part in source]
        filled[tensor.fused] = start + kept[0]
        target = [slice(start, start + kept[0]), *(slice(0, size) for size in kept[1:])]
        columns = math.prod(kept[1:])
        out[name] = Piece(tensor.fused, tensor.shape, tuple(source), tuple(target), columns)
    return out


def check_workers(config: DecoderConfig, workers: int) -> None:
    """Raises ValueError where a model cannot be split over so many workers."""
    if workers < 1:
        raise ValueError(f"{workers} workers: at least one is needed")
    for what, size in (("query heads", config.heads), ("MLP columns", config.intermediate_size)):
        if size % workers:
            raise ValueError(f"{size} {what} cannot be split evenly over {workers} workers")
    if config.kv_heads % workers and workers % config.kv_heads:
        raise ValueError(f"{config.kv_heads} key/value heads cannot be split or copied evenly over {workers} workers")


def _share(config: DecoderConfig, tensor: Tensor, dimension: int, rank: int, workers: int) -> slice:
    """The part of that dimension that a worker holds."""
    size = tensor.shape[dimension]
    if tensor.row.cut == "vocabulary":
        each = -(-size // VOCABULARY_PADDING) * VOCABULARY_PADDING // workers
        return slice(min(size, rank * each), min(size, (rank + 1) * each))
    if tensor.row.cut == "heads" and workers > config.kv_heads:
        rank, workers = rank // (workers // config.kv_heads), config.kv_heads
    each = size // workers
    return slice(rank * each, (rank + 1) * each)

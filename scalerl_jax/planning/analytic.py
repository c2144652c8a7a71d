"""An update's FLOPs, temporaries, collectives and memory traffic by formula: FLOPs for every plan, since a compiler
counts a loop's body only once; the rest for chips without a compiler here, and to choose layouts worth compiling. Its
error against the TPU compiler's own count is in docs/how_to/plan.md.

T tokens a device, D width, c bytes of the compute dtype; a layer's weights are sharded along fsdp, context and expert,
and are gathered (in the compute dtype) whenever the layer is computed:

    kept          activations of the blocks, depending on remat           L T D c, ...
    of a block    arrays of its backward pass, and its gathered weights with their float32 cotangents
    of the head   gathered weight; its float32 cotangent; the cotangent of the hidden states
    gradients     of this micro-batch, before they are added up           4 P

FLOPs that the hardware spends on one micro-batch, with T its tokens, N the weights of the layers' matrix products (of
the experts a token's own), V the vocabulary, D the width, and A = 4 L H h (pairs of query and key) the two products of
attention's forward pass:

    layers      2 N T forward, 4 N T backward, and what remat.py recomputes, less each block's last product
    attention   A forward, 2.5 A backward (splash: 3.5, its two kernels compute the scores twice), A recomputed
    head        2 V D T forward, 4 backward, 2 recomputed
    reference   one more forward pass of all these, if the loss has a KL to a reference policy
    adapter     2 N T and 2 V D T less: no weight has a gradient. Its own products are left out

Splash and blocks skip later keys, a block at a time, and keys further back than the longest segment. Here shorter
segments count as masked, so the number of pairs depends on the row and not on its segments; splash and cuDNN skip what
is outside of them. Unlike cuDNN, the others do not skip keys outside of the chunks of Llama 4's local layers.

Left out of the FLOPs: norms, softmax, rotations, the loss and the optimizer.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType

from scalerl_jax.model.decoder import abstract_params
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.hf import flat
from scalerl_jax.model.remat import (
    ATTENTION_AGAIN,
    FULL,
    NONE,
    PRODUCTS_AGAIN,
    SAVE_ATTENTION,
    SAVE_PRODUCTS,
    group_size,
)
from scalerl_jax.model.sharding import MESH_AXES
from scalerl_jax.model.tensor_layout import layout, rows
from scalerl_jax.planning.collectives import Collective

_FLOAT32 = 4
_LAST = ("down", "shared_down", "expert_down")  # weights of products whose results no other product reads


@dataclasses.dataclass(frozen=True)
class DeviceShapes:
    """The shapes of an update on one device."""

    decoder: DecoderConfig
    mesh: dict[str, int]  # axis -> devices
    seq_len: int
    rows_per_shard: int
    remat: str
    logprob_chunk: int
    width: int  # bytes of the compute dtype
    trained: float  # float32 parameters with a gradient, on this device

    @property
    def tokens(self) -> int:
        return self.rows_per_shard * self.seq_len // self.mesh["context"]


def abstract_mesh(sizes: dict[str, int]) -> Any:
    """A mesh of these axes without devices."""
    return AbstractMesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A weight, without the layers' dimension."""

    own: float  # elements on this device
    gathered: float  # elements after the gather
    axes: tuple[str, ...]  # mesh axes along which it is gathered


def _leaves(shapes: DeviceShapes) -> dict[str, _Leaf]:
    own_rows, out = rows(shapes.decoder), {}
    for name, struct in flat(abstract_params(shapes.decoder, abstract_mesh(shapes.mesh))).items():
        layered, cut = own_rows[name].layered, list[str]()
        for dimension, part in zip(own_rows[name].tree_dimensions, struct.sharding.spec):
            kept = ("tensor",) + (("expert",) if dimension == "experts" else ())
            axes = (part,) if isinstance(part, str) else part or ()
            cut += [axis for axis in axes if axis not in kept]
        size = math.prod(struct.sharding.shard_shape(struct.shape)) / (shapes.decoder.layers if layered else 1)
        out[name] = _Leaf(size, size * math.prod(shapes.mesh[axis] for axis in cut), tuple(cut))
    return out


def temporaries(shapes: DeviceShapes) -> int:
    """Bytes on a device that `accumulate` needs besides its arguments."""
    decoder, tokens, c = shapes.decoder, shapes.tokens, shapes.width
    leaves, tensor = _leaves(shapes), shapes.mesh["tensor"]
    layers, width = decoder.layers, decoder.hidden_size
    in_layers = {name: leaf for name, leaf in leaves.items() if rows(decoder)[name].layered}
    queries = decoder.heads * decoder.head_dim / tensor
    keys = decoder.kv_heads * decoder.head_dim / min(tensor, decoder.kv_heads)
    inner = _inner(decoder) / tensor
    if decoder.experts and shapes.mesh["expert"] > 1:  # every device of a group has all the group's tokens
        inner *= shapes.mesh["expert"]
    per_block = tokens * c * (4 * width + 4 * queries + 4 * keys + 3 * inner)  # that a backward pass reads
    kept = {
        NONE: layers * per_block,
        SAVE_PRODUCTS: layers * tokens * c * (2 * width + 2 * queries + 2 * keys + 2 * inner),
        SAVE_ATTENTION: layers * tokens * c * (width + queries),
        FULL: (layers / group_size(layers) + group_size(layers)) * tokens * width * c,
    }.get(shapes.remat, layers * tokens * width * c)
    whole = sum(leaf.gathered for leaf in in_layers.values())
    block = 2 * per_block + whole * (c + _FLOAT32)
    head_leaf = leaves["embed" if decoder.tied_embeddings else "head"]
    # And their cotangent, in the compute dtype.
    logits = shapes.rows_per_shard * shapes.logprob_chunk * decoder.vocab_size / tensor * (_FLOAT32 + c)
    head = head_leaf.gathered * (c + _FLOAT32) + logits + tokens * width * (_FLOAT32 + c)
    return int(shapes.trained * _FLOAT32 + kept + max(block, head))


def _inner(decoder: DecoderConfig) -> float:
    """Total columns of the MLPs that a token passes through."""
    columns = decoder.experts_per_token * decoder.moe_intermediate_size
    shared = decoder.intermediate_size if not decoder.experts or "shared_gate" in rows(decoder) else 0
    return columns + shared


def collectives(shapes: DeviceShapes) -> list[Collective]:
    """The collectives of one micro-batch."""
    decoder, mesh, c = shapes.decoder, shapes.mesh, shapes.width
    layers, states = decoder.layers, shapes.tokens * decoder.hidden_size
    out = list[Collective]()

    def add(kind: str, axes: tuple[str, ...], size: float) -> None:
        """size: bytes that a device receives."""
        axes = tuple(axis for axis in axes if mesh[axis] > 1)
        if axes and size:
            out.append(Collective(kind, int(size), _group(axes, mesh)))

    passes = 2 + (shapes.remat == FULL)  # over the layers, each of which gathers the weights
    for name, leaf in _leaves(shapes).items():
        layered = rows(decoder)[name].layered
        others = leaf.gathered - leaf.own
        if name == "embed" and not decoder.tied_embeddings:  # rows are looked up where they are stored, and sent
            parts = math.prod(mesh[axis] for axis in leaf.axes)
            add("all-to-all", leaf.axes, 2 * states * _FLOAT32 * (parts - 1) / parts)
        else:
            add("all-gather", leaf.axes, others * c * (layers * passes if layered else 1))
            add("reduce-scatter", leaf.axes, others * _FLOAT32 * (layers if layered else 1))
        copies = mesh["replica"]
        add("all-reduce", ("replica",), 2 * (copies - 1) / copies * leaf.own * _FLOAT32 * (layers if layered else 1))
    tensor, context, expert = mesh["tensor"], mesh["context"], mesh["expert"]
    # The sums of partial products: two forward, two backward; attention's forward one is recomputed.
    again = 1 * (shapes.remat in PRODUCTS_AGAIN) + 2 * (shapes.remat == FULL and group_size(layers) > 1)
    add("all-reduce", ("tensor",), 2 * (tensor - 1) / tensor * states * c * ((4 + again) * layers + 1))
    times = 2 + (shapes.remat in ATTENTION_AGAIN)
    keys = 2 * shapes.tokens * decoder.kv_heads * decoder.head_dim / min(tensor, decoder.kv_heads)
    add("all-gather", ("context",), times * layers * keys * c * (context - 1))
    if decoder.experts:
        add("all-gather", ("expert",), layers * states * (expert - 1) * (2 * c + 2 * _FLOAT32))
        add("all-reduce", ("tensor",), 2 * (tensor - 1) / tensor * states * expert * _FLOAT32 * layers)
    return out


def _group(axes: tuple[str, ...], mesh: dict[str, int]) -> tuple[tuple[int, int], ...]:
    """(first device, another of its group) along these axes."""
    places = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    group = places[tuple(slice(None) if axis in axes else 0 for axis in mesh)].reshape(-1)
    return tuple((int(group[0]), int(other)) for other in group[1:])


def memory_traffic(shapes: DeviceShapes) -> tuple[float, float]:
    """Bytes that a device reads from and writes to its memory for one micro-batch: (layers, head).

    Counts the operands and the result of each product once in each pass; other operations are assumed to be fused into
    the products. The head reads its weight, and adds to its gradient, once a chunk of tokens.
    """
    decoder, tokens, c = shapes.decoder, shapes.tokens, shapes.width
    tensor, width = shapes.mesh["tensor"], decoder.hidden_size
    queries = decoder.heads * decoder.head_dim / tensor
    keys = decoder.kv_heads * decoder.head_dim / min(tensor, decoder.kv_heads)
    inner = _inner(decoder) / tensor
    leaves = _leaves(shapes)
    in_layers = [leaf for name, leaf in leaves.items() if rows(decoder)[name].layered]
    own, gathered = sum(leaf.own for leaf in in_layers), sum(leaf.gathered for leaf in in_layers)
    computed = 1 + (shapes.remat in PRODUCTS_AGAIN) + (shapes.remat == FULL)  # forward
    forward = tokens * c * (6 * width + 4 * queries + 4 * keys + 5 * inner)
    # A gather reads the master, and writes and reads the copy. Backward: one more read, and the gradient.
    weights = computed * (_FLOAT32 * own + 2 * c * gathered) + (c + 2 * _FLOAT32) * gathered + 3 * _FLOAT32 * own
    head = leaves["embed" if decoder.tied_embeddings else "head"]
    chunks = math.ceil(shapes.seq_len / shapes.mesh["context"] / shapes.logprob_chunk)
    logits = 6 * tokens * decoder.vocab_size / tensor * _FLOAT32
    return (
        decoder.layers * (forward * (computed + 2) + weights),
        logits + chunks * head.gathered * (3 * c + 2 * _FLOAT32),
    )


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one micro-batch, on all devices together."""

    layers: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head


def of_micro_batch(
    decoder: DecoderConfig,
    *,
    rows: int,
    seq_len: int,
    longest: int,
    remat: str,
    backend: str,
    block: int,
    reference: bool = False,
    adapted: bool = False,
) -> Flops:
    """rows: on the whole mesh. longest: tokens of the longest segment. backend, block: attention's, see `pairs`."""
    tokens = rows * seq_len
    weights = dict.fromkeys(("all", "last"), 0.0)
    for tensor in layout(decoder).values():
        if tensor.row.layered and len(tensor.shape) > 1:
            named = zip(tensor.row.dimensions, tensor.shape)
            size = math.prod(decoder.experts_per_token if name == "experts" else n for name, n in named)
            weights["all"] += size
            weights["last"] += size * (tensor.row.leaf in _LAST)
    again, attention_again = 1.0 * (remat in PRODUCTS_AGAIN), 1.0 * (remat in ATTENTION_AGAIN)
    twice = 0.0
    if remat == FULL:
        twice = 1.0 * (group_size(decoder.layers) > 1)  # recomputing a group includes its last block
    forward = 2 * weights["all"] * tokens
    not_again = 2 * weights["last"] * tokens * again
    every = pairs(seq_len, longest, backend, block)
    local = sum(decoder.local_layers())
    inside = pairs(seq_len, longest, backend, block, chunk=decoder.attention_chunk) if local else 0.0
    attended = (decoder.layers - local) * every + local * inside
    scores = 4.0 * decoder.heads * decoder.head_dim * rows * attended
    backward = 3.5 if backend == "splash" else 2.5
    return Flops(
        layers=forward * (3 - adapted + again + twice + reference) - not_again,
        attention=scores * (1 + backward + attention_again + twice + reference),
        head=(8.0 - 2.0 * adapted + 2.0 * reference) * decoder.vocab_size * decoder.hidden_size * tokens,
    )


def pairs(seq_len: int, longest: int, backend: str, block: int, chunk: int = 0) -> float:
    """Pairs of query and key computed in one row: all blocks of `block` x `block` that the mask does not fully exclude.

    cudnn skips by segments; their number is not known here, so a row counts as one. chunk: the attention chunk of a
    local layer, in positions; 0 for other layers.
    """
    longest = min(seq_len, longest)
    if backend == "cudnn" and 0 < chunk < longest:
        chunks, rest = divmod(seq_len, chunk)
        return chunks * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2
    if backend == "cudnn":
        return longest * (longest + 1) / 2 + (seq_len - longest) * longest
    blocks = math.ceil(seq_len / block)
    back = math.ceil((longest - 1) / block)  # earlier blocks of keys that a block of queries attends to
    return float(block * block * sum(min(i, back) + 1 for i in range(blocks)))

"""The weights in the sync dtype, and their changes since the version before, found on the device.

    bits   = uint16 of bfloat16(master)                                        per leaf, layer and shard
    found  = the first `cap` places where bits != bits of the version before, and the new bits at these places
    digest = sum of mix(bits * a(row) + b(column)) mod 2^32                    contract/rollout.proto

Only `found`, the counts and the digests are copied to the host: nothing is gathered from shard to shard, and no whole
tensor is copied unless more of it changed than `cap` holds, or all of a version is requested (`tensors`). The places
are those of the shard, in the layout of the parameter tree, which is transposed and stacked relative to Hugging Face's;
the host maps them to positions in row-major order of the Hugging Face tensor.

How `found` is made without sorting: 32 comparisons make a word; the running sum of the words' popcounts gives the place
in the output where each word's finds begin; each place of the output then finds its word, and in it its rank's bit.

Memory: one copy of the weights in bfloat16 stays on the device, a second one during the comparison, and one more for
each older version that is still needed whole. `found` takes 6 bytes for each element of the caps.

bfloat16 only. On several hosts each finds the changes of its own shards, and sends those: `blocks` instead of
`tensors`, and a delta whose digests are sums over its own shards (contract/weight_parts.py).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from scalerl_jax.contract.weight_delta import COLUMN_SALT, MIX, ROW_SALT, Change, Sparse, WeightDelta, encode, final
from scalerl_jax.contract.weight_parts import Block, Blocks
from scalerl_jax.model.decoder import Params, abstract_params
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.families.dense import WeightRow
from scalerl_jax.model.hf import flat
from scalerl_jax.model.lora import LowRank
from scalerl_jax.model.sharding import WEIGHTS
from scalerl_jax.model.tensor_layout import hf_tensors, layout, rows

# A shard of a tensor may always have this many changes, whatever share of it that is.
SMALLEST_CAP = 64
# `found` is copied to the host in pieces that end at these shares of the cap, and only as many as are not empty.
PIECES = (0.125, 0.25, 0.5, 1.0)

_CUTS = PartitionSpec(WEIGHTS)
Leaves = dict[str, Any]  # leaf of the parameter tree -> array


class WeightSnapshot(NamedTuple):
    """A policy as it is sent. Both functions wait for the device, and may be called on any thread."""

    step: int
    # All of it: Hugging Face names -> array in the sync dtype, or on several hosts the blocks that this one holds.
    tensors: Callable[[], Mapping[str, Any]]
    changes: Callable[[], WeightDelta] | None = None  # since the version before, called once; None: it is sent whole


def host_arrays(weights: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in weights.items()}


def host_blocks(weights: dict[str, jax.Array]) -> dict[str, Blocks]:
    """The blocks of each tensor on this host's devices; no element is on two hosts."""
    return {
        name: tuple(Block(_start(shard), np.asarray(shard.data)) for shard in _own_shards(value))
        for name, value in weights.items()
    }


def _own_shards(array: jax.Array) -> list[jax.Shard]:
    """The shards on this host's devices; no element is on two hosts."""
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _start(shard: jax.Shard, first: int = 0) -> tuple[int, ...]:
    """The place of its first element in the whole array, from this dimension on."""
    return tuple(part.start or 0 for part in shard.index[first:])


class WeightSnapshots:
    """Makes one version after another. `snapshot` only starts the work on the device; DeviceSnapshot copies it to the
    host."""

    def __init__(self, decoder: DecoderConfig, mesh: Mesh, *, share: float):
        """share: of a tensor's shard that may have changed; above it the whole tensor is sent."""
        self._decoder = decoder
        self._sent: Leaves | None = None
        self._step: int | None = None
        abstract, own = flat(abstract_params(decoder, mesh)), rows(decoder)

        def compare(params: Params, sent: Leaves) -> dict[str, Leaves]:
            out = {}
            for leaf, new in flat(params).items():
                spec = abstract[leaf].sharding.spec
                local = functools.partial(_compare, row=own[leaf], shape=new.shape, spec=spec, share=share)
                if isinstance(new, LowRank):
                    new = new.astype(jnp.bfloat16)
                outputs = {"bits": spec, "digest": _CUTS, "count": _CUTS, "places": _CUTS, "values": _CUTS}
                mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=outputs, check_vma=False)
                out[leaf] = mapped(new, sent[leaf])
            return out

        def nothing() -> Leaves:
            return {leaf: jnp.zeros(struct.shape, jnp.uint16) for leaf, struct in abstract.items()}

        self._compare = jax.jit(compare)
        self._nothing = jax.jit(nothing, out_shardings={leaf: struct.sharding for leaf, struct in abstract.items()})

    def snapshot(self, params: Params, step: int) -> "DeviceSnapshot":
        """Version `step`: the parameters (laid out as param_shardings) as they are sent.

        Called once for each step, in order; returns while the device still computes.
        """
        assert self._step is None or step == self._step + 1, f"version {step} after version {self._step}"
        found = self._compare(params, self._nothing() if self._sent is None else self._sent)
        base, self._step = self._step, step
        self._sent = {leaf: finds.pop("bits") for leaf, finds in found.items()}
        return DeviceSnapshot(decoder=self._decoder, base=base, step=step, bits=self._sent, found=found)


class DeviceSnapshot:
    """One version. Its methods wait for the device, and may be called on any thread."""

    def __init__(self, *, decoder: DecoderConfig, base: int | None, step: int, bits: Leaves, found: dict[str, Leaves]):
        self.step, self._base = step, base
        self._decoder, self._bits, self._found = decoder, bits, found
        self._alone = all(leaf.is_fully_addressable for leaf in bits.values())

    def tensors(self) -> dict[str, np.ndarray]:
        """All tensors under their Hugging Face names, bfloat16, in host memory that is never overwritten."""
        return {name: self._tensor(name).view(ml_dtypes.bfloat16) for name in layout(self._decoder)}

    def _tensor(self, name: str) -> np.ndarray:
        """The bits of one tensor, put together from its shards on the host."""
        blocks = self._blocks(name)
        if len(blocks) == 1:
            return blocks[0].values
        out = np.empty(layout(self._decoder)[name].shape, np.uint16)
        for block in blocks:
            out[block.index] = block.values
        return out

    def blocks(self) -> dict[str, Blocks]:
        """The shards of each tensor on this host, bfloat16; no element is on two hosts."""
        return {
            name: tuple(Block(block.start, block.values.view(ml_dtypes.bfloat16)) for block in self._blocks(name))
            for name in layout(self._decoder)
        }

    def _blocks(self, name: str) -> Blocks:
        """The bits of one tensor's shards on this host, in the Hugging Face layout."""
        tensor = layout(self._decoder)[name]
        row, found = tensor.row, []
        for shard in _own_shards(self._bits[row.leaf]):
            start = _start(shard, int(row.layered))
            bits = _as_in_files(shard.data, tensor.layer, transposed=row.transposed)
            found.append(Block(start[::-1] if row.transposed else start, np.asarray(bits)))
        return tuple(found)

    def delta(self) -> WeightDelta:
        """The changes since the version before; of the first version only the digests. To be called once.

        On several hosts: those in this host's shards.
        """
        found, self._found = self._found, {}  # its memory is free when this returns
        tensors: dict[str, Sparse | np.ndarray | Blocks] = {}
        digests: dict[str, int] = {}
        own = rows(self._decoder)
        shards = {leaf: list(_shards(self._bits[leaf], finds, own[leaf])) for leaf, finds in found.items()}
        for name, tensor in layout(self._decoder).items():
            finds, layer = shards[tensor.row.leaf], tensor.layer or 0
            digests[name] = sum(int(shard.digests[layer]) for shard in finds) & 0xFFFFFFFF
            if self._base is None:
                continue
            if any(shard.counts[layer] > shard.cap for shard in finds):
                tensors[name] = self._tensor(name) if self._alone else self._blocks(name)
            else:
                tensors[name] = encode(_change(finds, layer, tensor.shape, tensor.row.transposed))
        return WeightDelta(self._base, self.step, tensors, digests, hf_tensors(self._decoder), self._held())

    def _held(self) -> int | None:
        """Elements of the shards on this host; None: it has all of them."""
        if self._alone:
            return None
        return sum(shard.data.size for leaf in self._bits.values() for shard in _own_shards(leaf))


# ------------------------------------------------------------------------------------------------- on the device


@functools.partial(jax.jit, static_argnames="transposed")
def _as_in_files(leaf: jax.Array, layer: int | None, *, transposed: bool) -> jax.Array:
    """One tensor of a shard of a leaf, transposed here: only it is copied to the host, where transposing takes much
    longer."""
    one = leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    return one.T if transposed else one


def _compare(
    new: jax.Array, old: jax.Array, *, row: WeightRow, shape: tuple[int, ...], spec: PartitionSpec, share: float
) -> dict[str, Any]:
    """One shard of one leaf of `shape`: new float32 or bfloat16, old uint16, both [layers, ...], or [...] outside.

    Returns bits as old, and with a leading dimension of size 1, which distinguishes the mesh's shards:
    digest, count [layers] uint32; places, values: lists of pieces, [layers, piece] uint32 and uint16.
    """
    own = slice(int(row.layered), None)  # without the layers
    sizes, whole, cuts = new.shape[own], shape[own], (*spec, *[None] * len(shape))[: len(shape)][own]
    starts = [0 if cut is None else jax.lax.axis_index(cut) * size for cut, size in zip(cuts, sizes)]
    # Indices of the shard's elements in the Hugging Face tensor, by dimension, each shaped to broadcast over the shard.
    places = [jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(start) for size, start in zip(sizes, starts)]
    index = jnp.meshgrid(*places, indexing="ij", sparse=True)
    if row.transposed:
        index, whole = index[::-1], whole[::-1]
    *before, of_column = index
    of_row = jnp.zeros(1, jnp.uint32)
    for places, size in zip(before, whole):
        of_row = of_row * jnp.uint32(size) + places
    by_row = final(of_row ^ jnp.uint32(ROW_SALT)) | jnp.uint32(1)
    by_column = final(of_column ^ jnp.uint32(COLUMN_SALT))
    cap = _cap(math.prod(sizes), share)

    pieces = [slice(start, end) for start, end in itertools.pairwise(math.ceil(cap * end) for end in (0.0, *PIECES))]

    # Computed once and stored: fused into the sums below, the conversion would run several times for each element.
    bits = jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16))

    def one(pair: tuple[jax.Array, jax.Array]) -> dict[str, Any]:
        bits, before = pair
        x = bits.astype(jnp.uint32) * by_row + by_column
        x = (x ^ (x >> 16)) * jnp.uint32(MIX)
        count, where = _first((bits != before).reshape(-1), cap)
        values = bits.reshape(-1)[where]
        return {
            "digest": jnp.sum(x ^ (x >> 15), dtype=jnp.uint32),
            "count": count,
            "places": [where[piece] for piece in pieces],
            "values": [values[piece] for piece in pieces],
        }

    # One layer after another: intermediate arrays are small, and their memory is reused.
    found = jax.lax.map(one, (bits, old) if row.layered else (bits[None], old[None]))
    return {"bits": bits, **jax.tree.map(lambda x: x[None], found)}


def _cap(elements: int, share: float) -> int:
    return min(elements, max(SMALLEST_CAP, math.ceil(share * elements)))


def _first(differs: jax.Array, cap: int) -> tuple[jax.Array, jax.Array]:
    """How many of differs [elements] are True, and the places of the first `cap` of them, ascending: [cap] uint32.

    Beyond the number of True elements the places are arbitrary, but inside the array.
    """
    # One product combines four comparisons, a byte each: byte i, times 2^(24 - 7 i), is at bit 24 + i.
    fours = jnp.pad(differs, (0, -differs.size % 32)).reshape(-1, 4).astype(jnp.uint8)
    fours = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(fours), jnp.uint32)  # the first is the lowest
    fours = ((fours * jnp.uint32(0x01020408)) >> 24) & jnp.uint32(15)
    words = jnp.sum(fours.reshape(-1, 8) << (4 * jnp.arange(8, dtype=jnp.uint32)), axis=1, dtype=jnp.uint32)
    counts = jax.lax.population_count(words).astype(jnp.int32)
    # Running sums and maxima by associative_scan: on a CPU it is several times faster than cumsum and cummax.
    ends = jax.lax.associative_scan(jnp.add, counts)
    starts = ends - counts
    # Each place of the output finds its word: the last one that begins at or before it.
    to = jnp.where(counts > 0, starts, cap)
    mine = jnp.zeros(cap, jnp.int32).at[to].set(jnp.arange(len(words), dtype=jnp.int32), mode="drop")
    mine = jax.lax.associative_scan(jnp.maximum, mine)
    word, rank = words[mine], jnp.arange(cap, dtype=jnp.int32) - starts[mine]
    # The bit of that rank in the word, by halves.
    bit = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        lower = (word >> bit.astype(jnp.uint32)) & jnp.uint32((1 << width) - 1)
        below = jax.lax.population_count(lower).astype(jnp.int32)
        beyond = rank >= below
        rank, bit = jnp.where(beyond, rank - below, rank), jnp.where(beyond, bit + width, bit)
    places = jnp.minimum(mine * 32 + bit, differs.size - 1)
    return ends[-1].astype(jnp.uint32), places.astype(jnp.uint32)


# --------------------------------------------------------------------------------------------------- on the host


@dataclasses.dataclass(frozen=True)
class _Shard:
    """The finds of one shard of a leaf. `start` and `size` without the layers' dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    cap: int
    digests: np.ndarray  # [layers] uint32
    counts: np.ndarray  # [layers] uint32; above cap: the places are incomplete
    places: np.ndarray  # [layers, found] uint32, in the flat shard of a layer
    values: np.ndarray  # [layers, found] uint16


def _shards(bits: jax.Array, finds: Leaves, row: WeightRow) -> Iterator[_Shard]:
    first = int(row.layered)  # dimension after the layers'
    for shard in _own_shards(bits):

        def here(array: jax.Array, device: Any = shard.device) -> np.ndarray:
            return np.asarray(next(s.data for s in array.addressable_shards if s.device == device))[0]

        counts, cap, got = here(finds["count"]), sum(piece.shape[-1] for piece in finds["places"]), 0
        wanted = min(int(counts.max()), cap)
        places, values = [], []
        for piece, bits_there in zip(finds["places"], finds["values"]):
            if got >= wanted and places:
                break
            places.append(here(piece))
            values.append(here(bits_there))
            got += piece.shape[-1]
        yield _Shard(
            start=_start(shard, first),
            size=shard.data.shape[first:],
            cap=cap,
            digests=here(finds["digest"]),
            counts=counts,
            places=np.concatenate(places, axis=1),
            values=np.concatenate(values, axis=1),
        )


def _change(shards: list[_Shard], layer: int, shape: tuple[int, ...], transposed: bool) -> Change:
    """The changes that the shards found in one tensor, at positions in row-major order of the Hugging Face tensor."""
    if not shards:
        return Change(np.zeros(0, np.int64), np.zeros(0, np.uint16))  # they lie on other hosts
    rows, columns, values = [], [], []
    # Sorted by the first column of each: so equal rows have ascending columns, and a stable sort by rows is enough.
    for shard in sorted(shards, key=lambda shard: shard.start[0 if transposed else -1]):
        found = int(shard.counts[layer])
        rest, index = shard.places[layer, :found], []
        for size in shard.size[:0:-1]:
            rest, places = np.divmod(rest, np.uint32(size))
            index.append(places)
        index = [places + np.uint32(start) for places, start in zip([rest, *index[::-1]], shard.start)]
        *before, column = index[::-1] if transposed else index
        row = before[0] if before else np.zeros(found, np.uint32)
        for places, size in zip(before[1:], shape[1:]):
            row = row * np.uint32(size) + places
        rows.append(row)
        columns.append(column)
        values.append(shard.values[layer, :found])
    row, column, value = np.concatenate(rows), np.concatenate(columns), np.concatenate(values)
    if transposed or len(shards) > 1:
        # NumPy uses a radix sort for 16 bits.
        order = np.argsort(row.astype(np.uint16) if math.prod(shape[:-1]) <= 2**16 else row, kind="stable")
        row, column, value = row[order], column[order], value[order]
    return Change(row.astype(np.int64) * shape[-1] + column, value)

"""Keys and values of all slots, one array a layer: reading them, changing their length, and merging pending entries;
and copies of them, the prefixes kept for the next turn of a session.

On a TPU a step does not write into the caches: a scatter needs another memory layout than the products that read them,
and XLA would keep all caches twice. So the steps of a chunk write into small arrays, at the same position for every
slot, and read from them too; these are merged into the caches when the chunk ends (`Held`, `merged`).
On accelerators keys have the layout of values, [B, K, S, h]; on CPUs [B, K, h, S], so that a step's product need not
transpose them.
A TPU would store heads narrower than its 128 lanes positions last, and copy all caches in every chunk. So there
neighbouring key/value heads are one of 128 to the caches, if they fill it (`heads_of`): a query has zeros for the heads
that are not its own (`grouped`), and of the values its own are taken (`ungrouped`).

Legend: B slots, S positions, N steps of a chunk, C tokens, K key/value heads and h head size of the caches, G query
heads that share one, H = K G, d head size of the queries.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout_server.engines.jax import live_attention
from rollout_server.engines.jax.live_attention import LANES
from rollout_server.engines.jax.weights import DecodePrecision
from rollout_server.engines.sequence import Sequence
from scalerl_jax.model.attention import cudnn
from scalerl_jax.model.attention.blocks import MASKED
from scalerl_jax.model.decoder import Precision
from scalerl_jax.model.decoder_config import DecoderConfig

Caches = list[jax.Array]  # per layer
Prefix = Any  # (keys, values, experts | None) on the device, of decode.prefill


@dataclasses.dataclass(frozen=True)
class Held:
    """The caches at the start of a chunk, which its steps only read."""

    keys: Caches  # [B, K, S, h] each
    values: Caches  # likewise
    start: jax.Array  # [B] int32: number of valid positions


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention over some of the positions, before its softmax is divided by the total."""

    top: jax.Array  # [B, K, G, 1] float32: the largest score
    total: jax.Array  # [B, K, G, 1] float32: sum of exp(score - top)
    mixed: jax.Array  # [B, K, G, h] float32: the values, each times exp(score - top)


def heads_of(config: DecoderConfig, precision: DecodePrecision) -> tuple[int, int]:
    """(K, h): the number of key/value heads to the caches, and their size."""
    joined = LANES // math.gcd(LANES, config.head_dim) if precision.kept_apart else 1
    fit = joined * config.head_dim == LANES and config.kv_heads % joined == 0
    return (config.kv_heads // joined, LANES) if fit else (config.kv_heads, config.head_dim)


def as_cached(x: jax.Array, config: DecoderConfig, precision: DecodePrecision) -> jax.Array:
    """Keys or values as the model makes them, [..., heads, d], in the heads and dtype of the caches, [..., K, h]."""
    return x.reshape(*x.shape[:-2], *heads_of(config, precision)).astype(precision.cache)


def grouped(q: jax.Array, heads: int, size: int) -> jax.Array:
    """Queries [..., H, d] by the heads of the caches: [..., K, G, h], for K `heads` of h `size`."""
    *lead, count, own = q.shape
    joined = size // own
    parts = q.reshape(*lead, heads, joined, count // heads // joined, 1, own)
    return (parts * jnp.eye(joined, dtype=q.dtype)[:, None, :, None]).reshape(*lead, heads, count // heads, size)


def ungrouped(mixed: jax.Array, own: int) -> jax.Array:
    """The values [..., H, d] that queries of size d `own` have mixed, out of [..., K, G, h]."""
    *lead, heads, group, size = mixed.shape
    joined = size // own
    parts = mixed.reshape(*lead, heads, joined, group // joined, joined, own)
    return jnp.einsum("...igih->...igh", parts).reshape(*lead, heads * group, own)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position: jax.Array,
    *,
    live: jax.Array,
    precision: DecodePrecision,
    first: jax.Array | None = None,
    prompt: Partial | None = None,
) -> jax.Array:
    """q [B, H, h] over v [B, K, S, h] and k, likewise or with precision.keys_last [B, K, h, S], over positions
    first..position [B] only -> [B, H, h].

    live [B] bool: the others' results mean nothing, and their positions may be past the end, as those of a sequence may
    be that was taken out of the pool. first defaults to 0.
    prompt: attention over positions that are not in k and v.
    """
    slots, heads, size = q.shape
    kv_heads, length = v.shape[1:3]
    queries = q.reshape(slots, kv_heads, heads // kv_heads, size).astype(k.dtype)
    dot: Any = {"precision": Precision(str(k.dtype)).dot, "preferred_element_type": jnp.float32}
    if first is None and live_attention.has_cudnn(v, precision):
        lengths = jnp.clip(jnp.where(live, position + 1, 1), 1, length)
        mixed, total = cudnn.attend_prefixes(queries, k, v, lengths)
        if prompt is not None:
            own = Partial(total[..., None], jnp.ones_like(total[..., None]), mixed.astype(jnp.float32))
            mixed = _mixed([], [], [own, prompt], dot)
    else:
        product = "bkgh,bkhs->bkgs" if precision.keys_last else "bkgh,bksh->bkgs"
        scores = jnp.einsum(product, queries, k, **dot) * (1 / math.sqrt(size))
        seen = jnp.arange(length) <= position[:, None]
        if first is not None:
            seen &= jnp.arange(length) >= first[:, None]
        mixed = _mixed([jnp.where(seen[:, None, None, :], scores, MASKED)], [v], [prompt], dot)
    return mixed.reshape(slots, heads, size).astype(q.dtype)


def _mixed(scores: list[jax.Array], values: list[jax.Array], others: list[Partial | None], dot: Any) -> jax.Array:
    """One softmax over all parts: scores [B, K, G, S] and values [B, K, S, h] of each, and the others."""
    partials = [other for other in others if other is not None]
    tops = [jnp.max(part, axis=-1, keepdims=True) for part in scores]
    top = functools.reduce(jnp.maximum, [*tops, *(other.top for other in partials)])
    weights = [jnp.exp(part - top) for part in scores]
    scales = [jnp.exp(other.top - top) for other in partials]
    totals = [jnp.sum(part, axis=-1, keepdims=True) for part in weights]
    totals += [other.total * scale for other, scale in zip(partials, scales)]
    total = functools.reduce(jnp.add, totals)
    products = [
        jnp.einsum("bkgs,bksh->bkgh", (part / total).astype(v.dtype), v, **dot) for part, v in zip(weights, values)
    ]
    products += [other.mixed * (scale / total) for other, scale in zip(partials, scales)]
    return functools.reduce(jnp.add, products)


def attend_one(
    q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array, first: jax.Array, *, keys_last: bool
) -> jax.Array:
    """As `attend`, of C tokens of one slot: q [C, H, d], v [K, S, h], first and position [C]; k [K, h, S], or as v.

    keys_last: whether positions are the last dimension of keys.
    """
    kv_heads, length, size = v.shape
    queries = grouped(q, kv_heads, size).astype(k.dtype)
    dot: Any = {"precision": Precision(str(k.dtype)).dot, "preferred_element_type": jnp.float32}
    product = "ckgh,khs->kgcs" if keys_last else "ckgh,ksh->kgcs"
    scores = jnp.einsum(product, queries, k, **dot) * (1 / math.sqrt(q.shape[-1]))
    at = jnp.arange(length)
    seen = (at <= position[:, None]) & (at >= first[:, None])
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
    mixed = jnp.einsum("kgcs,ksh->ckgh", weights.astype(v.dtype), v, **dot)
    return ungrouped(mixed, q.shape[-1]).astype(q.dtype)


def attend_held(
    q: jax.Array,
    held: tuple[jax.Array, jax.Array],
    new: tuple[jax.Array, jax.Array],
    start: jax.Array,
    step: jax.Array,
    *,
    first: jax.Array | None = None,
    prompt: Partial | None = None,
) -> jax.Array:
    """As `attend`, of q [B, H, d], where positions 0..start - 1 [B] are in `held`, and those of steps 0..step of this
    chunk in `new`, keys and values [B, K, N, h]. Of long caches a TPU reads only the live part."""
    arrays = q, held, new, start, step, first, prompt
    live, whole = (functools.partial(_attend_held, live=live) for live in (True, False))
    if live_attention.tile_of(held[1]):
        return jax.lax.platform_dependent(*arrays, tpu=live, default=whole)
    return whole(*arrays)


def _attend_held(
    q: Any, held: Any, new: Any, start: Any, step: Any, first: Any, prompt: Any, *, live: bool
) -> jax.Array:  # fmt: skip
    """live: whether only the live part of `held` is read."""
    slots, kv_heads, length, size = held[1].shape
    scale = 1 / math.sqrt(q.shape[-1])
    queries = grouped(q, kv_heads, size).astype(held[0].dtype)
    dot: Any = {"precision": Precision(str(queries.dtype)).dot, "preferred_element_type": jnp.float32}
    at, steps = jnp.arange(length), jnp.arange(new[1].shape[2])
    seen = at < start[:, None], jnp.broadcast_to(steps <= step, (slots, len(steps)))
    if first is not None:
        seen = seen[0] & (at >= first[:, None]), seen[1] & (start[:, None] + steps >= first[:, None])

    def scores(k: jax.Array, seen: jax.Array) -> jax.Array:
        found = jnp.einsum("bkgh,bksh->bkgs", queries, k, **dot) * scale
        return jnp.where(seen[:, None, None], found, MASKED)

    if live:
        begin = jnp.zeros_like(start) if first is None else first
        parts = live_attention.attend(queries, held[0], held[1], begin, start, scale=scale, precision=dot["precision"])
        mixed = _mixed([scores(new[0], seen[1])], [new[1]], [Partial(*parts), prompt], dot)
    else:
        mixed = _mixed([scores(k, mask) for k, mask in zip((held[0], new[0]), seen)], [held[1], new[1]], [prompt], dot)
    return ungrouped(mixed, q.shape[-1]).astype(q.dtype)


def empty(config: DecoderConfig, precision: DecodePrecision, *, rows: int, length: int) -> tuple[Caches, Caches]:
    """Zeros for keys and values of so many rows, slots or prompts, each in its layout."""
    heads, size = heads_of(config, precision)

    def zeros(*shape: int) -> Caches:
        return [jnp.zeros((rows, heads, *shape), precision.cache) for _ in range(config.layers)]

    return zeros(size, length) if precision.keys_last else zeros(length, size), zeros(length, size)


def nothing_new(caches: Caches, steps: int) -> Caches:
    """Zeros for the entries that `steps` steps will make, [B, K, N, h] each."""
    return [jnp.zeros((*cache.shape[:2], steps, cache.shape[3]), cache.dtype) for cache in caches]


def merged(held: Held, keys: Caches, values: Caches) -> tuple[Caches, Caches]:
    """The caches with the entries that a chunk has made, [B, K, N, h] each, from position held.start on.

    Entries past the caches' end are dropped.
    """
    length = held.values[0].shape[2]
    count = min(length, values[0].shape[2])

    def of_slot(i: jax.Array, caches: tuple[Caches, Caches]) -> tuple[Caches, Caches]:
        at = jnp.minimum(held.start[i], length - count)
        shift = held.start[i] - at  # number of positions of the window before held.start
        here = (jnp.arange(count) >= shift)[:, None]

        def put(cache: jax.Array, new: jax.Array) -> jax.Array:
            own = jnp.roll(jax.lax.dynamic_slice_in_dim(new, i, 1)[:, :, :count], shift, axis=2)
            old = jax.lax.dynamic_slice(cache, (i, 0, at, 0), own.shape)
            return jax.lax.dynamic_update_slice(cache, jnp.where(here, own, old), (i, 0, at, 0))

        return jax.tree.map(put, caches, (keys, values))

    # A loop instead of a scatter: see the module docstring.
    return jax.lax.fori_loop(0, len(held.start), of_slot, (held.keys, held.values))


@functools.partial(jax.jit, static_argnames=("length", "keys_last"))
def copy_slot(keys: Caches, values: Caches, slot: jax.Array, *, length: int, keys_last: bool) -> tuple[Caches, Caches]:
    """The first `length` positions of a slot, in the layout that `prefill` returns."""

    def of_slot(cache: jax.Array, axis: int) -> jax.Array:
        row = jax.lax.dynamic_index_in_dim(cache, slot, keepdims=False)
        return jax.lax.slice_in_dim(row, 0, length, axis=axis)

    return [of_slot(cache, 1 + keys_last) for cache in keys], [of_slot(cache, 1) for cache in values]


def fit(keys: Caches, values: Caches, length: int, *, keys_last: bool) -> None:
    """Pads or cuts the caches to `length` positions.

    Changes the lists in place: each old array is released before the next is made.
    """
    for i in range(len(keys)):
        keys[i] = _fit(keys[i], length=length, axis=keys[i].ndim - (1 if keys_last else 2))
        values[i] = _fit(values[i], length=length, axis=values[i].ndim - 2)


@functools.partial(jax.jit, static_argnames=("length", "axis"))
def _fit(cache: jax.Array, *, length: int, axis: int) -> jax.Array:
    missing = length - cache.shape[axis]  # negative: positions are cut off
    return jax.lax.pad(cache, cache.dtype.type(0), [(0, missing if i == axis else 0, 0) for i in range(cache.ndim)])


@functools.partial(jax.jit, static_argnames=("length", "keys_last"))
def fit_prefix(keys: Caches, values: Caches, *, length: int, keys_last: bool) -> tuple[Caches, Caches]:
    """As `fit`, for a small prefix: in one program, because launching costs more than the work."""
    keys, values = list(keys), list(values)
    fit(keys, values, length, keys_last=keys_last)
    return keys, values


# ---------------------------------------------------------------------------------------------------- sessions


@dataclasses.dataclass(frozen=True)
class KeptTurn:
    tokens: np.ndarray  # [known] int32: the tokens of these keys and values
    prefix: Prefix
    experts: np.ndarray | None  # [known, layers, experts per token], if the turn recorded them
    step: int | None  # of the version that computed all of them; None: several did

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves((self.prefix, self.experts)))


class SessionCaches:
    """The prefixes of one incarnation's weights, as long as memory allows; call `clear` for another incarnation.

    A prefix is a copy of a slot's keys and values, so no slot is occupied while an environment runs. The oldest one is
    dropped first.
    """

    def __init__(self, limit: int):
        """limit: bytes to keep."""
        self.limit = limit
        self._kept: collections.OrderedDict[tuple[str, int], KeptTurn] = collections.OrderedDict()  # oldest first
        self._bytes = 0

    def store(self, sequence: Sequence, kept: KeptTurn) -> None:
        """Keeps a prefix for the turn after `sequence`."""
        self._drop(_name(sequence))
        self._kept[_name(sequence)] = kept
        self._bytes += kept.bytes
        while self._kept and self._bytes > self.limit:
            self._drop(next(iter(self._kept)))

    def pop(self, sequence: Sequence) -> KeptTurn | None:
        """Removes and returns the prefix from which the sequence can continue, or None. Of a prefix that its prompt
        does not begin with (its history was rewritten) what is the same, if that is half of the prompt or more."""
        request, kept = sequence.request, self._drop(_name(sequence))
        if kept is None:
            return None
        most = min(len(kept.tokens), len(request.prompt) - 1)
        known = int(np.argmin(np.append(kept.tokens[:most] == request.prompt[:most], False)))
        enough = known == len(kept.tokens) or 2 * known >= len(request.prompt)
        recorded = kept.experts is not None or not request.router_replay
        if not enough or not recorded or request.pinned_step not in (None, kept.step):
            return None
        experts = None if kept.experts is None else kept.experts[:known]
        return dataclasses.replace(kept, tokens=kept.tokens[:known], experts=experts)

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def _drop(self, name: tuple[str, int]) -> KeptTurn | None:
        kept = self._kept.pop(name, None)
        self._bytes -= kept.bytes if kept is not None else 0
        return kept


def _name(sequence: Sequence) -> tuple[str, int]:
    return sequence.request.session, sequence.wanted.index

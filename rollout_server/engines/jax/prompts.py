"""Keys and values of prompts that several completions of a group read, one copy for up to `seats` of them.

A slot that has a seat caches only what comes after its prompt: its own cache begins with the prompt's last token, which
the decode loop feeds. So the slots' caches stay as short as the longest completion, and a step reads a prompt once for
its readers. Attention over the prompt and over the slot's own part are two parts of one softmax (`Partial`).

Legend: N rows, an even number, with one prompt in each; R seats of a row; W slots of a chunk; P positions of a row;
K key/value heads and h head size of the caches, G query heads that share one, d head size of the queries.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout_server.engines.jax import caches
from rollout_server.engines.jax.caches import Caches, Partial, fit, fit_prefix
from rollout_server.engines.jax.weights import DecodePrecision
from rollout_server.engines.sequence import Sequence
from scalerl_jax.contract.codec import GroupRequest
from scalerl_jax.model.attention.blocks import MASKED
from scalerl_jax.model.decoder import Precision
from scalerl_jax.model.decoder_config import DecoderConfig

NO_SEAT = 2**31 - 1
SMALLEST_GROUP = 4  # completions of a request that shares its prompt
SHORTEST = 128  # positions: sharing fewer saves nothing


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Prompts:
    keys: Caches  # [N, K, h, P] each, on accelerators [N, K, P, h]
    values: Caches  # [N, K, P, h] each
    known: jax.Array  # [N] int32: number of valid positions


@dataclasses.dataclass(frozen=True)
class Readers:
    """The slots that read each row during a chunk."""

    seat: jax.Array  # [W] int32: row * R + seat in it; NO_SEAT: none
    slots: jax.Array  # [N, R] int32; W: nobody
    pairs: jax.Array  # [N / 2] int32: of rows that live slots read, then others
    count: jax.Array  # int32: number of pairs that live slots read
    known: jax.Array  # [W] int32: positions of the slot's prompt that are in a row


def seats(precision: DecodePrecision) -> int:
    """Seats of a row. On a CPU a seat costs time even where nobody has it."""
    return 4 if precision.on_cpu else 16


def empty(config: DecoderConfig, precision: DecodePrecision, *, rows: int, length: int) -> Prompts:
    return Prompts(*caches.empty(config, precision, rows=rows, length=length), jnp.zeros(rows, jnp.int32))


@functools.partial(jax.jit, donate_argnames=("prompts",))
def put(prompts: Prompts, prefix: tuple[Caches, Caches], row: jax.Array, known: jax.Array) -> Prompts:
    """Replaces the prompt of a row. prefix: keys and values of `decode.prefill`, fitted to P positions."""
    keys, values = (
        [jax.lax.dynamic_update_index_in_dim(old, new, row, 0) for old, new in zip(*arrays)]
        for arrays in zip((prompts.keys, prompts.values), prefix)
    )
    return Prompts(keys, values, prompts.known.at[row].set(known))


def readers(prompts: Prompts, seat: jax.Array, live: jax.Array, per_row: int) -> Readers:
    """seat [W] int32, live [W] bool; per_row: R."""
    count = len(prompts.known)
    slots = jnp.full(count * per_row, len(seat), jnp.int32).at[seat].set(jnp.arange(len(seat)), mode="drop")
    read = jnp.zeros(count, bool).at[seat // per_row].max(live, mode="drop")
    known = jnp.where(seat < count * per_row, prompts.known[jnp.minimum(seat // per_row, count - 1)], 0)
    pairs = jnp.any(read.reshape(-1, 2), axis=1)
    return Readers(seat, slots.reshape(count, per_row), jnp.argsort(~pairs, stable=True), jnp.sum(pairs), known)


def attend(
    q: jax.Array,
    prompts: Prompts,
    layer: int,
    readers: Readers,
    *,
    first: jax.Array | None,
    precision: DecodePrecision,
) -> Partial:
    """Attention of q [W, H, d] over the slots' prompts, from position first [W] on (None: 0).

    A slot without a seat has a total of 0.
    """
    keys, values = prompts.keys[layer], prompts.values[layer]
    count, heads, length, size = values.shape
    per_row, group, scale = readers.slots.shape[1], q.shape[1] // heads, 1 / math.sqrt(q.shape[2])
    dot: Any = {"precision": Precision(str(keys.dtype)).dot, "preferred_element_type": jnp.float32}
    product = "kmh,khp->kmp" if precision.keys_last else "kmh,kph->kmp"
    # Queries by row: products of whole matrices, without a transposition inside.
    grouped = caches.grouped(q, heads, size).astype(keys.dtype)[readers.slots]  # [N, R, K, G, h]
    grouped = jnp.moveaxis(grouped, 2, 1).reshape(count, heads, per_row * group, size)
    begin = jnp.zeros_like(readers.slots) if first is None else first[readers.slots]
    begin = jnp.repeat(begin, group, axis=1)  # [N, R G]

    def of_row(
        q: jax.Array, k: jax.Array, v: jax.Array, known: jax.Array, begin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        at = jnp.arange(length)
        seen = (at < known) & (at >= begin[:, None])
        scores = jnp.where(seen, jnp.einsum(product, q, k, **dot) * scale, MASKED)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        mixed = jnp.einsum("kmp,kph->kmh", weights.astype(v.dtype), v, **dot)
        return top, jnp.sum(weights, axis=-1, keepdims=True), mixed

    arrays = grouped, keys, values, prompts.known, begin
    of_rows = jax.vmap(of_row)
    if precision.on_cpu:  # only rows that are read, since bandwidth is what a step costs; in pairs, for several cores

        def pair(i: jax.Array, parts: Any) -> Any:
            at = 2 * readers.pairs[i]
            own = of_rows(*(jax.lax.dynamic_slice_in_dim(array, at, 2) for array in arrays))
            return jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, at, 0), parts, own)

        shape = (count, heads, per_row * group)
        nothing = tuple(jnp.zeros((*shape, last), jnp.float32) for last in (1, 1, size))
        parts = jax.lax.fori_loop(0, readers.count, pair, nothing)
    else:
        parts = of_rows(*arrays)

    def by_slot(part: jax.Array) -> jax.Array:
        of_seats = jnp.moveaxis(part.reshape(count, heads, per_row, group, -1), 1, 2)
        return of_seats.reshape(count * per_row, heads, group, -1)[jnp.minimum(readers.seat, count * per_row - 1)]

    top, total, mixed = map(by_slot, parts)
    # A row that is empty, or before `first`, has weights of 1 where nothing is seen: the merge multiplies them by 0.
    seated = (readers.seat < count * per_row)[:, None, None, None]
    return Partial(jnp.where(seated, top, MASKED), jnp.where(seated, total, 0.0), jnp.where(seated, mixed, 0.0))


# ------------------------------------------------------------------------------------------------------ the host


@dataclasses.dataclass(frozen=True)
class _Row:
    request: GroupRequest
    step: int | None  # of the version that computed the prompt
    free: list[int]  # seats


class PromptRows:
    """Which rows hold which prompt, who reads them, and their arrays on the device. Not thread-safe."""

    def __init__(self, config: DecoderConfig, precision: DecodePrecision):
        self.count = 0  # rows that may be used; 0: nothing is shared
        self.length = 0  # positions of a row
        self.arrays: Prompts | None = None
        self.readers: dict[Sequence, int] = {}  # sequence -> row * R + seat
        self._config, self._precision, self._seats = config, precision, seats(precision)
        self._rows: dict[int, _Row] = {}  # those that are read

    def allow(self, slots: int, rows: int) -> None:
        """Lets up to twice as many sequences as slots have seats, in an even number of rows, at most `rows`."""
        self.count = max(0, min(2 * slots // self._seats, rows)) // 2 * 2

    def __bool__(self) -> bool:
        """Whether some row is read."""
        return bool(self._rows)

    @property
    def needed(self) -> int:
        """Positions of the longest prompt that is read."""
        return max((len(row.request.prompt) - 1 for row in self._rows.values()), default=0)

    def takes(self, request: GroupRequest) -> bool:
        """Whether completions of this request may share its prompt."""
        enough = len(request.completions) >= SMALLEST_GROUP and len(request.prompt) > SHORTEST
        return bool(self.count) and enough and not request.session

    def like(self, length: int) -> Prompts | None:
        """Shapes and dtypes of the arrays with rows of this length; None for 0."""
        if not length:
            return None
        return jax.eval_shape(lambda: empty(self._config, self._precision, rows=self.count, length=length))

    def enter(self, sequences: list[Sequence], step: int | None, prefix: Any) -> dict[Sequence, int]:
        """Gives seats to sequences of one request whose prompt has this prefix; not to all if no row is free."""
        request, given = sequences[0].request, dict[Sequence, int]()
        for number in sorted(range(self.count), key=lambda number: number not in self._rows):  # rows in use first
            row = self._rows.get(number)
            if len(given) < len(sequences) and row is None:
                row = self._rows[number] = _Row(request, step, list(range(self._seats)))
                fitted = fit_prefix(*prefix[:2], length=self.length, keys_last=self._precision.keys_last)
                self.arrays = put(self.arrays, fitted, np.int32(number), np.int32(len(request.prompt) - 1))
            if row is not None and row.request is request and row.step == step:
                for sequence in sequences[len(given) :][: len(row.free)]:
                    given[sequence] = number * self._seats + row.free.pop()
        self.readers |= given
        return given

    def leave(self, sequence: Sequence) -> None:
        """Frees the sequence's seat, if it has one."""
        if sequence in self.readers:
            number, seat = divmod(self.readers.pop(sequence), self._seats)
            self._rows[number].free.append(seat)
            if len(self._rows[number].free) == self._seats:
                del self._rows[number]

    def set_length(self, length: int) -> None:
        """Pads or cuts the rows; makes new ones where nobody reads any."""
        if length == self.length:
            return
        if self.arrays is not None and self._rows:
            fit(self.arrays.keys, self.arrays.values, length, keys_last=self._precision.keys_last)
        else:
            self.arrays = None  # released before the next ones are made
            self.arrays = empty(self._config, self._precision, rows=self.count, length=length)
        self.length = length

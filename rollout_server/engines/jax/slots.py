"""The host's side of the slots: which are taken, how far each has come, and what it has produced.

    pool.prefill(weights, prompt) -> prefix      once per group and version
    pool.enter(prefix, prompt, entries)          entries take free slots
    pool.dispatch(weights, step)                 starts one chunk on the device and returns at once
    pool.collect() -> [Finished]                 waits for the oldest chunk started

A chunk may be started before the one before it was collected; an end is then noticed a chunk late, and the slot idles
for that chunk. A slot that is left, or taken by another owner, while chunks are on their way takes nothing from them.
Where few slots are taken they are moved to the front, and a chunk runs those only (jax_programs.py).

Not thread-safe: the engine's thread owns it. It knows no queue and no versions beyond the number it is given per chunk.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import time
from typing import Any

import jax
import numpy as np

from rollout_server.engines.jax import decode
from rollout_server.engines.jax.decode import NO_TOKEN, Output, Settings
from rollout_server.engines.jax.programs import Program, Programs, buckets, widths
from rollout_server.engines.jax.weights import DecodeWeights
from scalerl_jax.contract.codec import CompletionRequest, GroupRequest
from scalerl_jax.model.decoder import Precision
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.system import memory

SMALLEST_PREFILL = 32
SMALLEST_CACHE = 64
SHORT_CACHE = 512  # up to here, where models are small and compile quickly, there are sizes in between
ALIGNMENT = 32  # of the cache: odd lengths cost more than they save
PATIENCE = 4  # chunks until a cache that is too long is cut: each change copies it

_REASONS = {decode.STOP: "stop", decode.LENGTH: "length"}
_MOST = 2**31 - 1

Prefix = Any  # (keys, values) on the device, of decode.prefill


@dataclasses.dataclass(frozen=True)
class Entry:
    """A completion that takes a slot; `owner` is the caller's own."""

    owner: Any
    request: GroupRequest
    completion: CompletionRequest


@dataclasses.dataclass(frozen=True)
class Finished:
    owner: Any
    token_ids: np.ndarray  # [tokens] int32
    logprobs: np.ndarray  # [tokens] float32
    versions: tuple[tuple[int, int, int], ...]  # (step, start, end)
    forced: tuple[tuple[int, int], ...]  # (start, end)
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk on its way."""

    output: Output
    step: int  # of the weights it runs with
    tenancies: np.ndarray  # [W] int64: whose tokens they are
    slots: np.ndarray  # [W] int64: where those are now


class SlotPool:
    def __init__(self, config: DecoderConfig, precision: Precision, *, slots: int, maximum: int, steps: int):
        self.slots = slots
        self.sampled_tokens = 0
        self.forced_tokens = 0
        self.prefill_tokens = 0
        self.prefills = 0
        self._config, self._precision = config, precision
        self._steps, self._maximum = steps, maximum
        longest = -(-maximum // ALIGNMENT) * ALIGNMENT
        self._prefill_buckets = buckets(SMALLEST_PREFILL, longest)
        # A long cache gets no tiny sizes: their chunks would be quick anyway.
        self._lengths = buckets(max(SMALLEST_CACHE, longest // 16), longest, halfway=longest <= SHORT_CACHE)
        self._length = self._lengths[0]  # the cache's now
        self._state = decode.empty_state(config, precision, slots=slots, length=self._length)
        self._too_long = 0  # chunks in a row for which a shorter cache would have done
        self._owners: list[Any] = [None] * slots
        self._free = list(range(slots))  # a heap: those at the front are taken first
        self._programs = Programs(widths(slots, copies_are_cheap=jax.default_backend() == "cpu"), self._compile_chunk)
        self._weights_like: Any = None  # shapes and dtypes
        # A new number whenever a slot changes hands.
        self._tenancy = np.zeros(slots, np.int64)
        self._tenancies = 0
        self._reach = np.zeros(slots, np.int64)  # the next position fed, after all chunks started
        self._chunks: collections.deque[_Chunk] = collections.deque()
        # What each slot has produced; a chunk's whole width is written, so rows are a chunk wider than the cache.
        shape = (slots, longest + steps)
        self._produced = np.zeros(slots, np.int64)
        self._tokens = np.zeros(shape, np.int32)
        self._logprobs = np.zeros(shape, np.float32)
        self._forced = np.zeros(shape, bool)
        self._versions = np.zeros(shape, np.int64)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def busy(self) -> int:
        return self.slots - len(self._free)

    @property
    def on_their_way(self) -> int:
        """Chunks started and not collected."""
        return len(self._chunks)

    def close(self) -> None:
        """Waits for what is being compiled."""
        self._programs.close()

    def warm_up(self, weights: DecodeWeights) -> None:
        """Compiles everything that serving begins with. No slot may be taken."""
        assert not self.busy
        nobody = np.full(self.slots, self.slots, np.int32)
        prefixes = [self._run_prefill(weights, np.zeros(size, np.int32)) for size in self._prefill_buckets]
        for length in self._lengths:
            for other in self._lengths:  # there and back, whatever comes to what
                self._set_length(other)
                self._set_length(length)
            for prefix in prefixes:
                self._insert(prefix, nobody, 0, 0, 0, decode.empty_settings(self.slots))
            compiling, chunk = self._time_chunk(weights), self._time_chunk(weights)
            self._programs.price(length, chunk=chunk, compiling=compiling)
            self._move_on_device([], [])
        self._set_length(self._lengths[0])
        jax.block_until_ready(self._state)
        memory.trim()  # XLA takes tens of MiB to compile

    def _time_chunk(self, weights: DecodeWeights) -> float:
        """Seconds of a chunk of all slots, and of compiling it if it is the first."""
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        self._run_chunk(weights, self.slots, None)
        jax.block_until_ready(self._state)
        return time.perf_counter() - began

    # ------------------------------------------------------------------------------------------------- entering

    def prefill(self, weights: DecodeWeights, prompt: np.ndarray) -> Prefix:
        """Keys and values of a prompt [tokens] int32, all but its last token, which the decode loop feeds."""
        known = len(prompt) - 1
        padded = np.zeros(next(size for size in self._prefill_buckets if size >= known), np.int32)
        padded[:known] = prompt[:-1]
        self.prefills += 1
        self.prefill_tokens += known
        return self._run_prefill(weights, padded)

    def enter(self, prefix: Prefix, entries: list[Entry]) -> None:
        """Gives entries of one group a slot each; there must be enough. `prefix` is the prompt's, of `prefill`."""
        assert 0 < len(entries) <= len(self._free)
        prompt = entries[0].request.prompt
        slots = np.full(self.slots, self.slots, np.int32)
        settings = decode.empty_settings(self.slots)
        for i, entry in enumerate(entries):
            slots[i] = slot = heapq.heappop(self._free)
            _fill(settings, slot, entry)
            self._take(slot, entry.owner)
            self._reach[slot] = len(prompt) - 1
            self._produced[slot] = 0
        if len(prompt) > self._length:
            self._set_length(next(length for length in self._lengths if length >= len(prompt)))
        self._insert(prefix, slots, len(entries), int(prompt[-1]), len(prompt) - 1, settings)

    def leave(self, owner: Any) -> None:
        """Frees the slot of an owner that has one. The device goes on with it, unheard, until it is taken again."""
        slot = next(i for i, other in enumerate(self._owners) if other is owner)
        self._take(slot, None)
        heapq.heappush(self._free, slot)

    def _take(self, slot: int, owner: Any) -> None:
        self._owners[slot] = owner
        self._tenancies += 1
        self._tenancy[slot] = self._tenancies

    # ------------------------------------------------------------------------------------------------- decoding

    def dispatch(self, weights: DecodeWeights, step: int) -> None:
        """Starts a chunk with these weights, which are those of version `step`."""
        if self._weights_like is None:
            self._weights_like = jax.eval_shape(lambda: weights)
        taken = [slot for slot, owner in enumerate(self._owners) if owner is not None]
        self._reach[taken] += self._steps
        reach = min(int(self._reach[taken].max()), self._maximum)
        length = next(length for length in self._lengths if length >= reach)
        self._too_long = self._too_long + 1 if length < self._length else 0
        if length > self._length or self._too_long > PATIENCE:
            self._set_length(length)
        width, program = self._programs.narrowest(len(taken), self._length)
        self._gather([slot for slot in taken if slot >= width])
        output = self._run_chunk(weights, width, program)
        self._chunks.append(_Chunk(output, step, self._tenancy[:width].copy(), np.arange(width)))

    def _gather(self, origins: list[int]) -> None:
        """Moves these to the first free slots."""
        if not origins:
            return
        targets = [heapq.heappop(self._free) for _ in origins]
        for origin, target in zip(origins, targets):
            self._owners[target], self._tenancy[target] = self._owners[origin], self._tenancy[origin]
            self._take(origin, None)
            heapq.heappush(self._free, origin)
        of_slots = (self._reach, self._produced, self._tokens, self._logprobs, self._forced, self._versions)
        for rows in of_slots:
            rows[targets] = rows[origins]
        now = np.arange(self.slots)
        now[origins] = targets
        for chunk in self._chunks:
            chunk.slots[:] = now[chunk.slots]
        self._move_on_device(origins, targets)

    def collect(self) -> list[Finished]:
        """Waits for the oldest chunk started; the completions that ended in it, their slots free again."""
        chunk = self._chunks.popleft()
        output = jax.device_get(chunk.output)
        heard = chunk.tenancies == self._tenancy[chunk.slots]
        heard &= np.array([self._owners[slot] is not None for slot in chunk.slots])
        columns = np.flatnonzero(heard)
        slots, live = chunk.slots[columns], output.live[:, columns]
        counts = live.sum(axis=0)
        forced = int((output.forced[:, columns] & live).sum())
        self.forced_tokens += forced
        self.sampled_tokens += int(counts.sum()) - forced
        rows = slots[:, None], self._produced[slots][:, None] + np.arange(self._steps)
        self._tokens[rows] = output.tokens.T[columns]
        self._logprobs[rows] = output.logprobs.T[columns]
        self._forced[rows] = output.forced.T[columns]
        self._versions[rows] = chunk.step
        self._produced[slots] += counts
        ends = output.finish[columns]
        return [self._finish(int(slot), _REASONS[int(end)]) for slot, end in zip(slots, ends) if end != decode.RUNNING]

    def _finish(self, slot: int, reason: str) -> Finished:
        count = self._produced[slot]
        forced, versions = self._forced[slot, :count], self._versions[slot, :count]
        finished = Finished(
            owner=self._owners[slot],
            token_ids=self._tokens[slot, :count].copy(),
            logprobs=self._logprobs[slot, :count].copy(),
            versions=tuple((int(versions[a]), a, b) for a, b in _runs(versions)),
            forced=tuple((a, b) for a, b in _runs(forced) if forced[a]),
            finish_reason=reason,
        )
        self.leave(finished.owner)
        return finished

    # ----------------------------------------------------------------------- the device, always in the same shapes

    def _run_prefill(self, weights: DecodeWeights, tokens: np.ndarray) -> Prefix:
        return decode.prefill(weights, tokens, config=self._config, precision=self._precision)

    def _insert(
        self, prefix: Prefix, slots: np.ndarray, count: int, token: int, position: int, settings: Settings
    ) -> None:
        prefix = (list(prefix[0]), list(prefix[1]))
        decode.fit(*prefix, self._length)
        numbers = np.array([count, token, position], np.int32)
        self._state = decode.insert(self._state, prefix, slots, numbers, settings)

    def _set_length(self, length: int) -> None:
        decode.fit(self._state.keys, self._state.values, length)
        self._length, self._too_long = length, 0

    def _move_on_device(self, origins: list[int], targets: list[int]) -> None:
        padded = [np.pad(np.array(slots, np.int32), (0, self.slots - len(slots))) for slots in (origins, targets)]
        self._state = decode.move(self._state, *padded, np.int32(len(origins)))

    def _run_chunk(self, weights: DecodeWeights, width: int, program: Program | None) -> Output:
        run = program or functools.partial(decode.decode_chunk, **self._chunk_settings(width))
        self._state, output = run(weights, self._state)
        return output

    def _chunk_settings(self, width: int) -> dict[str, Any]:
        return {
            "config": self._config,
            "precision": self._precision,
            "steps": self._steps,
            "maximum": self._maximum,
            "width": width,
        }

    def _compile_chunk(self, width: int, length: int) -> Program:
        """On another thread: reads nothing that changes."""
        state = jax.eval_shape(
            lambda: decode.empty_state(self._config, self._precision, slots=self.slots, length=length)
        )
        program = decode.decode_chunk.lower(self._weights_like, state, **self._chunk_settings(width)).compile()
        memory.trim()  # XLA takes tens of MiB to compile
        return program


def _fill(settings: Settings, row: int, entry: Entry) -> None:
    """Row `row` of host settings from a request that `check_request` has passed."""
    sampling, interruption = entry.request.sampling, entry.request.interruption
    phrase, end = interruption.text_token_ids, interruption.end_of_thinking_token_ids
    settings.seed[row] = (entry.completion.seed & 0xFFFFFFFF, entry.completion.seed >> 32)
    settings.temperature[row] = sampling.temperature
    settings.top_k[row] = min(sampling.top_k, _MOST)
    settings.top_p[row] = sampling.top_p
    settings.thinking_budget[row] = min(entry.completion.thinking_budget, _MOST)
    settings.answer_budget[row] = min(sampling.answer_budget, _MOST)
    settings.phrase[row, : len(phrase)] = phrase
    settings.phrase_length[row] = len(phrase)
    settings.end[row, len(settings.end[row]) - len(end) :] = end
    settings.stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each stretch of equal values."""
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return list(itertools.pairwise(edges))


assert NO_TOKEN < 0  # so that padding never equals a token

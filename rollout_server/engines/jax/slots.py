"""The host's side of the slots: which are taken, the position of each, and the tokens it has produced.

    pool.prefill(weights, prompt) -> prefix      once per request and version
    pool.resume(weights, sequence) -> prefix     instead of it, if the previous turn's is kept (caches.py)
    pool.enter(prefix, sequences)                sequences of one request take free slots, and seats (prompts.py)
    pool.dispatch(weights, step)                 starts one chunk on the device and returns at once
    pool.collect() -> [sequence]                 waits for the oldest chunk; the sequences that ended in it

A chunk may be started before the one before it was collected; an end is then noticed a chunk late, and the slot idles
for that chunk. A sequence that left while chunks were in flight gets no tokens from them.
If few slots are taken they are moved to the front, and a chunk runs only those (compiled_programs.py).

Not thread-safe: the engine's thread owns it. It knows no queue, and of versions only the step given per chunk.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import logging
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from rollout_server.engines.jax import caches, decode, live_attention
from rollout_server.engines.jax.caches import KeptTurn, Prefix, SessionCaches
from rollout_server.engines.jax.compiled_programs import Kind, Program, Programs, buckets, side_by_side, widths
from rollout_server.engines.jax.decode import DecodeSettings, Output
from rollout_server.engines.jax.prompts import NO_SEAT, PromptRows
from rollout_server.engines.jax.weights import DecodePrecision, DecodeWeights
from rollout_server.engines.sequence import Sequence
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.system import memory

SMALLEST_PREFILL = 32
EXTENSIONS = 32, 128  # tokens fed at once after a prefix; more are fed in several calls
SMALLEST_CACHE = 64
SHORT_CACHE = 512  # up to this length, where models are small and compile quickly, there are sizes in between
ALIGNMENT = 32  # of the cache: odd lengths cost more than they save
PATIENCE = 4  # chunks before a cache that is too long is cut, since each change copies it

_REASONS = {decode.STOP: "stop", decode.LENGTH: "length"}
_MOST = 2**31 - 1
_FILTER_BYTES = 3 * 4  # a filter's bytes per slot and token of the vocabulary, besides the logits (sampling.py)


@dataclasses.dataclass(frozen=True)
class _DecodedChunk:
    """A chunk in flight."""

    output: Output
    step: int  # of the weights that it runs with
    columns: dict[Sequence, int]  # sequence -> column of the output, in the columns' order


class SlotPool:
    def __init__(
        self,
        config: DecoderConfig,
        precision: DecodePrecision,
        *,
        slots: int,
        maximum: int,
        steps: int,
        router_replay: bool = False,
        allocated: bool = True,
    ):
        """router_replay: records experts for sequences whose request asks for them. allocated: whether to allocate
        caches; without them it can only compile."""
        self.slots = slots
        self.sessions = SessionCaches(0)
        self.prompts = PromptRows(config, precision)
        self.prefills = 0
        self._config, self._precision = config, precision
        self._steps, self._maximum = steps, maximum
        self._of_every_prefill: Any = {"config": config, "precision": precision, "experts": router_replay}
        self._of_every_chunk: Any = {**self._of_every_prefill, "steps": steps, "maximum": maximum}
        in_tiles = precision.kept_apart and maximum >= live_attention.LONG_CACHE
        alignment = live_attention.LONGEST_TILE if in_tiles else ALIGNMENT
        longest = -(-maximum // alignment) * alignment
        smallest = max(SMALLEST_CACHE, alignment, longest // 16) // alignment * alignment
        self._prefill_buckets = buckets(SMALLEST_PREFILL, longest)
        # A long cache gets no tiny sizes, whose chunks would be quick anyway.
        self._lengths = buckets(smallest, longest, halfway=longest <= SHORT_CACHE)
        self._length = self._lengths[0]  # the cache's current length
        if allocated:
            self._state = decode.empty_state(config, precision, slots=slots, length=self._length)
        self._too_long = 0  # chunks in a row for which a shorter cache would suffice
        self._prompts_too_long = 0  # likewise, shorter rows of prompts
        self._taken: dict[Sequence, int] = {}  # sequence -> slot
        self._free = list(range(slots))  # a heap: the slots at the front are taken first
        self._programs = Programs(widths(slots, copies_are_cheap=precision.on_cpu), self._compile_chunk)
        self._weights_like: Any = None  # shapes and dtypes
        self._whole: dict[Kind, Program] = {}  # the chunk of all slots, where compiled beforehand
        self._compiling: dict[Kind, float] = {}  # seconds that compiling it took
        self._seconds: dict[int, float] = {}  # of a chunk of all slots, by length
        self._prefills: dict[int, Program] = {}  # by bucket, where compiled beforehand
        self._extensions: dict[tuple[int, int], Future[Program]] = {}  # by positions of the prefix, and tokens
        # By positions of the prompts: the chunks of so many slots; none: XLA cannot compile one.
        self._sharing: dict[int, Future[dict[tuple[int, Kind], Program]]] = {}
        self._lost = collections.defaultdict[int, float](float)  # seconds, by positions of the prompts
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="extension-compiling")
        self._reach = np.zeros(slots, np.int64)  # the next position fed, after all chunks started
        self._chunks: collections.deque[_DecodedChunk] = collections.deque()

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences in slots."""
        return list(self._taken)

    @property
    def busy(self) -> int:
        return len(self._taken)

    @property
    def in_flight(self) -> int:
        """Number of chunks started and not collected."""
        return len(self._chunks)

    def close(self) -> None:
        """Waits for the current compilations."""
        self._compiler.shutdown(cancel_futures=True)
        self._programs.close()

    @property
    def longest(self) -> int:
        """Number of positions of the longest cache."""
        return self._lengths[-1]

    def compile(self, weights_like: Any, *, longest_only: bool = False) -> int:
        """Compiles the chunks of all slots and the prefills, for weights of these shapes and dtypes.

        Returns the most bytes that one of them needs besides its arguments. No array is made. longest_only: only the
        longest of each, which need most.
        """
        last = slice(-1 if longest_only else None, None)
        self._weights_like = weights_like

        def compile_prefill(size: int) -> None:
            tokens = jax.ShapeDtypeStruct((size,), np.int32)
            self._prefills[size] = decode.prefill.lower(weights_like, tokens, **self._of_every_prefill).compile()

        wholes = [Kind(length, False) for length in self._lengths[last]]
        side_by_side([
            *(functools.partial(self._compile_whole, kind) for kind in wholes),
            *(functools.partial(compile_prefill, size) for size in self._prefill_buckets[last]),
        ])  # fmt: skip
        working = max(memory.working_bytes(program) for program in (*self._whole.values(), *self._prefills.values()))
        return working + _FILTER_BYTES * self.slots * self._config.vocab_size

    def _compile_whole(self, kind: Kind) -> None:
        began = time.perf_counter()
        self._whole[kind] = self._compile_chunk(self.slots, kind)
        self._compiling[kind] = time.perf_counter() - began

    def warm_up(self, weights: DecodeWeights) -> None:
        """Compiles everything else needed at the start, and times chunks. No slot may be taken."""
        assert not self.busy and self._whole
        none, no_seats = np.full(self.slots, self.slots, np.int32), np.full(self.slots, NO_SEAT, np.int32)
        prefixes = [self._run_prefill(weights, np.zeros(size, np.int32)) for size in self._prefill_buckets]
        for length in self._lengths:
            for other in self._lengths:  # there and back, for every pair of lengths
                self._set_length(other)
                self._set_length(length)
            for prefix in prefixes:
                self._insert(prefix, none, no_seats, (0, 0, 0), decode.empty_settings(self.slots))
            self._time_chunk(weights)
            self._seconds[length] = self._time_chunk(weights)
            self._price(Kind(length, False))
            self._move_on_device([], [])
        self._set_length(self._lengths[0])
        jax.block_until_ready(self._state)
        memory.trim()  # XLA takes tens of MiB to compile

    def _time_chunk(self, weights: DecodeWeights) -> float:
        """Seconds of a chunk of all slots."""
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        self._run_chunk(weights, self.slots, Kind(self._length, False), None)
        jax.block_until_ready(self._state)
        return time.perf_counter() - began

    def _price(self, kind: Kind) -> None:
        if kind.length in self._seconds:
            self._programs.price(kind, chunk=self._seconds[kind.length], compiling=self._compiling[kind])

    # ------------------------------------------------------------------------------------------------- entering

    def prefill(self, weights: DecodeWeights, prompt: np.ndarray) -> Prefix:
        """Keys and values of a prompt [tokens] int32, all but its last token, which the decode loop feeds."""
        known = len(prompt) - 1
        padded = np.zeros(next(size for size in self._prefill_buckets if size >= known), np.int32)
        padded[:known] = prompt[:-1]
        self.prefills += 1
        return self._run_prefill(weights, padded)

    def resume(self, weights: DecodeWeights, sequence: Sequence) -> tuple[Prefix, KeptTurn] | None:
        """The prompt's prefix, extended from the previous turn's; None if the prompt must be prefilled.

        The programs are compiled in the background when first needed.
        """
        kept, prompt = self.sessions.pop(sequence), sequence.request.prompt
        if kept is None:
            return None
        known, (keys, values, _) = len(kept.tokens), kept.prefix
        rest = prompt[known:-1]
        chunk = next((size for size in EXTENSIONS if size >= len(rest)), EXTENSIONS[-1])
        padded = np.pad(rest, (0, -len(rest) % chunk))
        length = next((size for size in self._prefill_buckets if size >= known + len(padded)), None)
        program = self._extension(length, chunk) if length is not None else None
        if length is None or program is None:
            return None
        keys, values = caches.fit_prefix(keys, values, length=length, keys_last=self._precision.keys_last)
        chosen = [] if kept.experts is None else [kept.experts]
        for at in range(0, len(padded), chunk):
            keys, values, experts = program(weights, keys, values, padded[at : at + chunk], np.int32(known + at))
            chosen += [experts] * (experts is not None)
        return (keys, values, np.concatenate(chosen) if chosen else None), kept

    def _extension(self, length: int, chunk: int) -> Program | None:
        key = length, chunk
        if key not in self._extensions:
            self._extensions[key] = self._compiler.submit(self._compile_extension, *key)
        return self._extensions[key].result() if self._extensions[key].done() else None

    def _compile_extension(self, length: int, chunk: int) -> Program | None:
        """On another thread: reads nothing that changes."""
        prompt = jax.ShapeDtypeStruct((length,), np.int32)
        prefix = jax.eval_shape(functools.partial(decode.prefill, **self._of_every_prefill), self._weights_like, prompt)
        tokens, known = jax.ShapeDtypeStruct((chunk,), np.int32), jax.ShapeDtypeStruct((), np.int32)
        arguments = self._weights_like, *prefix[:2], tokens, known
        try:
            return decode.extend.lower(*arguments, **self._of_every_prefill).compile()
        except jax.errors.JaxRuntimeError as error:
            logging.warning("no prefix of %d positions can be extended, turns are prefilled whole: %s", length, error)
            return None

    def _keep(self, sequence: Sequence, slot: int) -> None:
        """Keeps the prefix of a sequence that has ended, for the next turn of its session."""
        # A slot that ends in mid-chunk feeds its last token again, with the angles of later positions: leave it out.
        tokens = sequence.tokens_fed()[:-1]
        if not len(tokens):
            return
        length = min(next(size for size in self._prefill_buckets if size >= len(tokens)), self._length)
        keys, values = caches.copy_slot(
            self._state.keys, self._state.values, np.int32(slot), length=length, keys_last=self._precision.keys_last
        )
        experts = sequence.recorded_experts()
        experts = None if experts is None else experts[: len(tokens)]
        self.sessions.store(sequence, KeptTurn(tokens, (keys, values, None), experts, sequence.only_step()))

    def enter(self, prefix: Prefix, sequences: list[Sequence], *, step: int | None) -> None:
        """Assigns a slot to each of these sequences of one request; enough slots must be free.

        prefix: the prompt's. step: of the version that computed all of it; None if several did.
        """
        assert 0 < len(sequences) <= len(self._free)
        known = len(sequences[0].request.prompt) - 1
        seats: dict[Sequence, int] = {}
        if self.prompts.takes(sequences[0].request) and self._share(self._prompt_length(known)):
            self.prompts.set_length(self._prompt_length(known))
            seats = self.prompts.enter(sequences, step, prefix)
        for own, group in ((prefix, [one for one in sequences if one not in seats]), (None, list(seats))):
            if group:
                self._enter(own, group, seats, known)
        for sequence in sequences:
            sequence.prefix_step = step
            if prefix[2] is not None and sequence.request.router_replay:
                sequence.begin_experts(prefix[2], known)

    def _enter(self, prefix: Prefix | None, sequences: list[Sequence], seats: dict[Sequence, int], known: int) -> None:
        """prefix: None where the sequences have seats."""
        slots = np.full(self.slots, self.slots, np.int32)
        of_slot = np.full(self.slots, NO_SEAT, np.int32)
        settings = decode.empty_settings(self.slots)
        cached = 0 if prefix is None else known
        for i, sequence in enumerate(sequences):
            slots[i] = slot = self._taken[sequence] = heapq.heappop(self._free)
            of_slot[slot] = seats.get(sequence, NO_SEAT)
            _fill(settings, slot, sequence)
            self._reach[slot] = cached
        if cached + 1 > self._length:
            self._set_length(next(length for length in self._lengths if length > cached))
        last = int(sequences[0].request.prompt[-1])
        self._insert(prefix, slots, of_slot, (len(sequences), last, known), settings)

    def _prompt_length(self, known: int) -> int:
        """Positions of the shared prompts once one with `known` is among them."""
        return next(size for size in self._prefill_buckets if size >= max(known, self.prompts.needed))

    def _share(self, length: int) -> bool:
        """Whether prompts of up to `length` positions can be shared: whether all that needs is compiled."""
        if Kind(self._lengths[0], False, length) in self._whole:
            return True
        future = self._sharing.get(length)
        if future is None or not future.done():
            return False
        programs = future.result()
        for (width, kind), program in programs.items():
            if width == self.slots:
                self._whole[kind] = program
                self._price(kind)
            else:
                self._programs.add(width, kind, program)
        return bool(programs)

    def _compile_sharing(self, length: int) -> None:
        """Compiles on another thread, for as many slots as chunks were compiled for so far."""
        kinds = [Kind(own, False, length) for own in self._lengths]
        widths = [self.slots, *self._programs.compiled]

        def compile_() -> dict[tuple[int, Kind], Program]:
            programs = {}
            try:
                for width, kind in itertools.product(widths, kinds):
                    began = time.perf_counter()
                    programs[width, kind] = self._compile_chunk(width, kind)
                    self._compiling[kind] = time.perf_counter() - began
            except jax.errors.JaxRuntimeError as error:
                logging.warning("prompts of up to %d positions are copied for each completion: %s", length, error)
                return {}
            logging.info("completions of a group share prompts of up to %d positions", length)
            return programs

        self._sharing[length] = self._compiler.submit(compile_)

    def _lose(self, length: int, width: int) -> None:
        """Counts the time that a chunk loses because prompts are copied; compiles what sharing needs when it pays."""
        copied = [one for one in self._taken if self.prompts.takes(one.request) and one not in self.prompts.readers]
        if not copied:
            return
        known = {self._taken[one]: len(one.request.prompt) - 1 for one in copied}
        prompts = self._prompt_length(max(known.values()))
        if prompts in self._sharing:
            return
        reach = max(int(self._reach[slot]) - known.get(slot, 0) for slot in self._taken.values())
        shorter = next(size for size in self._lengths if size >= min(reach, self._maximum))
        lost = self._seconds.get(length, 0.0) - self._seconds.get(shorter, 0.0)
        self._lost[prompts] += max(0.0, lost) * width / self.slots
        if self._lost[prompts] >= sum(self._compiling.get(Kind(own, False), math.inf) for own in self._lengths):
            self._compile_sharing(prompts)

    def leave(self, sequence: Sequence) -> None:
        """Frees a slot. The device continues its old contents, which are ignored, until the slot is taken again."""
        heapq.heappush(self._free, self._taken.pop(sequence))
        self.prompts.leave(sequence)

    # ------------------------------------------------------------------------------------------------- decoding

    def dispatch(self, weights: DecodeWeights, step: int) -> None:
        """Starts a chunk with these weights of version `step`."""
        if self._weights_like is None:
            self._weights_like = jax.eval_shape(lambda: weights)
        taken = sorted(self._taken.values())
        self._reach[taken] += self._steps
        reach = min(int(self._reach[taken].max()), self._maximum)
        length = next(length for length in self._lengths if length >= reach)
        self._too_long = self._too_long + 1 if length < self._length else 0
        if length > self._length or self._too_long > PATIENCE:
            self._set_length(length)
        self._shorten_prompts()
        kind = self._kind()
        width, program = self._programs.narrowest(len(taken), kind)
        self._lose(self._length, width)
        self._gather([slot for slot in taken if slot >= width])
        output = self._run_chunk(weights, width, kind, program)
        columns = dict(sorted(self._taken.items(), key=lambda item: item[1]))
        self._chunks.append(_DecodedChunk(output, step, columns))

    def _shorten_prompts(self) -> None:
        shorter = self._prompt_length(0)
        self._prompts_too_long = self._prompts_too_long + 1 if self.prompts and shorter < self.prompts.length else 0
        if self._prompts_too_long > PATIENCE and self._share(shorter):
            self.prompts.set_length(shorter)

    def _kind(self) -> Kind:
        """The kind of the next chunk. One with a filter is compiled here when first needed: sampling for training
        seldom uses one, so the start need not wait for it."""
        filtered = any(_filters(sequence) for sequence in self._taken)
        kind = Kind(self._length, filtered, self.prompts.length if self.prompts else 0)
        if kind.filtered and self._whole and kind not in self._whole:
            self._compile_whole(kind)
            self._price(kind)
            logging.info("compiled in %.1f s for top-k and top-p, %d positions", self._compiling[kind], kind.length)
        return kind

    def _gather(self, origins: list[int]) -> None:
        """Moves these slots to the first free ones."""
        if not origins:
            return
        targets = [heapq.heappop(self._free) for _ in origins]
        moves = dict(zip(origins, targets))
        self._taken = {sequence: moves.get(slot, slot) for sequence, slot in self._taken.items()}
        self._reach[targets] = self._reach[origins]
        for origin in origins:
            heapq.heappush(self._free, origin)
        self._move_on_device(origins, targets)

    def collect(self) -> list[Sequence]:
        """Waits for the oldest chunk; returns the sequences that ended in it, whose slots are then free."""
        chunk, finished = self._chunks.popleft(), []
        output = jax.device_get(chunk.output)
        counts = output.live.sum(axis=0)
        tokens, logprobs, forced = (rows.T.tolist() for rows in (output.tokens, output.logprobs, output.forced))
        for sequence, column in chunk.columns.items():
            if sequence in self._taken:
                count = counts[column]
                produced = (rows[column][:count] for rows in (tokens, logprobs, forced))
                sequence.extend(*produced, chunk.step)
                if output.experts is not None and sequence.request.router_replay:
                    sequence.fed(output.experts[:count, column].copy())  # a copy keeps only this part alive
                if output.finish[column] != decode.RUNNING:
                    sequence.finish_reason = _REASONS[int(output.finish[column])]
                    if sequence.request.session and sequence.finish_reason == "stop":
                        self._keep(sequence, self._taken[sequence])
                    self.leave(sequence)
                    finished.append(sequence)
        return finished

    # ----------------------------------------------------------------------- the device, always in the same shapes

    def _run_prefill(self, weights: DecodeWeights, tokens: np.ndarray) -> Prefix:
        if program := self._prefills.get(len(tokens)):
            return program(weights, tokens)
        return decode.prefill(weights, tokens, **self._of_every_prefill)

    def _insert(
        self,
        prefix: Prefix | None,
        slots: np.ndarray,
        seats: np.ndarray,
        numbers: tuple[int, int, int],
        settings: DecodeSettings,
    ) -> None:
        """See decode.insert."""
        fitted = None
        if prefix is not None:
            fitted = caches.fit_prefix(*prefix[:2], length=self._length, keys_last=self._precision.keys_last)
        self._state = decode.insert(self._state, fitted, slots, seats, np.array(numbers, np.int32), settings)

    def _set_length(self, length: int) -> None:
        caches.fit(self._state.keys, self._state.values, length, keys_last=self._precision.keys_last)
        self._length, self._too_long = length, 0

    def _move_on_device(self, origins: list[int], targets: list[int]) -> None:
        padded = [np.pad(np.array(slots, np.int32), (0, self.slots - len(slots))) for slots in (origins, targets)]
        self._state = decode.move(self._state, *padded, np.int32(len(origins)))

    def _run_chunk(self, weights: DecodeWeights, width: int, kind: Kind, program: Program | None) -> Output:
        program = program or self._whole.get(kind)
        run = program or functools.partial(decode.decode_chunk, **self._of_chunk(width, kind))
        self._state, output = run(weights, self._state, self.prompts.arrays if kind.prompts else None)
        return output

    def _of_chunk(self, width: int, kind: Kind) -> dict[str, Any]:
        return {**self._of_every_chunk, "width": width, "filtered": kind.filtered}

    def _compile_chunk(self, width: int, kind: Kind) -> Program:
        """On another thread: reads nothing that changes."""
        state = jax.eval_shape(
            lambda: decode.empty_state(self._config, self._precision, slots=self.slots, length=kind.length)
        )
        arguments = self._weights_like, state, self.prompts.like(kind.prompts)
        program = decode.decode_chunk.lower(*arguments, **self._of_chunk(width, kind)).compile()
        memory.trim()  # XLA takes tens of MiB to compile
        return program


def _filters(sequence: Sequence) -> bool:
    """Whether the sequence's top-k or top-p may drop a token."""
    sampling = sequence.request.sampling
    return sampling.top_k > 0 or sampling.top_p < 1


def _fill(settings: DecodeSettings, row: int, sequence: Sequence) -> None:
    """Fills row `row` of host settings from a request that `check_request` has passed."""
    sampling, interruption, wanted = sequence.request.sampling, sequence.request.interruption, sequence.wanted
    phrase, end = interruption.text_token_ids, interruption.end_of_thinking_token_ids
    settings.seed[row] = (wanted.seed & 0xFFFFFFFF, wanted.seed >> 32)
    settings.temperature[row] = sampling.temperature
    settings.top_k[row] = min(sampling.top_k, _MOST)
    settings.top_p[row] = sampling.top_p
    settings.thinking_budget[row] = min(wanted.thinking_budget, _MOST)
    settings.answer_budget[row] = min(sampling.answer_budget, _MOST)
    settings.phrase[row, : len(phrase)] = phrase
    settings.phrase_length[row] = len(phrase)
    settings.end[row, len(settings.end[row]) - len(end) :] = end
    settings.stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids

"""The embedded generator: the trainer's own model code behind the engine interface.

One thread decodes. Between two chunks of decode steps, in this order, it
    1. swaps the weights, if a version is staged and no request pinned to the one held is unfinished,
    2. frees the slots of sequences whose request has ended,
    3. gives free slots to waiting sequences, in the order of the requests; a request's prompt is prefilled once per
       version of the weights, so a sequence that starts after a swap starts from the new weights' keys and values,
    4. starts a chunk, then collects the oldest chunk in flight and returns the completions that ended in it.

On an accelerator chunk i + 1 is started before chunk i is collected, so the device never waits for the host, and an end
is noticed a chunk late. On a CPU host and device are the same cores: waiting costs nothing, an idle slot does.

A swap only replaces a reference: another thread has made the new version, from the old one where little changed.
The key/value cache stays, and every token carries the step of the weights that sampled it.

A session's next turn continues from the keys and values of its previous turn (caches.py); completions of a group share
those of their prompt (prompts.py).

Scores are teacher-forced log-probabilities: a prompt's pass through the same weights, one sequence after another. The
head is a separate program, for a chunk of tokens: only it is recompiled for another number of top ids or targets.

In the memory estimate (engines/engine_info.py) working memory is that of the largest compiled programs without their
arguments, as XLA reports it; copies of part of the cache by a chunk of fewer than all slots; and one layer's cache
twice, while it grows. Prefixes of sessions and shared prompts get part of what is left then, since they only save time.

Left out on purpose: paged caches, prefix reuse between groups, several devices (start one server per device).
"""

import asyncio
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from rollout_server.engines.engine import Changes, EngineOptions, check_score
from rollout_server.engines.engine_info import ITEMSIZE, EngineMemory, engine_info
from rollout_server.engines.jax import decode
from rollout_server.engines.jax.caches import Prefix
from rollout_server.engines.jax.compiled_programs import Program, buckets, side_by_side
from rollout_server.engines.jax.slots import SlotPool
from rollout_server.engines.jax.weights import (
    DecodePrecision,
    DecodeWeights,
    abstract_weights,
    decode_precision,
    decode_weights,
    model_params,
)
from rollout_server.engines.request_queue import QueuedEngine, RequestQueue
from rollout_server.engines.sequence import Sequence
from scalerl_jax.contract.codec import GroupRequest, ScoreRequest, Scores, Version
from scalerl_jax.model import row_blocks
from scalerl_jax.model.decoder import Precision, final_norm
from scalerl_jax.model.decoder_config import DecoderConfig, read_config
from scalerl_jax.model.head import chunk_of, logits, spread_of
from scalerl_jax.model.hf import Tensors
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.system import memory

SMALLEST = 256
SMALLEST_TOP = 8  # the smallest number of ids a token that scores are compiled for
BLOCK = 128  # token ids in a block of the vocabulary, see _top


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def _hidden(
    weights: DecodeWeights, tokens: jax.Array, *, config: DecoderConfig, precision: DecodePrecision
) -> list[jax.Array]:
    """tokens [length] int32 -> the head's inputs that predict the token after each, in chunks [C, width]."""
    x, *_ = decode.feed_prompt(weights, tokens, config=config, precision=precision)
    hidden = final_norm(x, weights["final_norm"], config, precision, lead=2)[0]
    chunk = min(chunk_of(0, precision.platform), len(tokens))
    hidden = jnp.pad(hidden, ((0, -len(tokens) % chunk), (0, 0)))
    return jnp.split(hidden, len(hidden) // chunk)


@functools.partial(jax.jit, static_argnames=("top_k", "config", "precision"))
def _score(
    weights: DecodeWeights,
    hidden: jax.Array,
    ids: jax.Array,
    *,
    top_k: int,
    config: DecoderConfig,
    precision: DecodePrecision,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """hidden [C, width], ids [C, k] -> log-probs of ids [C, k] (0 for ids < 0), top ids [C, top_k], their log-probs.

    No more than a chunk's logits exist at once.
    """
    logit = logits(model_params(weights, config), config, hidden, precision=precision)
    shifted, spread = spread_of(logit, precision)
    scored = jnp.where(ids < 0, 0.0, jnp.take_along_axis(shifted, jnp.maximum(ids, 0), axis=1) - spread)
    top, top_ids = _top(shifted, min(top_k, config.vocab_size))
    return scored, top_ids, top - spread


def _top(logit: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest values of each row [C, V], descending, and their indices.

    They lie in the `count` blocks with the largest maxima, so only these are sorted: sorting a whole large vocabulary
    would cost an accelerator more than the head does.
    """
    rows, vocabulary = logit.shape
    if count * BLOCK >= vocabulary:
        return jax.lax.top_k(logit, count)
    padding = -vocabulary % BLOCK
    blocks = jnp.pad(logit, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(rows, -1, BLOCK)
    _, likely = jax.lax.top_k(jnp.max(blocks, axis=-1), count)
    found, places = jax.lax.top_k(jnp.take_along_axis(blocks, likely[..., None], axis=1).reshape(rows, -1), count)
    return found, jnp.take_along_axis(likely, places // BLOCK, axis=1) * BLOCK + places % BLOCK


class SequenceScorer:
    """Computes scores; not thread-safe. Programs for log-probabilities alone are compiled at the start; those for top
    ids and targets, by powers of two of their number, when first requested."""

    def __init__(self, config: DecoderConfig, precision: DecodePrecision, *, longest: int):
        self._options: Any = {"config": config, "precision": precision}
        self._buckets = buckets(SMALLEST, longest)
        self._programs: dict[int, Program] = {}  # by bucket
        self._heads: dict[tuple[int, int, int], Program] = {}  # by tokens of a chunk, top ids, and ids a token

    def compile(self, weights_like: Any, *, longest_only: bool = False) -> int:
        """Compiles for weights of these shapes and dtypes; returns the most bytes that a program needs besides its
        arguments."""
        sizes = self._buckets[-1 if longest_only else None :]

        def compile_one(size: int) -> Program:
            return _hidden.lower(weights_like, jax.ShapeDtypeStruct((size,), np.int32), **self._options).compile()

        programs = side_by_side([functools.partial(compile_one, size) for size in sizes])
        self._programs = dict(zip(sizes, programs))
        heads = [self._head(weights_like, program.out_info[0], 0, 1) for program in programs]
        return max(map(memory.working_bytes, [*programs, *heads]))

    def _head(self, weights: Any, hidden: Any, top_k: int, ids: int) -> Program:
        """The head's program, compiled on first use."""
        kind = len(hidden), top_k, ids
        if kind not in self._heads:
            like = jax.ShapeDtypeStruct((kind[0], ids), np.int32)
            self._heads[kind] = _score.lower(weights, hidden, like, top_k=top_k, **self._options).compile()
        return self._heads[kind]

    def score(self, weights: DecodeWeights, request: ScoreRequest) -> Scores:
        """Scores a sequence of 1 to `longest` tokens."""
        token_ids, first, wanted = request.token_ids, request.first, request.ids()
        length, k = len(token_ids), wanted.shape[1] - 1
        scored = np.zeros(wanted.shape, np.float32)
        top_ids = np.full((length - first, request.top_k), -1, np.int32)
        top = np.zeros(top_ids.shape, np.float32)
        begin = max(first, 1)  # the first position that is predicted
        if begin < length:
            padded = np.zeros(next(size for size in self._buckets if size >= length), np.int32)
            padded[:length] = token_ids
            chunks = self._programs[len(padded)](weights, padded)
            size, wide = len(chunks[0]), max(SMALLEST_TOP, 1 << (max(k, request.top_k) - 1).bit_length())
            ids = np.full((len(chunks) * size, 1 + (wide if k else 0)), -1, np.int32)  # row p is for position p + 1
            ids[begin - 1 : length - 1, : 1 + k] = wanted[begin - first :]
            starts = range((begin - 1) // size * size, length - 1, size)
            head = self._head(weights, chunks[0], wide if request.top_k else 0, ids.shape[1])
            parts = [head(weights, chunks[start // size], ids[start : start + size]) for start in starts]
            found = [np.concatenate(arrays)[begin - 1 - starts[0] : length - 1 - starts[0]] for arrays in zip(*parts)]
            for whole, rows in zip((scored, top_ids, top), found):
                whole[begin - first :] = rows[:, : whole.shape[1]]
        return Scores(scored[:, 0], top_ids, top, scored[:, 1:])


def precision_of(options: EngineOptions) -> Precision:
    return Precision(options.compute_dtype, options.sync_dtype, options.head_precision, options.numerics)


def device_parts(
    options: EngineOptions, config: DecoderConfig, precision: DecodePrecision, *, allocated: bool = True
) -> tuple[SlotPool, SequenceScorer]:
    """All that computes on the device. allocated: as in SlotPool."""
    longest = min(options.maximum_tokens, config.max_positions)
    pool = SlotPool(
        config, precision, slots=options.slots, maximum=longest, steps=options.decode_chunk,
        router_replay=options.router_replay, allocated=allocated,
    )  # fmt: skip
    return pool, SequenceScorer(config, precision, longest=longest)


def of_model(
    options: EngineOptions, config: DecoderConfig, precision: DecodePrecision, weights: DecodeWeights
) -> EngineMemory:
    """The estimate before anything is compiled. weights: ShapeDtypeStructs of the decode weights."""
    return EngineMemory(
        slots=options.slots,
        maximum_tokens=min(options.maximum_tokens, config.max_positions),
        token=2 * config.layers * config.kv_heads * config.head_dim * ITEMSIZE[precision.cache],
        weights=sum(struct.size * struct.dtype.itemsize for struct in jax.tree.leaves(weights)),
        host_copy=sum(map(math.prod, hf_tensors(config).values())) * ITEMSIZE[options.sync_dtype],
        # A chunk of fewer than all slots copies at most half of them on a CPU, a quarter elsewhere
        # (compiled_programs.widths).
        # A cache grows layer by layer, keys and then values.
        copies=max(0.5 if precision.on_cpu else 0.25, 1 / config.layers / 2),
    )


def available_memory() -> tuple[int | None, int, int]:
    """Memory available: (bytes of the device, None on a CPU; bytes of the host; bytes that this process uses now)."""
    first = jax.local_devices()[0]
    stats = first.memory_stats() if first.platform != "cpu" else None
    process = memory.resident()
    device = stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None
    return device, memory.available() + process, process


class JaxEngine(QueuedEngine):
    """The engine; see engines/engine.py for each method.

    lookahead: chunks started before the oldest is collected; by default 1, on a CPU 0.

    Raises ValueError naming a fault of the folder or the memory that is too small. Returns when all programs needed at
    the start are compiled.
    """

    def __init__(self, options: EngineOptions, *, lookahead: int | None = None):
        self._config = config = read_config(options.model)
        self._precision = precision_of(options)
        info = engine_info("jax", options, config)
        if self._precision.bitwise:
            if fault := row_blocks.unfit(config):
                raise ValueError(f"--numerics=bitwise: {fault}")
            if options.head_precision == "bfloat16":
                raise ValueError("--head_precision=bfloat16: not with --numerics=bitwise")
            info = dataclasses.replace(info, numerics=row_blocks.fingerprint())
        computing = decode_precision(self._precision, jax.local_devices()[0])
        like = abstract_weights(config, self._precision)
        estimate = of_model(options, config, computing, like)
        device, host, process = available_memory()
        # Fail before minutes of compiling if it cannot fit.
        estimate.check(device=device, host=host, process=process)
        self._pool, self._scorer = parts = device_parts(options, config, computing)
        # A score may be computed at the same time as a chunk.
        working = sum(side_by_side([functools.partial(part.compile, like) for part in parts]))
        estimate = dataclasses.replace(estimate, working=working, maximum_tokens=self._pool.longest)
        memory.trim()  # XLA allocates tens of MiB to compile
        device, host, process = available_memory()
        logging.info("%s", estimate.check(device=device, host=host, process=process))
        spare = estimate.spare(device=device, host=host, process=process)
        if not self._precision.bitwise:  # bitwise prefills every turn whole, with one version and in the same blocks
            self._pool.sessions.limit = min(estimate.cache, spare // 2)
            self._pool.prompts.allow(options.slots, spare // 4 // (estimate.token * estimate.maximum_tokens))
        self._lookahead = (0 if computing.on_cpu else 1) if lookahead is None else lookahead

        # Guards everything below; notified when the decode thread may have work.
        self._changed = threading.Condition()
        super().__init__(RequestQueue(info, self._changed.notify, self._changed))
        self._weights = decode_weights(Tensors(options.model, config), config, self._precision)
        self._prefix: tuple[GroupRequest, Prefix] | None = None  # of the weights held; while its request waits
        self._incarnation = 0  # of the weights held

        self._pool.warm_up(self._weights)
        # One score at a time, since each needs working memory; on its own thread, so that no other thread waits.
        self._scoring = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------- called on an event loop

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        held = self._weights  # the previous version: loads come one at a time, and nothing else replaces the weights
        weights = await asyncio.to_thread(
            decode_weights, tensors, self._config, self._precision, held=held, changes=changes
        )
        return await self._queue.stage(version, weights)

    async def score(self, request: ScoreRequest) -> tuple[Scores, Version]:
        check_score(request, self.info)
        asked = [request]

        def score() -> tuple[Scores, Version]:
            with self._changed:  # the current weights, read only now: a waiting score keeps no old ones alive
                weights, version = self._weights, self._queue.version
            return self._scorer.score(weights, asked[0]), version

        try:
            return await asyncio.get_running_loop().run_in_executor(self._scoring, score)
        finally:
            asked.clear()  # a call that was given up stays in the executor's queue, but holds nothing

    async def close(self) -> None:
        """Ends every request at once."""
        with self._changed:
            self._queue.close()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._scoring.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._pool.close)

    # ------------------------------------------------------------------------------------------ the decode thread

    def _run(self) -> None:
        failure: RuntimeError | None = None
        try:
            while self._turn():
                pass
        except Exception as error:
            failure = RuntimeError("the decode thread has failed")
            failure.__cause__ = error
            raise
        finally:
            with self._changed:
                self._queue.close(failure)

    def _turn(self) -> bool:
        """Waits for work and does one turn of it. Returns False if the engine is closed."""
        queue, pool = self._queue, self._pool
        with self._changed:
            self._changed.wait_for(self._something_to_do)
            if queue.closed:
                return False
            with queue.swap() as weights:
                if weights is not None:
                    self._weights, self._prefix = weights, None
                    if queue.version.incarnation != self._incarnation:
                        pool.sessions.clear()
                        self._incarnation = queue.version.incarnation
            for sequence in pool.sequences:
                if sequence not in queue.running:
                    pool.leave(sequence)
            entering = queue.admit()
            next_request = queue.waiting[0].request if queue.waiting else None
            weights, step = self._weights, queue.version.step
        began = time.monotonic()
        for _, sequences in itertools.groupby(entering, key=lambda sequence: id(sequence.request)):
            self._enter(weights, step, list(sequences))
        if self._prefix is not None and self._prefix[0] is not next_request:
            self._prefix = None
        if pool.busy:
            pool.dispatch(weights, step)
        finished = []
        if pool.in_flight > (self._lookahead if pool.busy else 0):
            finished = pool.collect()
        with self._changed:
            queue.counters.busy_seconds += time.monotonic() - began
            for sequence in finished:
                queue.finish(sequence)
        return True

    def _something_to_do(self) -> bool:
        queue = self._queue
        return bool(queue.closed or queue.waiting or queue.running or queue.swap_is_due or self._pool.in_flight)

    def _enter(self, weights: DecodeWeights, step: int, sequences: list[Sequence]) -> None:
        """Assigns slots to sequences of one request."""
        request, counters = sequences[0].request, self._queue.counters
        for sequence in list(sequences) if request.session else ():
            if (resumed := self._pool.resume(weights, sequence)) is not None:
                prefix, kept = resumed
                self._pool.enter(prefix, [sequence], step=step if kept.step == step else None)
                counters.reused_tokens += len(kept.tokens)
                counters.prefill_tokens += len(request.prompt) - 1 - len(kept.tokens)
                sequences.remove(sequence)
        if not sequences:
            return
        if self._prefix is None or self._prefix[0] is not request:
            self._prefix = (request, self._pool.prefill(weights, request.prompt))
            counters.prefill_tokens += len(request.prompt) - 1
        self._pool.enter(self._prefix[1], sequences, step=step)

"""The embedded generator: the trainer's own model code behind the engine interface.

One thread decodes. Between two chunks of decode steps, in this order, it
    1. frees the slots of requests that were withdrawn,
    2. swaps the weights, if a version is staged and no request pinned to the one held is unfinished,
    3. gives free slots to waiting completions, in the order of the requests; a group's prompt is prefilled once per
       version of the weights, so a completion that starts after a swap starts from the new weights' keys and values,
    4. starts a chunk, then collects the oldest one on its way and hands out what ended in it.

On an accelerator chunk i + 1 is started before chunk i is collected, so the device never waits for the host, and an end
is noticed a chunk late. On a CPU host and device are the same cores: waiting costs nothing, an idle slot does.

A swap replaces a reference; the new version was made on another thread, from the one held where little changed.
The key/value cache stays, and every token carries the step of the weights that sampled it.

Left out on purpose: paged caches, prefix reuse between groups, several devices (start one server per device).
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import jax
import numpy as np

from rollout_server.engines.admission import check_request, check_room, check_version
from rollout_server.engines.engine import Changes, EngineInfo, EngineStatus, WrongVersion
from rollout_server.engines.jax import teacher_forcing
from rollout_server.engines.jax.slots import Entry, Finished, Prefix, SlotPool
from rollout_server.engines.jax.weights import DecodeWeights, changed_weights, decode_precision, decode_weights
from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, Version
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.model.decoder import Precision
from scalerl_jax.model.decoder_config import read_config
from scalerl_jax.model.hf import Tensors
from scalerl_jax.model.tensor_layout import hf_tensors


class _Group:
    """A request that is not finished."""

    def __init__(self, request: GroupRequest):
        self.request = request
        self.waiting = collections.deque(request.completions)
        self.running: set[_Running] = set()
        self.asked = time.monotonic()
        self.prefix: Prefix | None = None  # of the weights held; while completions wait
        self._loop = asyncio.get_running_loop()
        self.results: asyncio.Queue[Completion | Exception | None] = asyncio.Queue()  # None: that was the last

    def send(self, item: Completion | Exception | None) -> None:
        """From any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.results.put_nowait, item)


@dataclasses.dataclass(frozen=True, eq=False)
class _Running:
    """A completion in a slot."""

    group: _Group
    completion: CompletionRequest
    began: float


@dataclasses.dataclass(frozen=True)
class _Staged:
    version: Version
    weights: DecodeWeights
    pause: concurrent.futures.Future[float]


class JaxEngine:
    """See engines/engine.py for what each method promises.

    Args:
      model_dir: Hugging Face folder with config.json, *.safetensors and the tokenizer's files.
      slots: completions sampled at once.
      queue: completions that may wait for a slot.
      decode_chunk: steps between two looks at queue and weights.
      compute_dtype, sync_dtype: "float32" | "bfloat16"; weights are rounded to the wire's, then used in the other.
      head_precision: "default" | "highest", as in the trainer's config.
      maximum_tokens: prompt and completion together; no more than the model's positions.
      lookahead: chunks started before the oldest is collected; None: 1, and 0 on a CPU.

    Raises ValueError naming what is wrong with the folder. Returns when all that serving begins with is compiled.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        slots: int,
        queue: int,
        decode_chunk: int,
        compute_dtype: str,
        sync_dtype: str,
        head_precision: str = "default",
        maximum_tokens: int,
        lookahead: int | None = None,
    ):
        self._config = read_config(model_dir)
        self._precision = Precision(compute=compute_dtype, sync=sync_dtype, head=head_precision)
        maximum_tokens = min(maximum_tokens, self._config.max_positions)
        self.info = EngineInfo(
            name="jax",
            model_config=self._config.canonical_json(),
            tokenizer_fingerprint=tokenizer_fingerprint(model_dir),
            compute_dtype=compute_dtype,
            head_dtype="float32",
            head_precision=head_precision,
            sync_dtype=sync_dtype,
            devices=1,
            slots=slots,
            queue_capacity=queue,
            maximum_tokens=maximum_tokens,
            vocabulary=self._config.vocab_size,
            tensors=hf_tensors(self._config),
        )
        computing = decode_precision(self._precision)
        self._pool = SlotPool(self._config, computing, slots=slots, maximum=maximum_tokens, steps=decode_chunk)
        self._scorer = teacher_forcing.Scorer(self._config, computing, longest=maximum_tokens)
        self._lookahead = (0 if jax.default_backend() == "cpu" else 1) if lookahead is None else lookahead

        # Everything below is guarded by this condition; notified when the decode thread may have something to do.
        self._changed = threading.Condition()
        self._version = Version(0, 0)
        self._weights = decode_weights(Tensors(model_dir), self._config, self._precision)
        self._groups: dict[_Group, None] = {}  # unfinished, in the order they came
        self._withdrawn: list[_Running] = []  # their slots are to be freed
        self._queued = 0
        self._running = 0
        self._staged: _Staged | None = None
        self._closing = False
        self._failure: Exception | None = None
        self._busy_seconds = 0.0
        self._pause_seconds = 0.0

        self._pool.warm_up(self._weights)
        self._scorer.warm_up(self._weights)
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    @property
    def prefills(self) -> int:
        """Prompts prefilled since the start."""
        return self._pool.prefills

    # ---------------------------------------------------------------------------------- called on an event loop

    async def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        group = self._submit(request)
        try:
            while (item := await group.results.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._withdraw(group)

    def weight_buffer(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8)

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        held = self._weights  # of the version before: loads come one at a time, and nothing else replaces them
        weights = await asyncio.to_thread(
            changed_weights, held, tensors, changes, config=self._config, precision=self._precision
        )
        with self._changed:
            self._raise_if_over()
            assert self._staged is None or self._staged.pause.cancelled(), "one version at a time"
            self._staged = _Staged(version, weights, concurrent.futures.Future())
            self._changed.notify()
            pause = self._staged.pause
        return await asyncio.wrap_future(pause)

    async def score(self, token_ids: np.ndarray) -> tuple[np.ndarray, Version]:
        with self._changed:
            weights, version = self._weights, self._version
        return await asyncio.to_thread(self._scorer.score, weights, token_ids), version

    def status(self) -> EngineStatus:
        with self._changed:
            if self._failure is not None:
                raise RuntimeError("the decode thread has failed") from self._failure
            return EngineStatus(
                version=self._version,
                busy_slots=self._running,
                queued=self._queued,
                sampled_tokens=self._pool.sampled_tokens,
                forced_tokens=self._pool.forced_tokens,
                prefill_tokens=self._pool.prefill_tokens,
                busy_seconds=self._busy_seconds,
                pause_seconds=self._pause_seconds,
            )

    async def close(self) -> None:
        """Ends every request where it stands."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._pool.close)

    def _submit(self, request: GroupRequest) -> _Group:
        info = self.info
        check_request(request, info)
        group = _Group(request)
        with self._changed:
            self._raise_if_over()
            check_version(request, self._version)
            check_room(request, info, queued=self._queued, running=self._running)
            self._groups[group] = None
            self._queued += len(request.completions)
            self._changed.notify()
        return group

    def _withdraw(self, group: _Group) -> None:
        """Forgets what is left of a request; its slots are free before the next chunk."""
        with self._changed:
            self._remove(group)
            self._changed.notify()

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the decode thread has failed") from self._failure
        if self._closing:
            raise RuntimeError("the engine is closed")

    # ------------------------------------------------------------------------------------------ the decode thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            self._failure = error
            raise
        finally:
            with self._changed:
                for group in list(self._groups):
                    self._remove(group)
                    group.send(self._failure)
                if self._staged is not None:
                    self._staged.pause.cancel()

    def _turn(self) -> bool:
        """Waits until there is something to do and does one turn of it. False: the engine is closed."""
        with self._changed:
            self._changed.wait_for(self._something_to_do)
            if self._closing:
                return False
            for running in self._withdrawn:
                self._pool.leave(running)
            self._withdrawn.clear()
            self._swap()
            admitted = self._admit()
            weights, step = self._weights, self._version.step
        began = time.monotonic()
        for group, entries in admitted:
            if group.prefix is None:
                group.prefix = self._pool.prefill(weights, group.request.prompt)
            self._pool.enter(group.prefix, entries)
            if not group.waiting:
                group.prefix = None
        if self._pool.busy:
            self._pool.dispatch(weights, step)
        finished = []
        if self._pool.on_their_way > (self._lookahead if self._pool.busy else 0):
            finished = self._pool.collect()
        with self._changed:
            self._busy_seconds += time.monotonic() - began
            for one in finished:
                self._hand_out(one)
        return True

    def _something_to_do(self) -> bool:
        staged = self._staged is not None and self._may_swap(self._staged)
        return bool(
            self._closing or self._withdrawn or self._queued or self._running or staged or self._pool.on_their_way
        )

    def _may_swap(self, staged: _Staged) -> bool:
        other = staged.version.incarnation != self._version.incarnation
        return other or all(group.request.pinned_step is None for group in self._groups)

    def _swap(self) -> None:
        staged = self._staged
        if staged is None or not self._may_swap(staged):
            return
        self._staged = None
        if not staged.pause.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        self._weights, self._version = staged.weights, staged.version
        for group in list(self._groups):
            group.prefix = None
            if group.request.incarnation != staged.version.incarnation:
                self._remove(group)
                group.send(WrongVersion(f"weights of incarnation {staged.version.incarnation} have arrived"))
        for running in self._withdrawn:
            self._pool.leave(running)
        self._withdrawn.clear()
        pause = time.monotonic() - began
        self._pause_seconds += pause
        staged.pause.set_result(pause)

    def _admit(self) -> list[tuple[_Group, list[Entry]]]:
        """Moves completions from the queue to as many slots as are free."""
        admitted, free, now = [], self._pool.free, time.monotonic()
        for group in self._groups:
            if not free or not self._queued:
                break
            entries = []
            while group.waiting and free:
                running = _Running(group, group.waiting.popleft(), now)
                group.running.add(running)
                entries.append(Entry(running, group.request, running.completion))
                free -= 1
            if entries:
                admitted.append((group, entries))
                self._queued -= len(entries)
                self._running += len(entries)
        return admitted

    def _hand_out(self, finished: Finished) -> None:
        running: Any = finished.owner
        group = running.group
        if running not in group.running:
            self._withdrawn.remove(running)  # withdrawn while its last chunk ran; its slot is free already
            return
        group.running.remove(running)
        self._running -= 1
        group.send(
            Completion(
                incarnation=group.request.incarnation,
                group_id=group.request.group_id,
                index=running.completion.index,
                token_ids=finished.token_ids,
                logprobs=finished.logprobs,
                versions=finished.versions,
                forced=finished.forced,
                finish_reason=finished.finish_reason,
                queued_seconds=running.began - group.asked,
                sampling_seconds=time.monotonic() - running.began,
            )
        )
        if not group.waiting and not group.running:
            del self._groups[group]
            group.send(None)

    def _remove(self, group: _Group) -> None:
        """Takes an unfinished group out of queue and slots; nothing where it is finished."""
        if group not in self._groups:
            return
        del self._groups[group]
        self._queued -= len(group.waiting)
        self._running -= len(group.running)
        self._withdrawn.extend(group.running)
        group.waiting.clear()
        group.running.clear()

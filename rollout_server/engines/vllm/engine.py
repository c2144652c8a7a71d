"""The generator for GPU fleets: vLLM behind the engine interface.

vLLM decodes in separate processes; the queue, the slots, the thinking budget of each sequence and the versions are
here, on the server's event loop. A sequence is handed to vLLM only when a slot is free, so that nothing waits in vLLM
across a change of the weights.

A new version, under one lock:
    1. requests pinned to the version held are finished first,
    2. requests of another incarnation end; vLLM pauses between two steps, the others and their keys and values stay,
    3. a sequence without a token returns to the queue, so that it starts from the new weights' keys and values,
    4. the workers write the new weights in place, from memory that they share with this process,
    5. vLLM resumes only after a successful load. A failed one is repeated whole, from the host copy; after
       LOAD_ATTEMPTS the engine fails, the server exits, and the fleet continues without it.

Tokens received before the pause belong to the old version, all others to the new one. The prefix cache is salted
with the number of loads, so that no request uses keys and values that other weights computed before it started.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Mapping

import numpy as np

from rollout_server.engines.engine import Changes, EngineStatus, check_score
from rollout_server.engines.engine_info import engine_info
from rollout_server.engines.request_queue import QueuedEngine, RequestQueue
from rollout_server.engines.sequence import Sequence
from rollout_server.engines.vllm.adapter import Vllm
from rollout_server.engines.vllm.shared_memory import SharedMemory
from scalerl_jax.contract.codec import Completion, GroupRequest, ScoreRequest, Scores, Version

# How often writing a version is tried before this server ends.
LOAD_ATTEMPTS = 3

log = logging.getLogger(__name__)


class VllmEngine(QueuedEngine):
    """The engine; see engines/engine.py for each method.

    Args:
      vllm: started and prepared; it must hold the weights of its folder.
      slots: completions sampled at once, at most as many as `vllm` supports.
      queue: completions that may wait for a slot.
    """

    def __init__(self, vllm: Vllm, *, slots: int, queue: int):
        assert slots <= vllm.options.slots
        options = dataclasses.replace(vllm.options, slots=slots, queue=queue)
        info = engine_info("vllm", options, vllm.config, devices=vllm.workers)
        super().__init__(RequestQueue(info, self._fill))
        self._vllm = vllm
        self._lock = asyncio.Lock()  # held while weights are written or scores computed
        self._step = 0  # of the version that sampled the tokens now arriving
        self._loads = 0
        self._buffer: SharedMemory | None = None
        self._tasks: dict[Sequence, asyncio.Task[None]] = {}  # of sequences in slots
        self._ending: set[asyncio.Task[None]] = set()  # of sequences that have lost their slot
        self._queue_changed = asyncio.Event()
        self._paused = False
        self._busy_since: float | None = None

    # -------------------------------------------------------------------------------------- called by the service

    def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        self._raise_if_over()
        return super().generate(request)

    def weight_buffer(self, size: int) -> np.ndarray:
        assert self._buffer is None
        self._buffer = SharedMemory(size)
        return self._buffer.array

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        while True:
            while not self._queue.may_swap(version):
                self._queue_changed.clear()
                await self._queue_changed.wait()
            async with self._lock:
                self._raise_if_over()
                if self._queue.may_swap(version):
                    return await self._swap(version, tensors, changes)

    async def score(self, request: ScoreRequest) -> tuple[Scores, Version]:
        check_score(request, self.info)
        async with self._lock:
            self._raise_if_over()
            return await self._vllm.score(request), self._queue.version

    def status(self) -> EngineStatus:
        self._count_busy()
        status = super().status()
        self._raise_if_gone()
        return status

    async def close(self) -> None:
        """Ends every request at once."""
        self._queue.close()
        await self._until_ended()
        if self._buffer is not None:
            self._buffer.close()
        self._vllm.shutdown()

    # ------------------------------------------------------------------------------------------- queue and slots

    def _fill(self) -> None:
        """Ends sequences that have lost their slot, and gives free slots to waiting ones."""
        for sequence in self._tasks.keys() - self._queue.running.keys():
            task = self._tasks.pop(sequence)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        if not self._paused:
            for sequence in self._queue.admit():
                self._tasks[sequence] = asyncio.create_task(self._sample(sequence))
        self._count_busy()
        self._queue_changed.set()

    def _count_busy(self) -> None:
        now = time.monotonic()
        if self._busy_since is not None:
            self._queue.counters.busy_seconds += now - self._busy_since
        self._busy_since = now if self._queue.running and not self._paused else None

    async def _sample(self, sequence: Sequence) -> None:
        """Samples one sequence in its slot; cancelled if the slot is taken away."""
        try:
            name = self._vllm.new_name()
            tokens = self._vllm.generate(name, sequence.request, sequence.wanted, salt=str(self._loads))
            async with contextlib.aclosing(tokens):
                async for token_ids, logprobs, prefilled in tokens:
                    self._queue.counters.prefill_tokens += prefilled
                    # vLLM may be a step ahead of the budget.
                    sequence.extend_within_budget(token_ids, logprobs, self._step)
                    if sequence.finish_reason:
                        break
            if sequence.request.router_replay:
                experts = await self._vllm.experts(name)
                sequence.begin_experts(experts, len(experts))
        except Exception as error:
            log.exception("vLLM could not go on with a completion")
            self._fail(error)
            return
        if not sequence.finish_reason:
            self._fail(RuntimeError("vLLM ended a completion before its budgets did"))
            return
        del self._tasks[sequence]
        self._queue.finish(sequence)

    async def _until_ended(self) -> None:
        """Waits until vLLM has aborted every sequence that was given up."""
        if self._ending:
            await asyncio.wait(set(self._ending))

    # ---------------------------------------------------------------------------------------------------- weights

    async def _swap(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        """Swaps in a version; returns the seconds of the pause. Awaits nothing between may_swap and the new version."""
        began = time.monotonic()
        self._paused = True
        self._queue.set_version(version)
        try:
            await self._vllm.pause()
            self._step = version.step
            self._loads += 1
            self._queue.put_back()
            await self._until_ended()
            await self._write(tensors, changes)
            await self._vllm.resume()
        except Exception as error:
            self._fail(error)
            raise
        self._paused = False
        self._fill()
        pause = time.monotonic() - began
        self._queue.counters.pause_seconds += pause
        return pause

    async def _write(self, tensors: Mapping[str, np.ndarray], changes: Changes) -> None:
        """Writes a version into vLLM's weights. Raises RuntimeError after LOAD_ATTEMPTS."""
        assert self._buffer is not None
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            try:
                await self._vllm.load(self._buffer, tensors, changes)
                return
            except Exception as error:
                log.exception("weights could not be written, attempt %d of %d", attempt, LOAD_ATTEMPTS)
                failure = error
            # It is not known what was written before the failure.
            changes = dict.fromkeys(tensors)
        raise RuntimeError(f"the weights could not be written in {LOAD_ATTEMPTS} attempts") from failure

    # ----------------------------------------------------------------------------------------------------- failure

    def _fail(self, error: Exception) -> None:
        """Ends the engine: every request gets the error, and status raises."""
        failure = RuntimeError(f"vLLM has failed: {error}")
        failure.__cause__ = error
        self._queue.close(failure)

    def _raise_if_gone(self) -> None:
        if self._vllm.over:
            raise RuntimeError("vLLM's processes have ended")

    def _raise_if_over(self) -> None:
        self._queue.raise_if_over()
        self._raise_if_gone()

"""An engine without a model: plays recorded or scripted rollouts at a set speed, and is a real server in all else.

    slots, a bounded queue, chunks of decode steps, weights flipped between two chunks, spans of versions, pinned
    versions, incarnations, cancellation, counters: as a sampling engine has them
    script          where the tokens come from (scripts.py): a function of the completion's name alone
    weights         the tensors of the version held, kept bit by bit, so that tests can compare them
    Faults          what goes wrong on purpose, and when

With it a trainer can be driven over real gRPC by many servers on one small machine, and twice in exactly the same way.
It runs on the service's event loop and has no thread of its own.
"""

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping

import numpy as np

from rollout_server.engines.engine import Changes, EngineInfo, check_score
from rollout_server.engines.request_queue import QueuedEngine, RequestQueue
from rollout_server.engines.sequence import Sequence
from scalerl_jax.contract.codec import Completion, GroupRequest, ScoreRequest, Scores, Version
from tests.support.replay.scripts import Rollout, Script

CRASH_EXIT_CODE = 70


def _die() -> None:
    os._exit(CRASH_EXIT_CODE)  # as a crash does it: nothing is flushed, closed or told


@dataclasses.dataclass(frozen=True)
class Faults:
    """Off where 0. Counts are completions finished since the start of the process."""

    crash_after: int = 0  # then the process is gone
    hang_after: int = 0  # then decoding stands still for ever; Status still answers
    crash: Callable[[], None] = _die


class ReplayEngine(QueuedEngine):
    """See engines/engine.py for what each method promises."""

    def __init__(
        self,
        script: Script,
        info: EngineInfo,
        *,
        decode_chunk: int = 8,
        token_seconds: float = 0.0,  # one decode step, of all slots together
        load_seconds: float = 0.0,  # how long a flip of the weights stops decoding
        faults: Faults = Faults(),
    ):
        super().__init__(RequestQueue(info, self._fill))
        self.weights: dict[str, np.ndarray] = {}  # copies of the version held; none before the first
        self._script = script
        self._chunk = decode_chunk
        self._token_seconds, self._load_seconds = token_seconds, load_seconds
        self._faults = faults
        self._rollouts: dict[int, dict[int, Rollout]] = {}  # by id of the request, then by index
        self._wake = asyncio.Event()  # there may be something to do
        self._loop_task: asyncio.Task[None] | None = None
        self._finished = 0

    # ------------------------------------------------------------------------------------- what the service calls

    async def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        caller = self._queue.submit(request)
        rollouts = self._rollouts[id(request)] = {}
        try:
            room = self.info.maximum_tokens - len(request.prompt)
            # A script writes a completion down to its end, so budgets beyond the room are cut first.
            sampling = dataclasses.replace(request.sampling, answer_budget=min(request.sampling.answer_budget, room))
            within = dataclasses.replace(request, sampling=sampling)
            for wanted in request.completions:
                named = dataclasses.replace(wanted, thinking_budget=min(wanted.thinking_budget, room))
                rollouts[wanted.index] = self._script.rollout(within, named).cut(room)
                await asyncio.sleep(0)  # others have their turn: it takes its time
            self._fill()
            async for completion in caller.completions():
                yield completion
        finally:
            self._queue.cancel(caller)
            if self._rollouts.get(id(request)) is rollouts:  # else the same request was asked for again
                del self._rollouts[id(request)]

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        return await self._queue.stage(version, self._changed(tensors, changes))

    def _changed(self, tensors: Mapping[str, np.ndarray], changes: Changes) -> dict[str, np.ndarray]:
        """The weights of the next version, made from those held by what changed."""
        weights = dict(self.weights)
        for name, change in changes.items():
            if change is None:
                weights[name] = np.array(tensors[name])
            else:
                weights[name] = self.weights[name].copy()
                weights[name].reshape(-1)[change.positions] = change.values
        return weights

    async def score(self, request: ScoreRequest) -> tuple[Scores, Version]:
        check_score(request, self.info)
        return self._script.scores(request), self._queue.version

    async def close(self) -> None:
        self._queue.close()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})

    # ----------------------------------------------------------------------------------------------- the decode loop

    def _fill(self) -> None:
        """Gives free slots to those whose script is written, from the next chunk on."""
        for sequence in self._queue.admit(self._is_written):
            if sequence.wanted is sequence.request.completions[0]:
                self._queue.counters.prefill_tokens += len(sequence.request.prompt)
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._decode())
        self._wake.set()

    def _is_written(self, sequence: Sequence) -> bool:
        written = self._rollouts.get(id(sequence.request), {})
        return len(written) == len(sequence.request.completions)

    async def _decode(self) -> None:
        while True:
            # 1. Between two chunks: new weights.
            await self._flip()
            playing = list(self._queue.running)
            if not playing:
                self._wake.clear()
                await self._wake.wait()
                continue
            # 2. One chunk. A completion that ends in the middle of it has still taken the whole of it, as on a device.
            began = time.monotonic()
            await asyncio.sleep(self._chunk * self._token_seconds)
            self._queue.counters.busy_seconds += time.monotonic() - began
            # 3. What it gave those that still have their slot.
            done = [sequence for sequence in playing if sequence in self._queue.running and self._play(sequence)]
            for sequence in done:
                await self._finish(sequence)

    async def _finish(self, sequence: Sequence) -> None:
        self._queue.finish(sequence)
        self._finished += 1
        if self._finished == self._faults.crash_after:
            # So that the n-th completion is on the wire: that takes time, and some turns of the loop.
            for _ in range(10):
                await asyncio.sleep(0.005)
            self._faults.crash()
        if self._finished == self._faults.hang_after:
            await asyncio.get_running_loop().create_future()  # never done

    def _play(self, sequence: Sequence) -> bool:
        """One chunk of it. True at its end."""
        rollout = self._rollouts[id(sequence.request)][sequence.wanted.index]
        start, end = sequence.length, min(sequence.length + self._chunk, len(rollout.token_ids))
        forced = [any(first <= at < last for first, last in rollout.forced) for at in range(start, end)]
        tokens, logprobs = rollout.token_ids[start:end].tolist(), rollout.logprobs[start:end].tolist()
        sequence.extend(tokens, logprobs, forced, self._queue.version.step)
        if end == len(rollout.token_ids):
            sequence.finish_reason = rollout.finish_reason
        return bool(sequence.finish_reason)

    async def _flip(self) -> None:
        with self._queue.swap() as weights:
            if weights is not None:
                self.weights = weights
                await asyncio.sleep(self._load_seconds)

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
import collections
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping

import numpy as np

from rollout_server.engines.admission import check_request, check_room, check_version
from rollout_server.engines.engine import Changes, EngineInfo, EngineStatus, WrongVersion
from rollout_server.engines.replay.scripts import Rollout, Script
from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, Version

CRASH_EXIT_CODE = 70


def _die() -> None:
    os._exit(CRASH_EXIT_CODE)  # as a crash does it: nothing is flushed, closed or told


@dataclasses.dataclass(frozen=True)
class Faults:
    """Off where 0. Counts are completions finished since the start of the process."""

    crash_after: int = 0  # then the process is gone
    hang_after: int = 0  # then decoding stands still for ever; Status still answers
    crash: Callable[[], None] = _die


class _Lane:
    """One completion, from the queue to its end."""

    def __init__(self, request: GroupRequest, wanted: CompletionRequest, rollout: Rollout, sink: asyncio.Queue):
        self.request, self.wanted, self.rollout = request, wanted, rollout
        self.sink = sink  # of the generate call: Completion or WrongVersion
        self.asked = time.monotonic()
        self.started = 0.0
        self.played = 0  # tokens so far
        self.versions: list[tuple[int, int, int]] = []  # (step, start, end)

    def play(self, tokens: int, step: int) -> bool:
        """True at the end."""
        start, self.played = self.played, min(self.played + tokens, len(self.rollout.token_ids))
        if self.versions and self.versions[-1][0] == step:
            self.versions[-1] = (step, self.versions[-1][1], self.played)
        else:
            self.versions.append((step, start, self.played))
        return self.played == len(self.rollout.token_ids)

    def completion(self) -> Completion:
        return Completion(
            incarnation=self.request.incarnation,
            group_id=self.request.group_id,
            index=self.wanted.index,
            token_ids=self.rollout.token_ids,
            logprobs=self.rollout.logprobs,
            versions=tuple(self.versions),
            forced=self.rollout.forced,
            finish_reason=self.rollout.finish_reason,
            queued_seconds=self.started - self.asked,
            sampling_seconds=time.monotonic() - self.started,
        )


class ReplayEngine:
    def __init__(
        self,
        script: Script,
        *,
        tensors: Mapping[str, tuple[int, ...]],  # what a version of the weights must hold
        slots: int = 8,
        queue: int = 16,
        decode_chunk: int = 8,
        token_seconds: float = 0.0,  # one decode step, of all slots together
        load_seconds: float = 0.0,  # how long a flip of the weights stops decoding
        maximum_tokens: int = 4096,
        vocabulary: int = 2**31,  # of the model that it passes for
        compute_dtype: str = "float32",
        sync_dtype: str = "float32",
        head_precision: str = "default",
        model_config: str = "{}",
        tokenizer_fingerprint: str = "",
        faults: Faults = Faults(),
    ):
        self.info = EngineInfo(
            name="replay",
            model_config=model_config,
            tokenizer_fingerprint=tokenizer_fingerprint,
            compute_dtype=compute_dtype,
            head_dtype="float32",
            head_precision=head_precision,
            sync_dtype=sync_dtype,
            devices=1,
            slots=slots,
            queue_capacity=queue,
            maximum_tokens=maximum_tokens,
            vocabulary=vocabulary,
            tensors=dict(tensors),
        )
        self.weights: dict[str, np.ndarray] = {}  # copies of the version held; none before the first
        self._script = script
        self._chunk = decode_chunk
        self._token_seconds, self._load_seconds = token_seconds, load_seconds
        self._faults = faults
        self._version = Version(0, 0)
        self._lanes: list[_Lane] = []  # at most `slots`
        self._queue: collections.deque[_Lane] = collections.deque()  # at most `queue`
        self._staged: tuple[Version, dict[str, np.ndarray], asyncio.Future[float]] | None = None
        self._wake = asyncio.Event()  # there may be something to do
        self._loop_task: asyncio.Task[None] | None = None
        self._finished = 0
        self._sampled_tokens = self._forced_tokens = self._prefill_tokens = 0
        self._busy_seconds = self._pause_seconds = 0.0

    # ------------------------------------------------------------------------------------- what the service calls

    async def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        check_request(request, self.info)
        self._check_now(request)
        sink: asyncio.Queue[Completion | WrongVersion] = asyncio.Queue()
        room = self.info.maximum_tokens - len(request.prompt)
        # A script writes a completion down to its end, so budgets beyond the room are cut first.
        sampling = dataclasses.replace(request.sampling, answer_budget=min(request.sampling.answer_budget, room))
        within = dataclasses.replace(request, sampling=sampling)
        lanes = []
        for wanted in request.completions:
            named = dataclasses.replace(wanted, thinking_budget=min(wanted.thinking_budget, room))
            lanes.append(_Lane(request, wanted, self._script.rollout(within, named).cut(room), sink))
            await asyncio.sleep(0)  # others have their turn: it takes its time
        self._check_now(request)
        self._queue.extend(lanes)
        self._prefill_tokens += len(request.prompt)
        self._start()
        try:
            for _ in lanes:
                item = await sink.get()
                if isinstance(item, WrongVersion):
                    raise item
                yield item
        finally:
            self._drop(lambda lane: lane.sink is sink)

    def _check_now(self, request: GroupRequest) -> None:
        check_version(request, self._version)
        check_room(request, self.info, queued=len(self._queue), running=len(self._lanes))

    def weight_buffer(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8)

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        assert self._staged is None, "one version at a time"
        flipped: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._staged = (version, self._changed(tensors, changes), flipped)
        self._start()
        return await flipped

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

    async def score(self, token_ids: np.ndarray) -> tuple[np.ndarray, Version]:
        return self._script.score(token_ids), self._version

    def status(self) -> EngineStatus:
        entering = min(len(self._queue), self.info.slots - len(self._lanes))  # before the next chunk
        return EngineStatus(
            version=self._version,
            busy_slots=len(self._lanes) + entering,
            queued=len(self._queue) - entering,
            sampled_tokens=self._sampled_tokens,
            forced_tokens=self._forced_tokens,
            prefill_tokens=self._prefill_tokens,
            busy_seconds=self._busy_seconds,
            pause_seconds=self._pause_seconds,
        )

    async def close(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
        if self._staged is not None:
            self._staged[2].cancel()

    # ----------------------------------------------------------------------------------------------- the decode loop

    def _start(self) -> None:
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._decode())
        self._wake.set()

    async def _decode(self) -> None:
        while True:
            # 1. Between two chunks: new weights first, then free slots are filled.
            await self._flip()
            while self._queue and len(self._lanes) < self.info.slots:
                lane = self._queue.popleft()
                lane.started = time.monotonic()
                self._lanes.append(lane)
            if not self._lanes:
                self._wake.clear()
                await self._wake.wait()
                continue
            # 2. One chunk. A completion that ends in the middle of it has still taken the whole of it, as on a device.
            began = time.monotonic()
            await asyncio.sleep(self._chunk * self._token_seconds)
            self._busy_seconds += time.monotonic() - began
            # 3. What it gave. Lanes that were dropped meanwhile are gone from the list.
            done = [lane for lane in self._lanes if self._play(lane)]
            self._lanes = [lane for lane in self._lanes if lane not in done]
            for lane in done:
                await self._finish(lane)

    async def _finish(self, lane: _Lane) -> None:
        lane.sink.put_nowait(lane.completion())
        self._finished += 1
        if self._finished == self._faults.crash_after:
            # So that the n-th completion is on the wire: that takes time, and some turns of the loop.
            for _ in range(10):
                await asyncio.sleep(0.005)
            self._faults.crash()
        if self._finished == self._faults.hang_after:
            await asyncio.get_running_loop().create_future()  # never done

    def _play(self, lane: _Lane) -> bool:
        """One chunk of one lane, counted. True at its end."""
        before = lane.played
        done = lane.play(self._chunk, self._version.step)
        forced = sum(max(0, min(end, lane.played) - max(start, before)) for start, end in lane.rollout.forced)
        self._forced_tokens += forced
        self._sampled_tokens += lane.played - before - forced
        return done

    async def _flip(self) -> None:
        if self._staged is None:
            return
        version, weights, flipped = self._staged
        other = version.incarnation != self._version.incarnation
        if not other and any(lane.request.pinned_step is not None for lane in (*self._lanes, *self._queue)):
            return  # they were promised the version held
        # The version changes before the pause: a request that comes in it is judged by what will sample it.
        began = time.monotonic()
        self.weights, self._version, self._staged = weights, version, None
        if other:
            error = WrongVersion(f"weights of incarnation {version.incarnation} have arrived")
            self._drop(lambda lane: lane.request.incarnation != version.incarnation, error)
        await asyncio.sleep(self._load_seconds)
        pause = time.monotonic() - began
        self._pause_seconds += pause
        flipped.set_result(pause)

    def _drop(self, which: Callable[[_Lane], bool], error: WrongVersion | None = None) -> None:
        """Frees the slots and places of some lanes; `error`: tells their calls why."""
        dropped = [lane for lane in (*self._lanes, *self._queue) if which(lane)]
        self._lanes = [lane for lane in self._lanes if lane not in dropped]
        self._queue = collections.deque(lane for lane in self._queue if lane not in dropped)
        if error is not None:
            for sink in {id(lane.sink): lane.sink for lane in dropped}.values():
                sink.put_nowait(error)
        self._wake.set()  # weights may have waited for them

"""The generator for GPU fleets: vLLM behind the engine interface.

vLLM decodes in processes of its own; here, on the server's event loop, are the queue, the slots, the phases of each
completion and the versions. A completion is handed to vLLM when a slot is free, so that what waits in vLLM never waits
across a change of the weights.

A new version, under one lock:
    1. requests pinned to the version held are finished first,
    2. vLLM pauses between two steps; requests and their keys and values stay,
    3. requests of another incarnation end; a completion that has no token yet goes back to the queue, so that it starts
       from the new weights' keys and values,
    4. the workers write the new weights in place, from memory that they share with this process,
    5. only after a good load vLLM resumes. A failed one is repeated whole, from the host copy; after LOAD_ATTEMPTS the
       engine is over, the server exits, and the fleet carries on without it.

Tokens received before the pause are the old version's, all others the new one's. The prefix cache is salted with the
number of loads, so that no request sees keys and values that other weights made before it began.
"""

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping

import numpy as np

from rollout_server.engines.admission import check_request, check_room, check_score, check_version
from rollout_server.engines.engine import Changes, EngineInfo, EngineStatus, WrongVersion
from rollout_server.engines.thinking_budget import Phases
from rollout_server.engines.vllm.adapter import Vllm
from rollout_server.engines.vllm.shared_memory import SharedMemory
from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, Version
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint

# How often a version is written before this server is given up.
LOAD_ATTEMPTS = 3

log = logging.getLogger(__name__)


class _Group:
    """A request that is not finished."""

    def __init__(self, request: GroupRequest):
        self.request = request
        self.asked = time.monotonic()
        self.lanes: set[_Lane] = set()  # that are not finished
        self.results: asyncio.Queue[Completion | Exception | None] = asyncio.Queue()  # None: that was the last


class _Lane:
    """One completion, from the queue to its end."""

    def __init__(self, group: _Group, wanted: CompletionRequest, maximum_tokens: int):
        self.group, self.wanted = group, wanted
        self.phases = Phases.of(group.request, wanted, maximum_tokens=maximum_tokens)
        self.began = 0.0
        self.task: asyncio.Task[None] | None = None  # while it has a slot
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[tuple[int, int, int]] = []  # (step, start, end)
        self._forced: list[tuple[int, int]] = []  # (start, end)

    @property
    def empty(self) -> bool:
        return not self._token_ids

    def take(self, token: int, logprob: float, step: int) -> bool:
        """One token, sampled (or fed) by the weights of version `step`. True where it was forced."""
        at, forced = len(self._token_ids), self.phases.take(token)
        self._token_ids.append(token)
        self._logprobs.append(0.0 if forced else logprob)
        if self._versions and self._versions[-1][0] == step:
            self._versions[-1] = (step, self._versions[-1][1], at + 1)
        else:
            self._versions.append((step, at, at + 1))
        if forced and self._forced and self._forced[-1][1] == at:
            self._forced[-1] = (self._forced[-1][0], at + 1)
        elif forced:
            self._forced.append((at, at + 1))
        return forced

    def completion(self) -> Completion:
        request = self.group.request
        return Completion(
            incarnation=request.incarnation,
            group_id=request.group_id,
            index=self.wanted.index,
            token_ids=np.array(self._token_ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            versions=tuple(self._versions),
            forced=tuple(self._forced),
            finish_reason=self.phases.finish,
            queued_seconds=self.began - self.group.asked,
            sampling_seconds=time.monotonic() - self.began,
        )


class VllmEngine:
    """See engines/engine.py for what each method promises.

    Args:
      vllm: started and prepared; it must hold the weights of its folder.
      slots: completions sampled at once, at most those that `vllm` has room for.
      queue: completions that may wait for a slot.
    """

    def __init__(self, vllm: Vllm, *, slots: int, queue: int):
        assert slots <= vllm.slots
        self.info = EngineInfo(
            name="vllm",
            model_config=vllm.config.canonical_json(),
            tokenizer_fingerprint=tokenizer_fingerprint(vllm.model_dir),
            compute_dtype=vllm.compute_dtype,
            head_dtype="float32",
            head_precision=vllm.head_precision,
            sync_dtype=vllm.sync_dtype,
            devices=vllm.workers,
            slots=slots,
            queue_capacity=queue,
            maximum_tokens=vllm.maximum_tokens,
            vocabulary=vllm.config.vocab_size,
            tensors=vllm.tensors,
        )
        self._vllm = vllm
        self._lock = asyncio.Lock()  # weights are written, or scores computed
        self._version = Version(0, 0)  # what a new request will be sampled by
        self._step = 0  # of the version that the tokens now arriving were sampled by
        self._loads = 0
        self._buffer: SharedMemory | None = None
        self._groups: dict[_Group, None] = {}  # unfinished, in the order they came
        self._waiting: collections.deque[_Lane] = collections.deque()
        self._running: set[_Lane] = set()
        self._ending: set[asyncio.Task[None]] = set()  # of lanes that gave up their slot
        self._fewer_groups = asyncio.Event()
        self._paused = self._closing = False
        self._failure: Exception | None = None
        self._sampled_tokens = self._forced_tokens = self._prefill_tokens = 0
        self._busy_seconds = self._pause_seconds = 0.0
        self._busy_since: float | None = None

    # ------------------------------------------------------------------------------------- what the service calls

    async def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        group = self._submit(request)
        try:
            while (item := await group.results.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._remove(group)

    def weight_buffer(self, size: int) -> np.ndarray:
        assert self._buffer is None
        self._buffer = SharedMemory(size)
        return self._buffer.array

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        while True:
            while not self._may_swap(version):
                self._fewer_groups.clear()
                await self._fewer_groups.wait()
            async with self._lock:
                self._raise_if_over()
                if self._may_swap(version):
                    return await self._swap(version, tensors, changes)

    async def score(self, token_ids: np.ndarray) -> tuple[np.ndarray, Version]:
        check_score(token_ids, self.info)
        async with self._lock:
            self._raise_if_over()
            return await self._vllm.score(token_ids), self._version

    def status(self) -> EngineStatus:
        self._raise_if_failed()
        busy = time.monotonic() - self._busy_since if self._busy_since is not None else 0.0
        return EngineStatus(
            version=self._version,
            busy_slots=len(self._running),
            queued=len(self._waiting),
            sampled_tokens=self._sampled_tokens,
            forced_tokens=self._forced_tokens,
            prefill_tokens=self._prefill_tokens,
            busy_seconds=self._busy_seconds + busy,
            pause_seconds=self._pause_seconds,
        )

    async def close(self) -> None:
        """Ends every request where it stands."""
        self._closing = True
        for group in list(self._groups):
            self._remove(group)
            group.results.put_nowait(self._failure)
        await self._until_ended()
        if self._buffer is not None:
            self._buffer.close()
        self._vllm.shutdown()

    # ------------------------------------------------------------------------------------------- queue and slots

    def _submit(self, request: GroupRequest) -> _Group:
        info = self.info
        check_request(request, info)
        self._raise_if_over()
        check_version(request, self._version)
        check_room(request, info, queued=len(self._waiting), running=len(self._running))
        group = _Group(request)
        lanes = [_Lane(group, wanted, info.maximum_tokens) for wanted in request.completions]
        group.lanes.update(lanes)
        self._groups[group] = None
        self._waiting.extend(lanes)
        self._fill()
        return group

    def _fill(self) -> None:
        """Gives free slots to those that wait."""
        while self._waiting and len(self._running) < self.info.slots and not self._paused:
            lane = self._waiting.popleft()
            lane.began = time.monotonic()
            lane.task = asyncio.create_task(self._sample(lane))
            self._running.add(lane)
        self._count_busy()

    def _count_busy(self) -> None:
        now = time.monotonic()
        if self._busy_since is not None:
            self._busy_seconds += now - self._busy_since
        self._busy_since = now if self._running and not self._paused else None

    async def _sample(self, lane: _Lane) -> None:
        """One completion in its slot. It is cancelled where the slot is taken away."""
        try:
            tokens = self._vllm.generate(lane.group.request, lane.wanted, salt=str(self._loads))
            async with contextlib.aclosing(tokens):
                async for token_ids, logprobs, prefilled in tokens:
                    self._prefill_tokens += prefilled
                    for token, logprob in zip(token_ids, logprobs, strict=True):
                        if not lane.phases.finish:  # vLLM may be a step ahead of the budgets
                            forced = lane.take(token, logprob, self._step)
                            self._forced_tokens += forced
                            self._sampled_tokens += not forced
                    if lane.phases.finish:
                        break
        except Exception as error:
            log.exception("vLLM could not go on with a completion")
            self._fail(error)
            return
        if not lane.phases.finish:
            self._fail(RuntimeError("vLLM ended a completion before its budgets did"))
            return
        group = lane.group
        self._running.discard(lane)
        group.lanes.discard(lane)
        group.results.put_nowait(lane.completion())
        if not group.lanes:
            self._remove(group)
            group.results.put_nowait(None)
        self._fill()

    def _remove(self, group: _Group) -> None:
        """Takes a group, with what is left of it, out of queue and slots; nothing where that is done."""
        if group not in self._groups:
            return
        del self._groups[group]
        self._fewer_groups.set()
        if group.lanes:
            self._waiting = collections.deque(lane for lane in self._waiting if lane not in group.lanes)
            for lane in group.lanes & self._running:
                self._take_slot(lane)
            group.lanes.clear()
            self._fill()

    def _take_slot(self, lane: _Lane) -> None:
        assert lane.task is not None
        self._running.discard(lane)
        lane.task.cancel()
        self._ending.add(lane.task)
        lane.task.add_done_callback(self._ending.discard)

    async def _until_ended(self) -> None:
        """Until vLLM was told of every request that was given up."""
        if self._ending:
            await asyncio.wait(set(self._ending))

    # ---------------------------------------------------------------------------------------------------- weights

    def _may_swap(self, version: Version) -> bool:
        other = version.incarnation != self._version.incarnation
        return other or all(group.request.pinned_step is None for group in self._groups)

    async def _swap(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        """Seconds that decoding stood still. Nothing is awaited between _may_swap and the change of the version."""
        began = time.monotonic()
        self._paused, self._version = True, version
        self._count_busy()
        try:
            await self._vllm.pause()
            self._step = version.step
            self._loads += 1
            for group in list(self._groups):
                if group.request.incarnation != version.incarnation:
                    self._remove(group)
                    group.results.put_nowait(WrongVersion(f"weights of incarnation {version.incarnation} have arrived"))
            self._put_back()
            await self._until_ended()
            await self._write(tensors, changes)
            await self._vllm.resume()
        except Exception as error:
            self._fail(error)
            raise
        self._paused = False
        self._fill()
        pause = time.monotonic() - began
        self._pause_seconds += pause
        return pause

    def _put_back(self) -> None:
        """Completions without a token wait again, before all others and in their order."""
        begun = sorted((lane for lane in self._running if lane.empty), key=lambda lane: lane.began)
        for lane in begun:
            self._take_slot(lane)
        self._waiting.extendleft(reversed(begun))

    async def _write(self, tensors: Mapping[str, np.ndarray], changes: Changes) -> None:
        """Raises RuntimeError after LOAD_ATTEMPTS."""
        assert self._buffer is not None
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            try:
                await self._vllm.load(self._buffer, tensors, changes)
                return
            except Exception as error:
                log.exception("weights could not be written, attempt %d of %d", attempt, LOAD_ATTEMPTS)
                failure = error
            # What was written before it failed is not known.
            changes = dict.fromkeys(tensors)
        raise RuntimeError(f"the weights could not be written in {LOAD_ATTEMPTS} attempts") from failure

    # -------------------------------------------------------------------------------------------------------- ends

    def _fail(self, error: Exception) -> None:
        """The engine is over: every request hears of it, and status raises."""
        self._failure = self._failure or error
        for group in list(self._groups):
            self._remove(group)
            group.results.put_nowait(RuntimeError(f"vLLM has failed: {error}"))

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"vLLM has failed: {self._failure}") from self._failure
        if self._vllm.over:
            raise RuntimeError("vLLM's processes have ended")

    def _raise_if_over(self) -> None:
        self._raise_if_failed()
        if self._closing:
            raise RuntimeError("the engine is closed")

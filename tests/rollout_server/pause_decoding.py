"""Decoding that is paused where a test wants it, so that what the test does meanwhile comes neither early nor late.

    async with pause_decoding(engine, chunks=3) as decoding:
        ...                         three chunks are decoded, and no more
        decoding.more(2)            two more
        decoding.go_on()            as many as there are; so it is at the end of the block

In all else the engine goes on: it answers, takes requests and versions of the weights, lets go of what is cancelled.

    jax      the decode thread waits before it starts a chunk
    replay   the decode loop waits before a chunk
    vllm     vLLM knows no chunks, and itself goes on: of each completion so many chunks of tokens reach the engine
    another program is told how many steps it may decode, see external.py
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rollout_server.engines.engine import Changes
from scalerl_jax.contract.codec import CompletionRequest, GroupRequest, Version
from tests.rollout_server.external import External
from tests.support.waiting import eventually_async

CHUNK = 4  # tokens: `decode_chunk` of the tests' engines
POLL_SECONDS = 0.002


class Decoding:
    def __init__(self, chunks: int):
        self._allowed: float = chunks
        self._begun = 0
        self._changed = threading.Condition()
        self.stands = False  # what was allowed is decoded and handed out (not told for vllm)
        self._loading: Version | None = None
        self._loaded: Version | None = None
        self._waits: Callable[[Version], bool] = lambda version: False

    def more(self, chunks: float) -> None:
        with self._changed:
            self._allowed += chunks
            self.stands = False
            self._changed.notify_all()

    def go_on(self) -> None:
        self.more(math.inf)

    async def arrival(self, version: Version, *, pinned: bool = False) -> None:
        """Returns when the engine has a version and takes it as soon as it can, or has taken it.

        pinned: some request is, so that another program cannot show that it has the version.

        It can when decoding goes on (vllm: at once; jax: after the chunk that was about to begin), and when no request
        is pinned any more.
        """
        await eventually_async(lambda: self._loaded == version or (self._loading == version and self._waits(version)))

    # -------------------------------------------------------------------------------------- called by the engines

    def begin(self) -> None:
        """On a thread: returns when the next chunk may begin."""
        with self._changed:
            while not self._take():
                self._changed.wait()

    async def begin_on_loop(self) -> None:
        while not self._take():
            await asyncio.sleep(POLL_SECONDS)

    def _take(self) -> bool:
        self.stands = self._begun >= self._allowed
        self._begun += not self.stands
        return not self.stands

    async def reach(self, token: int) -> None:
        """Returns when a completion may have so many tokens, and one more."""
        while token >= self._allowed * CHUNK:
            await asyncio.sleep(POLL_SECONDS)


Waits = Callable[[Version], bool]  # whether a version waits in the engine for what goes on there


def _jax(engine: Any, decoding: Decoding, delta: pytest.MonkeyPatch) -> Waits:
    dispatch = engine._pool.dispatch

    def paused(weights: Any, step: int) -> None:
        decoding.begin()
        dispatch(weights, step)

    delta.setattr(engine._pool, "dispatch", paused)
    return lambda version: engine._queue.staged is not None


def _replay(engine: Any, decoding: Decoding, delta: pytest.MonkeyPatch) -> Waits:
    flip = engine._flip  # which comes before every chunk

    async def paused() -> None:
        if engine._queue.running:
            await decoding.begin_on_loop()
        await flip()  # last: from here to the chunk, or to its sleep, the loop awaits nothing

    delta.setattr(engine, "_flip", paused)
    return lambda version: engine._queue.staged is not None


def _vllm(engine: Any, decoding: Decoding, delta: pytest.MonkeyPatch) -> Waits:
    generate = engine._vllm.generate

    async def paused(
        name: str, request: GroupRequest, wanted: CompletionRequest, *, salt: str
    ) -> AsyncGenerator[tuple[Sequence[int], Sequence[float], int], None]:
        count = 0
        async with contextlib.aclosing(generate(name, request, wanted, salt=salt)) as outputs:
            async for token_ids, logprobs, prefilled in outputs:
                for token, logprob in zip(token_ids, logprobs, strict=True):
                    await decoding.reach(count)
                    yield [token], [logprob], prefilled
                    count, prefilled = count + 1, 0

    delta.setattr(engine._vllm, "generate", paused)
    return lambda version: not engine._queue.may_swap(version)


ENGINES: dict[str, Callable[[Any, Decoding, pytest.MonkeyPatch], Waits]] = {
    "jax": _jax,
    "replay": _replay,
    "vllm": _vllm,
}


@contextlib.asynccontextmanager
async def pause_decoding(engine: Any, *, chunks: int = 0) -> AsyncIterator[Any]:
    """Of an engine that is idle: `chunks` are decoded from now on. To be left before the engine is closed."""
    if isinstance(engine, External):
        async with engine.pause_decoding(chunks * CHUNK) as steps:
            yield steps
        return
    decoding, load = Decoding(chunks), engine.load

    async def noted(version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        decoding._loading = version
        pause = await load(version, tensors, changes)
        decoding._loaded = version
        return pause

    with pytest.MonkeyPatch.context() as delta:
        delta.setattr(engine, "load", noted)
        decoding._waits = ENGINES[engine.info.name](engine, decoding, delta)
        try:
            yield decoding
        finally:
            decoding.go_on()


def pause_loading(engine: Any, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The engine takes no weights before the event is set."""
    if isinstance(engine, External):
        pytest.skip("what another program does with a version that is there cannot be held up from outside")
    go, load = asyncio.Event(), engine.load

    async def paused(version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        await go.wait()
        return await load(version, tensors, changes)

    monkeypatch.setattr(engine, "load", paused)
    return go

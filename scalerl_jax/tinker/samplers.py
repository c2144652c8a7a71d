"""Sampling and scoring with saved weights, on servers that each hold one version at a time.

    requested      a call waits for a server that holds its weights
    switched       weights that calls wait for and that no server holds go to a server without calls, or to one that has
                   held its own for a turn: it finishes its calls, and is sent the others
    turn           TURN_SECONDS, or TURN_PUSHES times the last push if that is longer: so switching stays a small part
    in flight      calls of a sampling client that follows its run are not ended by a newer version: it is swapped in
                   while they continue, and each token has the version that sampled it

A lost server gets no requests; its calls go to another one, under the same name and seed. Weights are folders of files,
and are read when they are sent.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import grpc
import numpy as np

from scalerl_jax.contract.codec import Completion, GroupRequest, ScoreRequest, Scores, Version
from scalerl_jax.gateway.generators import MOST_TRIES, Full, Generators, GeneratorServer, Lost, NoServer
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.safetensors_folder import Tensors
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.rollouts.weights import payload as payload_lib
from scalerl_jax.rollouts.weights.publisher import Incarnation
from scalerl_jax.rollouts.weights.push import Push, PushRefused

_log = logging.getLogger(__name__)
T = TypeVar("T")

TURN_SECONDS = 1.0
TURN_PUSHES = 5.0
TICK_SECONDS = 0.1
SCORES = 4  # asked of servers at a time: one answers no more than 8
PAUSE_SECONDS = 0.1  # after a server that was full
READ = 2  # weights whose tensors stay in memory


@dataclasses.dataclass(frozen=True)
class Weights:
    folder: str  # a model's
    model: str = ""  # the run that made them; empty: none


_Call = tuple[int, "asyncio.Future[_ServerWeights]"]  # its number, and the server that it is granted


@dataclasses.dataclass(eq=False)
class _Waiting:
    """The calls for the same weights that have no server yet, the oldest first."""

    wanted: Callable[[], Weights]  # which may be newer ones by now if they are in flight
    inflight: bool
    weights: Weights
    calls: "collections.deque[_Call]" = dataclasses.field(default_factory=collections.deque)


@dataclasses.dataclass(eq=False)
class _ServerWeights:
    """What one server holds."""

    server: GeneratorServer
    process: str = ""  # the server's, at its last push
    weights: Weights | None = None
    step: int = 0
    since: float = 0.0
    pinned: int = 0  # calls, each by these weights alone
    following: int = 0  # calls that continue with newer ones
    newest: Callable[[], Weights] | None = None  # those that they continue with
    coming: Weights | None = None  # those that it will hold next
    pushing: "asyncio.Task[None] | None" = None

    @property
    def calls(self) -> int:
        return self.pinned + self.following

    def takes(self, wait: _Waiting) -> bool:
        """Whether it may serve one of these calls now."""
        status = self.server.status
        if self.weights is None or status is None or self.calls >= status.slots + 2:
            return False
        if self.coming is None:
            return self.weights == wait.weights
        swapped = wait.inflight and self.coming == wait.weights and self.weights.model == self.coming.model
        return swapped and not self.pinned  # the newer ones are swapped in while it samples


class Samplers:
    """Created and used on one event loop, while `run` runs there, and that of `generators`."""

    def __init__(
        self, generators: Generators, *, decoder: DecoderConfig, dtype: str, chunk_bytes: int, push_seconds: float,
        score_seconds: float,
    ):  # fmt: skip
        self._generators, self._decoder, self._dtype = generators, decoder, np.dtype(dtype)
        self._chunk_bytes, self._push_seconds, self._score_seconds = chunk_bytes, push_seconds, score_seconds
        self._incarnation = Incarnation(time.time_ns())
        self._held = [_ServerWeights(server) for server in generators.servers]
        self._waiting: dict[tuple[str, str], _Waiting] = {}  # by run and folder; calls in flight have no folder
        self._numbers = itertools.count()
        self._step, self._turn = 0, TURN_SECONDS
        self._scoring = asyncio.Semaphore(SCORES)
        self._read: collections.OrderedDict[Weights, payload_lib.Tensors] = collections.OrderedDict()
        self.weights_of_step: dict[int, Weights] = {}
        self.trouble = ""  # why a server did not take the last weights that were sent

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._dispatch()
            await asyncio.sleep(TICK_SECONDS)

    async def generate(
        self, weights: Callable[[], Weights], request: GroupRequest, *, inflight: bool
    ) -> tuple[Completion, dict[int, Weights]]:
        """A completion, and the weights of its versions. weights: returns those to sample with, called at each try.

        Raises NoServer, Refused, ValueError if the weights cannot be read.
        """

        async def ask(held: _ServerWeights) -> Completion:
            asked = dataclasses.replace(
                request, incarnation=self._incarnation.value, minimum_step=held.step,
                pinned_step=None if inflight else held.step,
            )  # fmt: skip
            return await self._generators.ask(held.server, asked)

        completion = await self._somewhere(weights, ask, inflight=inflight)
        return completion, {step: self.weights_of_step[step] for step, _, _ in completion.versions}

    async def score(self, weights: Callable[[], Weights], request: ScoreRequest) -> Scores:
        """Raises as generate."""

        async def ask(held: _ServerWeights) -> Scores:
            version = Version(self._incarnation.value, held.step)
            return await self._generators.score(held.server, request, version, seconds=self._score_seconds)

        async with self._scoring:
            return await self._somewhere(weights, ask, inflight=False)

    async def _somewhere(
        self, weights: Callable[[], Weights], ask: Callable[[_ServerWeights], Awaitable[T]], *, inflight: bool
    ) -> T:
        """The answer of one of the servers that hold the weights."""
        lost = 0
        while True:
            async with self._on(weights, inflight=inflight) as held:
                try:
                    return await ask(held)
                except Full:
                    pass
                except Lost as error:
                    lost += 1
                    if lost == MOST_TRIES:
                        raise NoServer(str(error)) from None
            await asyncio.sleep(PAUSE_SECONDS)

    @contextlib.asynccontextmanager
    async def _on(self, wanted: Callable[[], Weights], *, inflight: bool) -> AsyncGenerator[_ServerWeights]:
        """A server that holds the weights for the duration of the block."""
        weights = wanted()
        key = (weights.model, "" if inflight else weights.folder)
        waiting = self._waiting.setdefault(key, _Waiting(wanted, inflight, weights))
        granted: asyncio.Future[_ServerWeights] = asyncio.get_running_loop().create_future()
        call = next(self._numbers), granted
        waiting.calls.append(call)
        self._dispatch()
        try:
            held = await granted
        except BaseException:
            if call in waiting.calls:
                waiting.calls.remove(call)
            elif not granted.cancelled() and granted.exception() is None:
                self._release(granted.result(), inflight)
            raise
        try:
            yield held
        finally:
            self._release(held, inflight)

    def _release(self, held: _ServerWeights, inflight: bool) -> None:
        if inflight:
            held.following -= 1
        else:
            held.pinned -= 1
        self._dispatch()

    # ---- which server holds which weights

    def _dispatch(self) -> None:
        """Does everything that can be done now."""
        there = [held for held in self._held if held.server.status is not None]
        for held in there:
            assert held.server.status is not None
            if held.pushing is None and held.process != held.server.status.server_id:  # another process, or a new one
                held.weights = None
        newest: dict[str, Weights] = {}  # of runs
        for held in there:
            if held.following and held.newest is not None and held.weights is not None:
                model = held.weights.model
                newest[model] = newest.get(model) or held.newest()
                if held.coming is None and newest[model] != held.weights:
                    held.coming = newest[model]
        for wait in self._waiting.values():
            if wait.inflight:
                model = wait.weights.model
                wait.weights = newest[model] = newest.get(model) or wait.wanted()
        self._grant(there)
        self._waiting = {key: wait for key, wait in self._waiting.items() if wait.calls}
        for wait in sorted(self._waiting.values(), key=lambda wait: wait.calls[0][0]):
            if any(held.coming == wait.weights for held in there):
                continue
            if (chosen := self._to_switch(wait, there)) is not None:
                chosen.coming = wait.weights
        for held in there:
            if held.coming is not None and held.pushing is None and self._may_push(held):
                held.pushing = asyncio.create_task(self._push(held, held.coming))

    def _grant(self, there: list[_ServerWeights]) -> None:
        """Gives waiting calls the servers that may serve them, the oldest first."""
        waiting = set(self._waiting.values())
        while waiting:
            for wait in waiting:
                while wait.calls and wait.calls[0][1].done():  # cancelled
                    wait.calls.popleft()
            waiting = {wait for wait in waiting if wait.calls and any(held.takes(wait) for held in there)}
            if waiting:
                wait = min(waiting, key=lambda wait: wait.calls[0][0])
                held = min((held for held in there if held.takes(wait)), key=lambda held: held.calls)
                if wait.inflight:
                    held.following, held.newest = held.following + 1, wait.wanted
                else:
                    held.pinned += 1
                wait.calls.popleft()[1].set_result(held)

    def _to_switch(self, wait: _Waiting, there: list[_ServerWeights]) -> _ServerWeights | None:
        """The server to switch to these weights next, or None."""
        waited_for = {other.weights for other in self._waiting.values()}
        now = time.monotonic()
        still = [held for held in there if held.coming is None and held.weights != wait.weights]
        idle = [held for held in still if held.weights not in waited_for]
        if any(held.weights == wait.weights for held in there):  # that server has its turn; idle ones may help
            return next((held for held in idle if not held.calls), None)
        over = [held for held in still if now - held.since >= self._turn or self._follows(held, wait)]
        return min(idle or over, key=lambda held: held.calls, default=None)

    def _follows(self, held: _ServerWeights, wait: _Waiting) -> bool:
        return held.weights is not None and wait.inflight and held.weights.model == wait.weights.model

    def _may_push(self, held: _ServerWeights) -> bool:
        assert held.coming is not None
        same = held.weights is not None and held.weights.model == held.coming.model
        return not held.calls or (same and not held.pinned)

    async def _push(self, held: _ServerWeights, weights: Weights) -> None:
        server, began, why = held.server, time.monotonic(), ""
        try:
            if server.status is None:
                raise PushRefused("it is gone")
            process = server.status.server_id
            if not self._incarnation.outranks(server.status.version.incarnation):
                raise PushRefused("it is another trainer's now")
            self._incarnation.settle()
            tensors = await asyncio.to_thread(self._tensors, weights)
            self._step += 1
            self.weights_of_step[self._step] = weights  # before a token is sampled by them
            version = Version(self._incarnation.value, self._step)
            payload = payload_lib.dense(version, tensors, {}, chunk_bytes=self._chunk_bytes)
            await Push(server.stub.PushWeights(), payload).run(server_id=process, timeout=self._push_seconds)
        except (PushRefused, TimeoutError) as error:
            why = str(error) or "nothing of the weights moved"
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except (OSError, ValueError) as error:  # of the folder
            for wait in self._waiting.values():
                while wait.weights == weights and wait.calls:
                    _, granted = wait.calls.popleft()
                    if not granted.done():
                        granted.set_exception(ValueError(f"its weights cannot be read: {error}"))
        except Exception as error:  # noqa: BLE001  it does not end the other servers' calls
            _log.exception("weights for %s", server.address)
            why = repr(error)
        else:
            held.process, held.weights, held.step = process, weights, version.step
            self._turn = max(TURN_SECONDS, TURN_PUSHES * (time.monotonic() - began))
        held.since, held.coming, held.pushing, self.trouble = time.monotonic(), None, None, why
        if why:
            held.weights = None
            server.lose(f"it did not take the weights: {why}")
        self._dispatch()

    def _tensors(self, weights: Weights) -> payload_lib.Tensors:
        """The tensors as they are sent. Runs on a thread."""
        found = self._read.get(weights)
        if found is None:
            stored = Tensors(weights.folder, self._decoder)
            found = {name: stored[name].astype(self._dtype, copy=False) for name in hf_tensors(self._decoder)}
            self._read[weights] = found
            while len(self._read) > READ:
                self._read.popitem(last=False)
        return found

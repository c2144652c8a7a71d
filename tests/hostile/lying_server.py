"""Many faulty servers in one process: each on a port of its own, all of them sampling from one real engine.

    python -m tests.hostile.lying_server '{"model": DIR, "modes": [...], "folder": DIR}'

`folder`/ports.json says where each listens, once all do. `folder`/truth.json is written again and again: what each of
them has truly done so far, whatever it says. The process ends with its standard input.
"""

import asyncio
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np

from rollout_server.engines.engine import Changes, Engine, EngineOptions, EngineStatus
from rollout_server.engines.engine_info import engine_info
from rollout_server.service import RolloutServer
from scalerl_jax.contract.codec import Completion, GroupRequest, ScoreRequest, Scores, Version
from scalerl_jax.model.decoder_config import read_config
from tests.hostile.lies import LieInterceptor
from tests.hostile.modes import MODES
from tests.hostile.socket_lies import serving
from tests.support.replay.engine import ReplayEngine
from tests.support.replay.scripts import Recorded

SLOTS, QUEUE = 32, 512  # of the engine; each server claims a part
CLAIMED = {"slots": 8, "queue_capacity": 16}
TRUTH_SECONDS = 0.1


class Share:
    """One server's part of the engine: counters and a version of its own, as if the engine were its alone."""

    def __init__(self, engine: Engine, loading: asyncio.Lock):
        self.info = dataclasses.replace(engine.info, **CLAIMED)
        self._engine, self._loading = engine, loading
        self._version = Version(0, 0)
        self._running = self._sampled = self._forced = self._prefilled = 0
        self._busy, self._since, self._began = 0.0, 0.0, time.monotonic()

    async def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        self._book(+len(request.completions))
        left = len(request.completions)
        self._prefilled += len(request.prompt)
        try:
            async for completion in self._engine.generate(request):
                sampled = int(completion.sampled().sum())
                self._sampled += sampled
                self._forced += len(completion.token_ids) - sampled
                left -= 1
                self._book(-1)
                yield completion
        finally:
            self._book(-left)

    def _book(self, change: int) -> None:
        now = time.monotonic()
        self._busy += now - self._since if self._running else 0.0
        self._since, self._running = now, self._running + change

    def end_older(self, request: GroupRequest) -> None:
        self._engine.end_older(request)

    def weight_buffer(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8)

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        """The engine may be further already: then it is taken for loaded."""
        async with self._loading:
            pause = 0.0
            if self._engine.status().version < version:
                pause = await self._engine.load(version, tensors, changes)
            self._version = version
        return pause

    async def score(self, request: ScoreRequest) -> tuple[Scores, Version]:
        return await self._engine.score(request)

    def status(self) -> EngineStatus:
        self._book(0)
        slots = self.info.slots
        counters = (self._sampled, self._forced, self._prefilled, self._busy, 0.0)
        return EngineStatus(self._version, min(slots, self._running), max(0, self._running - slots), *counters)

    async def close(self) -> None:
        return

    def truth(self) -> dict[str, float]:
        status = self.status()
        return {"up": time.monotonic() - self._began, "busy": status.busy_seconds, "sampled": status.sampled_tokens}


def write_json(path: str, value: object) -> None:
    with open(path + ".new", "w") as file:
        json.dump(value, file)
    os.replace(path + ".new", path)


def make_engine(model: str, rollouts: str) -> Engine:
    """A policy's, or one that plays a recording."""
    options = EngineOptions(
        model,
        slots=SLOTS,
        queue=QUEUE,
        decode_chunk=4,
        maximum_tokens=64,
        compute_dtype="float32",
        sync_dtype="float32",
    )
    if not rollouts:
        from rollout_server.engines.jax.engine import JaxEngine

        return JaxEngine(options)
    info = dataclasses.replace(engine_info("replay", options, read_config(model)), vocabulary=2**31, maximum_top_k=0)
    return ReplayEngine(Recorded(rollouts), info, decode_chunk=options.decode_chunk, token_seconds=0.004)


async def serve(options: dict[str, Any]) -> None:
    engine = make_engine(options["model"], options["rollouts"])
    ports, shares, loading = {}, {}, asyncio.Lock()
    listening: list[object] = []  # a server that nobody holds ends
    for name in options["modes"]:
        mode = MODES[name]
        if mode.listener is not None:
            listener = await asyncio.start_server(serving(mode.listener), "127.0.0.1", 0)
            listening.append(listener)
            ports[name] = listener.sockets[0].getsockname()[1]
            continue
        assert mode.lie is not None
        shares[name] = Share(engine, loading)
        server = RolloutServer(shares[name], interceptors=[LieInterceptor(mode.lie())])
        await server.start()
        listening.append(server)
        ports[name] = server.port
    write_json(os.path.join(options["folder"], "ports.json"), ports)
    while True:
        write_json(os.path.join(options["folder"], "truth.json"), {name: s.truth() for name, s in shares.items()})
        await asyncio.sleep(TRUTH_SECONDS)


def end_with_parent() -> None:
    while os.read(0, 4_096):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(serve(json.loads(sys.argv[1])))

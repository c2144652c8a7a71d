"""One vLLM for many tests: starting it takes as long as all of them, and it belongs to the event loop it began on.

Each test gets a VllmEngine of its own, at version (0, 0), on the weights of the folder.
"""

import asyncio
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm import envs

from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.vllm.adapter import Vllm
from rollout_server.engines.vllm.engine import VllmEngine
from rollout_server.engines.vllm.shared_memory import SharedMemory
from scalerl_jax.model.tensor_layout import hf_tensors
from tests.support.models import read_tensors


class Shared:
    """A vLLM on the model of a folder. `close` ends it and its event loop."""

    def __init__(self, folder: pathlib.Path, **options: Any):
        self._runner = asyncio.Runner()
        self._folder = folder
        self._clean = True
        self.vllm: Lent = self._runner.run(self._start(options))

    async def _start(self, options: dict[str, Any]) -> "Lent":
        workers = options.pop("workers", 1)
        # Each of vLLM's processes would import for ten seconds what is here already. A fork is sound while this is the
        # only thread, as it is in a file's first tests: others may hold locks.
        method = "fork" if len(os.listdir("/proc/self/task")) == 1 else "spawn"
        envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: method
        vllm = Lent(EngineOptions(str(self._folder), **{"queue": 0, **options}), workers=workers)
        await vllm.prepare()
        return vllm

    def run(self, test: Any) -> None:
        """Runs a coroutine on vLLM's loop, with the folder's weights in place."""

        async def from_the_start() -> None:
            if not self._clean:
                await self.vllm.reset(read_tensors(self._folder, self.vllm.config))
            self._clean = False
            await test

        self._runner.run(from_the_start())

    def engine(self, *, slots: int, queue: int) -> VllmEngine:
        return VllmEngine(self.vllm, slots=slots, queue=queue)

    def close(self) -> None:
        self._runner.run(self.vllm.end())
        self._runner.close()


class Lent(Vllm):
    """The engines that use it come and go."""

    def shutdown(self) -> None:
        pass

    async def end(self) -> None:
        super().shutdown()

    async def reset(self, tensors: Mapping[str, np.ndarray]) -> None:
        """As after its start: nothing running, nothing cached, these weights."""
        await self.pause()
        buffer, views = staged(self, tensors)
        await self.load(buffer, views, dict.fromkeys(views))
        buffer.close()
        await self.resume()
        assert await self.engine.reset_prefix_cache()


def staged(vllm: Vllm, tensors: Mapping[str, np.ndarray]) -> tuple[SharedMemory, dict[str, np.ndarray]]:
    """Tensors in memory as the service keeps them: (the memory, views by name)."""
    assert {name: value.shape for name, value in tensors.items()} == hf_tensors(vllm.config)
    buffer = SharedMemory(sum(value.nbytes for value in tensors.values()))
    views, offset = {}, 0
    for name, value in tensors.items():
        views[name] = np.ndarray(value.shape, value.dtype, buffer.array, offset)  # type: ignore[call-overload]
        views[name][...] = value
        offset += value.nbytes
    return buffer, views

"""What the tests of the vLLM engine ask of it, without a server in between."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollout_server.engines.vllm.engine import VllmEngine
from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, Interruption, Sampling, Version
from tests.support.waiting import eventually_async

PROMPT = np.array([7, 8, 9], np.int32)
LONG = 1000  # tokens: a test that stalls for seconds finds it unfinished


def ask(
    prompt: np.ndarray = PROMPT,
    *,
    name: str = "train/0",
    completions: int = 1,
    thinking_budget: int = 0,
    incarnation: int = 0,
    router_replay: bool = False,
    interruption: Interruption = Interruption(),  # noqa: B008 (frozen)
    **sampling: Any,
) -> GroupRequest:
    return GroupRequest(
        incarnation=incarnation,
        group_id=name,
        prompt=prompt,
        completions=tuple(CompletionRequest(i, 1000 + i, thinking_budget) for i in range(completions)),
        sampling=Sampling(**{"answer_budget": 40, **sampling}),
        interruption=interruption,
        router_replay=router_replay,
    )


async def collect(engine: VllmEngine, request: GroupRequest) -> list[Completion]:
    """By index."""
    return sorted([completion async for completion in engine.generate(request)], key=lambda c: c.index)


class HostCopy:
    """The host's copy of the weights, in the engine's memory, as the service keeps it."""

    def __init__(self, engine: VllmEngine, tensors: Mapping[str, np.ndarray]):
        self._engine = engine
        buffer = engine.weight_buffer(sum(value.nbytes for value in tensors.values()))
        self.views: dict[str, np.ndarray] = {}
        offset = 0
        for name, value in tensors.items():
            self.views[name] = np.ndarray(value.shape, value.dtype, buffer, offset)  # type: ignore[call-overload]
            self.views[name][...] = value
            offset += value.nbytes

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray]) -> float:
        """Another version, whole."""
        for name, value in tensors.items():
            self.views[name][...] = value
        return await self._engine.load(version, self.views, dict.fromkeys(self.views))


async def tokens_seen(engine: VllmEngine, count: int) -> None:
    """Returns when so many tokens have been sampled."""
    await eventually_async(lambda: engine.status().sampled_tokens >= count)

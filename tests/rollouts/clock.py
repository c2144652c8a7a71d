"""The clock by which a fleet judges its servers, for tests to put forward: seconds pass, and nobody has to wait."""

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from scalerl_jax.rollouts import fleet, status, trust
from scalerl_jax.rollouts.servers import client, pool, server_state

MODULES: tuple[ModuleType, ...] = (client, fleet, pool, server_state, status, trust)


class Clock:
    """The module `time`, with a monotonic clock that is `ahead` of the machine's by so many seconds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> "Clock":
        for module in modules or MODULES:
            monkeypatch.setattr(module, "time", self)
        return self


def waits_for_one(trainer: Any, one: Any, other: Any, clock: Clock, *, seconds: float = 20.0) -> Callable[[], None]:
    """The trainer's `wait`, with which the clock goes on by `seconds` where `one` has work and `other` has none.

    What is counted is how long `one` takes; the other one may be as slow as the machine makes it.

    seconds: less than from one look at a server to the next may be.
    """
    admits = trainer.wait

    def wait() -> None:
        admits()
        if trainer.server(one)["in_flight"] and not trainer.server(other)["in_flight"]:
            clock.ahead += seconds

    return wait

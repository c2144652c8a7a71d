"""Waiting for what another thread, process or task does: polled, and given up after a time."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

SECONDS = 150.0  # after which what is waited for will not come; less than a test may take


def eventually(
    condition: Callable[[], Any], what: str = "what the test awaits", *, seconds: float = SECONDS, pause: float = 0.01
) -> Any:
    """The first true value of `condition`; fails after `seconds`, saying what did not happen."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(pause)
    return value


async def eventually_async(condition: Callable[[], Any]) -> Any:
    """The same on an event loop, which goes on meanwhile."""
    async with asyncio.timeout(SECONDS):
        while not (value := condition()):
            await asyncio.sleep(0.002)
    return value

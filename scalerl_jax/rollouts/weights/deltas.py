"""Cache of the last versions' deltas, bounded in bytes; updates servers that are a few versions behind.

A server at version a that should be at v gets the deltas a+1 ... v merged into one: for each position the newest
value. That is one transfer and one swap, whatever it missed; beyond the bound it gets a dense version.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scalerl_jax.contract.weight_delta import MAXIMUM_DELTA_SHARE, WeightDelta, merge
from scalerl_jax.rollouts.loop_thread import watched

# Of each element in a dense version: deltas are of bfloat16 tensors.
ITEM_BYTES = 2


class DeltaCache:
    """Lives on one event loop; close() ends its thread."""

    def __init__(self, *, limit: int, event: Callable[[dict[str, Any]], None], fail: Callable[[BaseException], None]):
        """limit: bytes of all deltas kept. event: called on the loop with what each version changed.

        fail: called on the loop when finding a delta fails, which may be long before the delta is needed.
        """
        self._limit, self._event, self._fail = limit, event, fail
        self._deltas: dict[int, asyncio.Task[WeightDelta]] = {}  # by the version that they lead to
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="publisher-deltas")

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def record(self, step: int, find: Callable[[], WeightDelta]) -> None:
        """`find` copies what version `step` changed to the host; it is called at once, on the cache's thread.

        To be called for every version in turn, also for those that are never published.
        """
        assert step not in self._deltas
        self._deltas[step] = watched(self._find(step, find), self._fail)

    async def _find(self, step: int, find: Callable[[], WeightDelta]) -> WeightDelta:
        def timed() -> tuple[WeightDelta, float]:
            began = time.monotonic()
            delta = find()
            return delta, time.monotonic() - began

        delta, seconds = await asyncio.get_running_loop().run_in_executor(self._worker, timed)
        assert delta.step == step
        self._drop_oldest(delta.nbytes)
        if delta.base is not None:
            self._event(
                {
                    "step": step,
                    "changed": delta.changed,
                    "elements": delta.elements,
                    "whole_tensors": delta.whole,
                    "delta_bytes": delta.nbytes,
                    "dense_bytes": delta.elements * ITEM_BYTES,
                    "encode_seconds": seconds,
                }
            )
        return delta

    def _drop_oldest(self, more: int) -> None:
        done = {s: task.result() for s, task in self._deltas.items() if task.done() and not task.exception()}
        used = more + sum(delta.nbytes for delta in done.values())
        for step in sorted(done):
            if used <= self._limit:
                break
            used -= done[step].nbytes
            del self._deltas[step]

    async def digests(self, step: int) -> dict[str, int]:
        """Digests of a version's tensors; {} if it was not recorded or has been dropped. Raises what `find` raised."""
        task = self._deltas.get(step)
        return {} if task is None else dict((await asyncio.shield(task)).digests)

    async def between(self, base: int, step: int) -> WeightDelta | None:
        """One delta from version `base` to `step`; None if there is none that is worth sending.

        Raises what `find` raised for one of them.
        """
        steps = range(base + 1, step + 1)
        if not steps or any(s not in self._deltas for s in steps):
            return None
        deltas = [await asyncio.shield(self._deltas[s]) for s in steps if s in self._deltas]
        if len(deltas) < len(steps):
            return None  # dropped meanwhile
        if deltas[0].base != base or any(a.step != b.base for a, b in itertools.pairwise(deltas)):
            return None  # the first version of all has no base
        dense = deltas[0].elements * ITEM_BYTES
        if max(delta.nbytes for delta in deltas) > MAXIMUM_DELTA_SHARE * dense:
            return None
        if len(deltas) > 1 and any(isinstance(t, tuple) for delta in deltas for t in delta.tensors.values()):
            return None  # blocks of an older version, which a newer one has changed in places
        merged = await asyncio.get_running_loop().run_in_executor(self._worker, merge, deltas)
        return merged if merged.nbytes <= MAXIMUM_DELTA_SHARE * dense else None

"""The patches of the last versions, within a byte bound: what a server that is a little behind is brought up with.

A server at version a that should be at v gets the patches a+1 ... v merged into one: for each position the newest
value. One transfer and one swap, whatever it missed; beyond the bound it gets a dense version.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout_server.contract.weight_patch import MAXIMUM_PATCH_SHARE, Patch, merge

# What travels in a dense version for each element: patches are of bfloat16 tensors.
ITEM_BYTES = 2


class Patches:
    """Lives on one event loop; close() ends its thread."""

    def __init__(self, *, limit: int, event: Callable[[dict[str, Any]], None], fail: Callable[[BaseException], None]):
        """limit: bytes of all patches kept. event: called on the loop with what each version changed.

        fail: told on the loop where finding a patch fails, which may be long before somebody needs it.
        """
        self._limit, self._event, self._fail = limit, event, fail
        self._patches: dict[int, asyncio.Task[Patch]] = {}  # by the version that they lead to
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="publisher-patches")

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def record(self, step: int, find: Callable[[], Patch]) -> None:
        """`find` brings what version `step` changed to the host; called at once, on a thread of its own."""
        assert step not in self._patches
        task = self._patches[step] = asyncio.ensure_future(self._find(step, find))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _find(self, step: int, find: Callable[[], Patch]) -> Patch:
        def timed() -> tuple[Patch, float]:
            began = time.monotonic()
            patch = find()
            return patch, time.monotonic() - began

        patch, seconds = await asyncio.get_running_loop().run_in_executor(self._worker, timed)
        assert patch.step == step
        self._drop_oldest(patch.nbytes)
        if patch.base is not None:
            self._event(
                {
                    "step": step,
                    "changed": patch.changed,
                    "elements": patch.elements,
                    "whole_tensors": patch.whole,
                    "patch_bytes": patch.nbytes,
                    "dense_bytes": patch.elements * ITEM_BYTES,
                    "encode_seconds": seconds,
                }
            )
        return patch

    def _drop_oldest(self, more: int) -> None:
        done = {s: task.result() for s, task in self._patches.items() if task.done() and not task.exception()}
        used = more + sum(patch.nbytes for patch in done.values())
        for step in sorted(done):
            if used <= self._limit:
                break
            used -= done[step].nbytes
            del self._patches[step]

    async def digests(self, step: int) -> dict[str, int]:
        """Of the tensors of a version; none where it was not recorded, or is long gone. Raises what finding it did."""
        task = self._patches.get(step)
        return {} if task is None else dict((await asyncio.shield(task)).digests)

    async def between(self, base: int, step: int) -> Patch | None:
        """One patch from version `base` to `step`; None where there is none that is worth sending.

        Raises what finding them did.
        """
        steps = range(base + 1, step + 1)
        if not steps or any(s not in self._patches for s in steps):
            return None
        patches = [await asyncio.shield(self._patches[s]) for s in steps if s in self._patches]
        if len(patches) < len(steps):
            return None  # dropped meanwhile
        if patches[0].base != base or any(a.step != b.base for a, b in itertools.pairwise(patches)):
            return None  # the first version of all has no base
        dense = patches[0].elements * ITEM_BYTES
        if max(patch.nbytes for patch in patches) > MAXIMUM_PATCH_SHARE * dense:
            return None
        merged = await asyncio.get_running_loop().run_in_executor(self._worker, merge, patches)
        return merged if merged.nbytes <= MAXIMUM_PATCH_SHARE * dense else None

"""A version that several hosts send: the first host decides, and each other host sends its part of the same push.

    first host   Publisher.push ──> its own part                      all parts `applied`: the report of all of them
                       └─ Parts.push(PartPush) ──> PartPublisher on each other host: its part, to the same server

The other hosts hold the versions that the first host may still request (`keep`), and deltas of their own shards. The
first host says which with each version, published or not.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence

from scalerl_jax.contract import codec
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.weight_delta import WeightDelta
from scalerl_jax.contract.weight_parts import Part
from scalerl_jax.rollouts.loop_thread import log_fault, watched
from scalerl_jax.rollouts.weights import payload as payload_lib
from scalerl_jax.rollouts.weights.payload import DeltaCache, Payload, TensorBlocks
from scalerl_jax.rollouts.weights.push import FullSyncNeeded, Push, PushRefused, PushReport

POLL_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class PartPush:
    """The first host's request to the other hosts for their parts of a push."""

    incarnation: int
    base: int | None
    step: int
    address: str
    server_id: str  # of the process that should receive it; empty: any
    timeout: float


@dataclasses.dataclass(frozen=True)
class Parts:
    """How the first host's publisher has versions sent in parts; used on its event loop."""

    part: Part  # the first host's own
    dtype: str  # of the tensors
    shapes: Mapping[str, tuple[int, ...]]
    push: Callable[[PartPush], Awaitable[list[PushReport]]]  # raises what Publisher.push does
    keep: Callable[[int, list[int]], None]  # of the versions up to the number, only those listed


class PartPublisher:
    """Publisher of a host other than the first; lives on one event loop, close() ends its threads."""

    def __init__(
        self,
        part: Part,
        *,
        dtype: str,
        shapes: Mapping[str, tuple[int, ...]],
        connect: Callable[[str], Stub],
        chunk_bytes: int,
        delta_bytes: int,
        to_host: Callable[[Callable[[], TensorBlocks]], Awaitable[TensorBlocks]],
        fail: Callable[[BaseException], None] = log_fault,
    ):
        """connect: the server at an address. to_host: runs a function that copies weights to the host on a thread."""
        self._part, self._dtype, self._shapes = part, dtype, shapes
        self._connect, self._chunk_bytes, self._to_host = connect, chunk_bytes, to_host
        self._sources: dict[int, Callable[[], TensorBlocks]] = {}
        self._newest = -1
        self._payloads: dict[tuple[int, int | None, int], asyncio.Task[Payload]] = {}  # incarnation, base, step
        self._deltas = DeltaCache(limit=delta_bytes, event=lambda fields: None, fail=fail)

    def close(self) -> None:
        self._deltas.close()

    def publish(
        self, step: int, blocks: Callable[[], TensorBlocks], changes: Callable[[], WeightDelta] | None = None
    ) -> None:
        """Holds this host's part of a version; to be called in the order of versions."""
        self._sources[step], self._newest = blocks, step
        if changes is not None:
            self._deltas.record(step, changes)

    def keep(self, until: int, steps: Sequence[int]) -> None:
        for step in [step for step in self._sources if step <= until and step not in steps]:
            del self._sources[step]
        for key in [key for key in self._payloads if key[2] <= until and key[2] not in steps]:
            del self._payloads[key]

    async def push(self, wanted: PartPush) -> PushReport:
        """Sends this host's part. Raises as Publisher.push; FullSyncNeeded if this host has no such delta."""
        payload = await self._payload(wanted)
        call = self._connect(wanted.address).PushWeights()
        return await Push(call, payload).run(server_id=wanted.server_id, timeout=wanted.timeout)

    async def _payload(self, wanted: PartPush) -> Payload:
        key = (wanted.incarnation, wanted.base, wanted.step)
        async with asyncio.timeout(wanted.timeout):  # the first host published it a moment ago
            while wanted.step > self._newest:
                await asyncio.sleep(POLL_SECONDS)
        if wanted.step not in self._sources:
            raise PushRefused(f"version {wanted.step} is not held any more")
        task = self._payloads.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._payloads[key] = watched(self._make(wanted), lambda error: None)  # raised by the await below
        # Shielded: a push that is given up must not take the payload from the others.
        return await asyncio.shield(task)

    async def _make(self, wanted: PartPush) -> Payload:
        if wanted.base is not None:
            delta = await self._deltas.between(wanted.base, wanted.step)
            if delta is None:
                raise FullSyncNeeded(f"there is no delta from version {wanted.base} to {wanted.step}")
            return payload_lib.sparse(wanted.incarnation, delta, chunk_bytes=self._chunk_bytes, part=self._part)
        digests = await self._deltas.digests(wanted.step)
        return payload_lib.dense_part(
            codec.Version(wanted.incarnation, wanted.step),
            await self._to_host(self._sources[wanted.step]),
            digests,
            dtype=self._dtype,
            shapes=self._shapes,
            part=self._part,
            chunk_bytes=self._chunk_bytes,
        )

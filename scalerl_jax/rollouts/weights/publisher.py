"""Sends versions of the weights to the servers.

    version  = dense (all bytes), or a delta from a version that the server holds to the one it should hold
    push     = header, chunks, commit ->  <- resend*, then applied | refused | full_sync

The latest version wins: a server that is behind gets the newest one, not those between; a transfer that has begun is
finished first. A server gets a delta if one is kept from the version of this trainer that it holds (DeltaCache).
Otherwise, or if it answers `full_sync` (its copy is not the one we assumed), it gets a dense version.

Dense tensors may be given as a function that copies them to the host. It runs on a separate thread, during the
trainer's next update, and not at all if a newer version is published before a server needs this one. The changes are
copied to the host in any case, because the next deltas build on them.

On several hosts this runs on the first: it sends its own part, and has the others send theirs (host_parts.py).
"""

import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from scalerl_jax.contract import codec
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.loop_thread import log_fault, watched
from scalerl_jax.rollouts.weights import payload as payload_lib
from scalerl_jax.rollouts.weights.host_parts import PartPush, Parts
from scalerl_jax.rollouts.weights.payload import DeltaCache, Payload, TensorBlocks, Tensors
from scalerl_jax.rollouts.weights.push import Push, PushReport, together

_log = logging.getLogger(__name__)

MOST = 2**64 - 1  # what fits in the contract
HEARD = 2**62  # bound for servers that are outranked: the year 2116. A run itself counts further, see run/folder.py

# With several hosts: a function that returns this host's blocks of each tensor.
Source = Tensors | Callable[[], Tensors] | Callable[[], TensorBlocks]


class Incarnation:
    """The number by which servers identify this trainer process. Of two trainers, a server obeys the later one.

        at its start    ours is raised above any that a server reports, so that a clock that is behind does no harm
        from the first version on    it is fixed. A server that reports a larger one was taken over by a trainer that
                        was started after us: it is superseded, and left alone

    So two trainers on one fleet do not take it from each other in turn: the later one keeps it, the earlier one waits
    and reports that. A server that appears later with a larger incarnation of a finished run (its clock was ahead) is
    superseded too, until it is restarted: we cannot tell the two apart, and taking it would need a new incarnation
    mid-run.

    Incarnations are nanoseconds since 1970, so none comes near HEARD for a century. A server that reports one above
    HEARD made it up: it is superseded and left alone, because a trainer above that would leave no numbers for later
    ones.

    raised: called with a value that replaces the one given.
    """

    def __init__(self, value: int, raised: Callable[[int], None] = lambda value: None):
        assert 0 < value <= MOST
        self.value, self._raised, self._settled = value, raised, False

    def settle(self) -> None:
        """Fixes the value: the first version is published with it."""
        self._settled = True

    def outranks(self, theirs: int) -> bool:
        """Whether a server that reports `theirs` may be ours: its trainer is an earlier one, none, or this one."""
        if not self._settled and self.value <= theirs < HEARD:
            self.value = theirs + 1
            self._raised(self.value)
        return theirs <= self.value


class Publisher:
    """Holds the versions that some server may still need. Lives on one event loop; close() ends its threads."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        chunk_bytes: int,
        delta_bytes: int = 0,
        event: Callable[[dict[str, Any]], None] = lambda fields: None,
        parts: Parts | None = None,
        fail: Callable[[BaseException], None] = log_fault,
    ):
        """delta_bytes: bound on the deltas kept. event: called on the loop with what each version changed.

        parts: for a trainer of several hosts. fail: called on the loop with every exception raised while a version is
        made or cut into chunks.
        """
        self._incarnation, self._chunk_bytes = incarnation, chunk_bytes
        self._sources: dict[int, Source] = {}
        self._payloads: dict[tuple[int | None, int], asyncio.Task[Payload]] = {}  # base, step
        self._retained: collections.Counter[int] = collections.Counter()  # step -> how many evaluations need it
        self._parts = parts
        self._pushing: collections.Counter[int] = collections.Counter()  # step -> pushes of it that are under way
        self._fail = fail
        self.deltas = DeltaCache(limit=delta_bytes, event=event, fail=self._fail)
        self.latest: int | None = None
        # One thread copies weights to the host, so that two versions are never copied at once.
        self._staging = ThreadPoolExecutor(1, thread_name_prefix="publisher-staging")

    def close(self) -> None:
        self.deltas.close()
        self._staging.shutdown(wait=False, cancel_futures=True)

    def publish(self, step: int, tensors: Source) -> None:
        """Makes `step` the version that servers should hold."""
        assert self.latest is None or step > self.latest, f"version {step} published after version {self.latest}"
        self._incarnation.settle()
        self._sources[step] = tensors
        self.latest = step
        self._drop_unneeded()

    def drop_elsewhere(self, until: int) -> None:
        """Has the other hosts drop the versions before `until` that no server and no evaluation needs.

        `until`: the newest version, which may be published at any time.
        """
        if self._parts is not None:
            self._parts.keep(until, sorted({*self._sources, *self._pushing, until}))

    def retain(self, step: int) -> None:
        """Keeps a version although a newer one is published, until it is released as often as it was retained."""
        assert step in self._sources, f"version {step} is not held"
        self._retained[step] += 1

    def release(self, step: int) -> None:
        assert self._retained[step] > 0, f"version {step} is not retained"
        self._retained[step] -= 1
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        # A push that is under way holds the payload itself.
        for step in [s for s in self._sources if s != self.latest and not self._retained[s]]:
            del self._sources[step]
        for key in [key for key in self._payloads if key[1] not in self._sources]:
            del self._payloads[key]
        if self.latest is not None:
            self.drop_elsewhere(self.latest)

    @contextlib.contextmanager
    def _held(self, step: int) -> Iterator[None]:
        """Around a push: keeps the version on the other hosts until the push ends."""
        self._pushing[step] += 1
        try:
            yield
        finally:
            self._pushing[step] -= 1
            self._pushing += collections.Counter()  # without those at 0
            self._drop_unneeded()

    async def push(
        self, stub: Stub, step: int, process: Process | None = None, *, base: int | None = None, timeout: float
    ) -> PushReport:
        """Brings one server from version `base` (None: none of ours) to `step`; returns when it decodes with it.

        process: the process that should receive it; None: any. Required for a version in parts: the other hosts dial
        it. Raises PushRefused (FullSyncNeeded: retry without a base), grpc.RpcError if the connection fails,
        TimeoutError if nothing is transferred for `timeout` seconds; and whatever making the tensors raises.
        """
        with self._held(step):
            payload = await self._payload(base, step, self._sources[step])
            server_id = process.server_id if process else ""
            own = Push(stub.PushWeights(), payload).run(server_id=server_id, timeout=timeout)
            if self._parts is None:
                return await own
            assert process is not None
            base = payload.header.base.step if payload.is_delta else None
            wanted = PartPush(self._incarnation.value, base, step, process.address, server_id, timeout)
            return await together(own, self._parts.push(wanted))

    async def _payload(self, base: int | None, step: int, source: Source) -> Payload:
        key = (base, step)
        if key not in self._payloads:
            make = self._dense(step, source) if base is None else self._sparse(base, step, source)
            self._payloads[key] = watched(make, self._fail)
        # Shielded: cancelling the push to one server must not cancel the payload for the others.
        return await asyncio.shield(self._payloads[key])

    async def _sparse(self, base: int, step: int, source: Source) -> Payload:
        """A delta if there is one, else a dense version."""
        delta = await self.deltas.between(base, step)
        if delta is None:
            return await self._payload(None, step, source)
        part = self._parts.part if self._parts is not None else None
        return payload_lib.sparse(self._incarnation.value, delta, chunk_bytes=self._chunk_bytes, part=part)

    async def _dense(self, step: int, source: Source) -> Payload:
        digests = await self.deltas.digests(step)

        def make() -> Payload:
            tensors = source() if callable(source) else source
            version = codec.Version(self._incarnation.value, step)
            if self._parts is None:
                return payload_lib.dense(version, cast(Tensors, tensors), digests, chunk_bytes=self._chunk_bytes)
            return payload_lib.dense_part(
                version, cast(TensorBlocks, tensors), digests, dtype=self._parts.dtype, shapes=self._parts.shapes,
                part=self._parts.part, chunk_bytes=self._chunk_bytes,
            )  # fmt: skip

        return await asyncio.get_running_loop().run_in_executor(self._staging, make)


_OF_PUSH = (
    *("sparse", "payload_bytes", "resent_chunks"),
    *("seconds", "transfer_seconds", "staging_seconds", "pause_seconds"),
)
_OF_VERSION = ("delta_bytes", "dense_bytes", "changed", "elements", "whole_tensors", "encode_seconds")


class SyncStats:
    """`event` is called on the fleet's thread, `drain` on the trainer's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, list[dict[str, Any]]] = {"push": [], "version": []}

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Records a push or version event of the fleet; logs any other."""
        if kind in self._rows:
            with self._lock:
                self._rows[kind].append(fields)
        else:
            _log.info("%s: %s", kind, fields)

    def drain(self) -> dict[str, float]:
        """Sums since the last call, over the versions applied by all servers and over the deltas that were made.

        sparse: pushes that were deltas. transfer, staging, pause: see push.PushReport. delta_bytes, dense_bytes,
        changed, elements: of the versions that were compared with their predecessor; encode: time to compare, copy to
        the host and encode those.
        """
        with self._lock:
            rows, self._rows = self._rows, {"push": [], "version": []}
        pushes, versions = rows["push"], rows["version"]
        return {
            "applied": len(pushes),
            **{name: sum(push[name] for push in pushes) for name in _OF_PUSH},
            "deltas": len(versions),
            **{name: sum(version[name] for version in versions) for name in _OF_VERSION},
        }

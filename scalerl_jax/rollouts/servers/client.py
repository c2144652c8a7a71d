"""One server, seen from the trainer: its heartbeat, the reactions to each status, and its upkeep.

A server that is given up ends up in `connecting` with all its calls cancelled, and returns the way a new one arrives.

Upkeep: while a server answers it is brought to the version that it should hold, and a candidate samples with it; that
is one task for each time that the server is met. A server that has groups may sample for the probe again; that is a
separate task, so that no version waits for it.

What is known of the server, and the requests sent to it, are in server_state.py. Everything here runs on the fleet's
event loop.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
import time
from collections.abc import Sequence

import grpc

from scalerl_jax.contract import codec, peer_text, security
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.loop_thread import watched
from scalerl_jax.rollouts.requests import spread_probes
from scalerl_jax.rollouts.servers.server_state import (
    ACTIVE,
    ANSWERING,
    CANDIDATE,
    CONNECTING,
    LEAVING,
    PROBING,
    REJECTED,
    SUPERSEDED,
    UPDATING,
    ClientContext,
    Sample,
    ServerState,
    describe,
)
from scalerl_jax.rollouts.servers.validate_status import MAXIMUM_NAME, ProbeError, StatusCheck, clock
from scalerl_jax.rollouts.weights.push import FullSyncNeeded, PushRefused

_log = logging.getLogger(__name__)

SPEED_SECONDS = 30.0
SURE_AFTER = 8  # failed calls in a row: then it is an authentication failure, not a restart that looks like one
GONE = "is lost repeatedly"
AUTH_FAILURE = "one end does not trust the other"
PATIENCE_SECONDS = 5.0  # total time a finished batch waits for a candidate that is about to be ready

UPDATE_FAILED, PROBE_FAILED = "weight update failed", "parity probe failed"
BREATH_SECONDS = 0.1  # between two attempts, at least
_REMEMBERED = 64  # versions that a server reported as applied

RowRequest = tuple[Row, codec.GroupRequest]

SUPERSEDED_BY = "owned by a newer trainer (incarnation {}; ours {}); if that trainer is gone, restart the server"


class ServerClient(ServerState):
    """See the module."""

    def __init__(self, address: str, context: ClientContext):
        super().__init__(address, context)
        self._incarnation = context.incarnation
        self.tried = False  # whether a status call has ended, with or without an answer
        self.auth_failures = 0  # calls in a row that ended because one end does not authenticate the other
        self._statuses = StatusCheck()
        self._sampled = (0, -1.0)  # (tokens, when it had sampled that many)
        self._polled_at = time.monotonic()
        self._count_from_here = False  # its usage up to the next status is not booked
        self._held = False  # whether it held completions of ours at its last status
        self.paused = False  # it gets no new requests: the probe waits for capacity
        self._upkeep: asyncio.Task | None = None
        self._probing: asyncio.Task | None = None  # of a server that has groups
        self._needs_full_sync = False  # the server's host copy is not the version it reports
        # (time, version) of the last versions that it reported as applied.
        self._applied: collections.deque[tuple[float, int]] = collections.deque(maxlen=_REMEMBERED)

    # ---- what the fleet reads

    def completions_per_second(self, now: float) -> float:
        """Its measured speed over the last SPEED_SECONDS, or since it became active; 0 while it is not active."""
        since = max(now - SPEED_SECONDS, self.state_since if self.state == ACTIVE else now)
        return sum(at > since for at in self.finishes) / max(1.0, now - since)

    # ---- what the fleet decides

    def leave(self) -> None:
        """Makes it leave: it is no longer listed."""
        if self.unlisted:
            return
        self.unlisted = True
        if not self.in_flight:
            self.lose("")
        self.enter(LEAVING, "it is no longer listed")

    def probe_again(self) -> None:
        """If it has groups, it also samples a little for the probe, with the version that it holds or a later one."""
        if self.state == ACTIVE and self.step is not None and (self._probing is None or self._probing.done()):
            self._probing = watched(self._probe_again(self.step), self._context.fail)

    def lose(self, reason: str) -> None:
        self._end_upkeep()
        super().lose(reason)

    # ---- heartbeat

    async def run(self) -> None:
        """Until cancelled: requests the status about once a heartbeat and acts on it."""
        try:
            while True:
                self.hurried.clear()
                began, asked_at = time.monotonic(), clock()
                try:
                    status = await self._stub.Status(pb.StatusRequest(), timeout=self._config.status_seconds)
                except grpc.aio.AioRpcError as error:
                    self._excuse()
                    self._unheard(error)
                else:
                    self._excuse()
                    if status is not None:
                        self._heard(status, began, asked_at)
                    elif not self.offend("sends a status that cannot be decoded") and self._connected:
                        self.lose("its status cannot be decoded")
                self.tried = True
                pause = self._config.heartbeat_seconds
                # Not wait_for: it loses a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(pause, 0.25) if self.state == CONNECTING else pause):
                        await self.hurried.wait()
        finally:
            self._end_upkeep()
            self._closed = True
            self._end_calls()
            await self._channel.close()

    @property
    def _connected(self) -> bool:
        return self.state in (*ANSWERING, LEAVING)

    def _excuse(self) -> None:
        """Extends deadlines by the time in which the trainer did not poll, because it was stopped or stalled."""
        now = time.monotonic()
        longest = self._config.status_seconds + self._config.heartbeat_seconds  # from one poll to the next
        missed, self._polled_at = now - self._polled_at - longest, now
        if missed > 0 and self.heard_at >= 0:
            self.heard_at = min(now, self.heard_at + missed)
            self._sampled = (self._sampled[0], min(now, self._sampled[1] + missed))
            self._extend_deadlines(missed, now=now)

    def _heard(self, status: pb.StatusReply, began: float, asked_at: float) -> None:
        now, version = time.monotonic(), status.version
        newest = self._context.publisher.latest if version.incarnation == self._incarnation.value else None
        found = self._statuses.check(status, asked_at=asked_at, heard_at=clock(), newest=newest)
        if found.lie:
            self._lied(status, found.lie)
            return
        another_process = status.server_id != self.status.server_id
        if another_process and self._connected:
            self._gone("it was restarted")
        self.record = self._context.records.of(self.address, status.server_id, now=now)
        self.heard_at, self.auth_failures = now, 0
        if self.record.banished:  # a rejected process may reappear between others; its time is not booked
            if self.state != REJECTED:
                self.lose("")
                self.enter(REJECTED, "it was sent away before")
            return
        waits = now < self.record.until  # if it is not met yet
        self._observe(status, another_process, found.from_here, waits)
        if not self._incarnation.outranks(version.incarnation):
            if self.state != SUPERSEDED and not (self.state == CONNECTING and waits):
                self._supersede(version.incarnation)
            return
        # A status requested before a push ended may be older than that push's report.
        step = version.step if version.incarnation == self._incarnation.value else None
        before = [applied for at, applied in self._applied if at < began]
        if len(before) == len(self._applied):
            self.set_version(step)
        if self._stands_still(status, now):
            return
        self._expire_calls(now)
        if self._connected and before and (step is None or step < max(before)):
            if self.offend("no longer holds the weights that it took"):
                return
            if self.state == ACTIVE:
                self.lose("it no longer holds this run's weights")
        try:
            self._context.servers.check(self.address, status)  # each time: it costs nothing
        except ProbeError as error:
            self.reject(str(error))
            return
        if self.state in (CONNECTING, REJECTED, SUPERSEDED) and not now < self.record.until:
            self.patience = PATIENCE_SECONDS if self.record.meet() else 0.0
            self.enter(UPDATING, "")
            self._applied.clear()
            self._upkeep = watched(self._keep_up(), self._context.fail)

    def _observe(self, status: pb.StatusReply, another_process: bool, from_here: bool, waits: bool) -> None:
        """Reports its time and tokens, to be booked."""
        self._count_from_here = self._count_from_here or from_here
        if self.state == CONNECTING and waits:  # not met yet: its time is not booked
            self._count_from_here = True
        else:
            self._context.observe(status, self._evaluates and not another_process, self._count_from_here)
            self._count_from_here = False
        self._evaluates = self.only_evaluates
        if not another_process and self._held:  # all the time since the last status
            self.record.sample(status.sampled_tokens - self.status.sampled_tokens, held=self.in_flight)
        self._held = self.in_flight > 0
        self.status = status

    def _supersede(self, incarnation: int) -> None:
        answered = self.state in ANSWERING
        self.lose("")
        if answered:
            self.refuse(GONE, "it is another trainer's now")
        if not self.record.banished:
            self.enter(SUPERSEDED, SUPERSEDED_BY.format(incarnation, self._incarnation.value))

    def _stands_still(self, status: pb.StatusReply, now: float) -> bool:
        """Whether it has sampled nothing for too long although it has requests."""
        tokens = status.sampled_tokens + status.prefill_tokens
        if tokens != self._sampled[0] or not self.in_flight:
            self._sampled = (tokens, now)
            return False
        seconds = now - self._sampled[1]
        if seconds < self._config.stall_seconds:
            return False
        if not self.offend("answers, but samples nothing", f"{seconds:.0f} s"):
            self.lose(f"it answers, but has sampled nothing for {seconds:.0f} s")
        return True

    def _lied(self, status: pb.StatusReply, lie: str) -> None:
        """Drops an implausible status without recording it."""
        if self.state == REJECTED:
            return
        if status.server_id == self.status.server_id:
            self.offend("sends an implausible status", lie)
            return
        # The first status of a process: nothing else is known of it.
        self.lose("")
        self.record = self._context.records.of(self.address, status.server_id, now=time.monotonic())
        self.status = pb.StatusReply(server_id=status.server_id[:MAXIMUM_NAME])
        self.reject(f"server {self.address}: its status is implausible: {lie}")

    def _unheard(self, error: grpc.aio.AioRpcError) -> None:
        why = security.refusal(error, self._context.servers.credentials)
        self.auth_failures = self.auth_failures + 1 if why else 0
        certain = error.code() is grpc.StatusCode.UNAUTHENTICATED  # stated by the server, not guessed
        if why and self.state == CONNECTING:
            # A process that exits closes half-open connections, too.
            sure = certain or self.heard_at < 0 or self.auth_failures >= SURE_AFTER
            if sure and (reason := peer_text.printable(why, longest=960)) != self.reason:
                self.reason = reason  # may contain the server's own text, different each time
                if self._log_limit.happened(AUTH_FAILURE, now=time.monotonic()):
                    self.enter(CONNECTING, why)
            return
        if why and certain:
            self._gone(why)
            return
        if self.state == CONNECTING or self.state == REJECTED:
            return
        silent = time.monotonic() - self.heard_at
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._gone("the connection is broken")
        elif silent >= self._config.silence_seconds:
            self._gone(f"no answer for {silent:.0f} s")

    def _gone(self, reason: str) -> None:
        """Gives up a server that no longer answers. If it had been met this counts as a refusal, see offences.py."""
        answered = self.state in (*ANSWERING, SUPERSEDED)
        self.lose(reason)
        if answered:
            self.refuse(GONE, reason)

    # ---- upkeep

    @property
    def _whole_capacity(self) -> int:
        """Completions that it accepts at once if it has none."""
        return self.status.slots + self.status.queue_capacity

    def _end_upkeep(self) -> None:
        if self._upkeep is not None and self._upkeep is not asyncio.current_task():
            self._upkeep.cancel()
        self._upkeep = None
        if self._probing is not None:
            self._probing.cancel()
        self._probing = None

    async def _probe_again(self, step: int) -> None:
        capacity = self._whole_capacity
        try:
            got = await self._ask(step, pinned=False, capacity=capacity, may_be_full=True)
        except grpc.aio.AioRpcError:
            # It is full, most likely by us: a short queue is kept full. The probe is sent in parts that fit into it;
            # meanwhile the slots continue with what they have.
            capacity = max(1, self.status.queue_capacity)
            self.paused = True
            try:
                while self.in_flight + capacity > self._whole_capacity:
                    await asyncio.sleep(BREATH_SECONDS)
                got = await self._ask(step, pinned=False, capacity=capacity)
            finally:
                self.paused = False
                self._context.changed()
        if got is not None and self.state == ACTIVE:
            self.samples, self.samples_step = got, step
            self._context.event("probed", {"server": self.address})

    async def _keep_up(self) -> None:
        while self._upkeep is asyncio.current_task() and not self.unlisted:  # until it is given up or rejected
            self.version_changed.clear()
            target = self.target
            if target is not None and self.step != target:
                if self.state in (PROBING, CANDIDATE):
                    self.samples, self.samples_step = (), None
                    self.enter(UPDATING, "")
                good = await self._push(target)
            elif target is not None and self.state in (UPDATING, PROBING):
                good = await self._sample(target)
            else:
                await self.version_changed.wait()
                good = True
            if not good or self.free_at > time.monotonic():
                await asyncio.sleep(max(BREATH_SECONDS, self.free_at - time.monotonic()))

    async def _push(self, step: int) -> bool:
        base = None if self._needs_full_sync else self.step
        self._needs_full_sync = False
        try:
            timeout = self._config.push_seconds
            report = await self._context.publisher.push(self._stub, step, self.process, base=base, timeout=timeout)
        except PushRefused as error:
            if base is not None and isinstance(error, FullSyncNeeded):
                _log.info("server %s: version %d goes out whole (%s)", self.address, step, peer_text.printable(error))
                self._needs_full_sync = True
                return True  # at once
            why = f"is refused: {error}"
        except TimeoutError:
            why = "did not arrive in time"
        except grpc.aio.AioRpcError as error:
            why = f"did not arrive: {describe(error)}"
        else:
            self.record.forgive(UPDATE_FAILED)
            self._applied.append((time.monotonic(), report.step))
            self._context.event("push", {"server": self.address, **dataclasses.asdict(report)})
            self.set_version(report.step)
            return True
        self.refuse(UPDATE_FAILED, f"version {step} {why}", log=True)
        self.hurry()
        return False

    async def _sample(self, step: int) -> bool:
        """Lets the candidate sample a little with version `step`, for the trainer to compare."""
        if self.state != PROBING:
            self.enter(PROBING, "")
        got = await self._ask(step, pinned=True, capacity=self._whole_capacity)
        if got is None:
            return False
        self.samples, self.samples_step = got, step
        self.enter(CANDIDATE, "")
        return True

    async def _ask(
        self, step: int, *, pinned: bool, capacity: int, may_be_full: bool = False
    ) -> tuple[Sample, ...] | None:
        """Its samples for the probe, with version `step`, or a later one if not pinned; None if that fails.

        capacity: completions requested at once. Raises AioRpcError if it has no capacity now and may_be_full.
        """
        context, config, incarnation = self._context, self._config, self._incarnation.value
        probe = functools.partial(
            context.requests.probe, self.address, incarnation=incarnation, version=step, pinned=pinned
        )
        spread = spread_probes(context.servers.probe_prompts, context.config.parity.completions)
        requests = [(row, probe(row, samples=samples)) for row, samples in spread]
        tokens = max(request.most_tokens(wanted) for _, request in requests for wanted in request.completions)
        # The time limit of any completion, see server_state.py; and some of them wait for a slot.
        rounds = -(-sum(len(request.completions) for _, request in requests) // self.status.slots)
        seconds = config.stall_seconds + rounds * tokens / config.slowest_tokens_per_second
        try:
            got = await self._samples(requests, capacity=capacity, seconds=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self.reject(f"server {self.address} cannot serve this run: {describe(error)}")
            elif may_be_full and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            else:
                self.refuse(PROBE_FAILED, describe(error), log=True)
            return None
        except ValueError as error:
            self.reject(f"server {self.address} breaks the contract: {error}")
            return None
        if any(completion.finish_reason == "aborted" for _, completion in got):
            self.refuse(PROBE_FAILED, "it returns unfinished completions, as a server does that shuts down", log=True)
            return None
        self.record.forgive(PROBE_FAILED)
        return tuple(got)

    async def _samples(self, requests: Sequence[RowRequest], *, capacity: int, seconds: float) -> list[Sample]:
        """The completions of each request, in waves of at most `capacity`. Raises as `_read`."""
        samples: list[Sample] = []

        async def ask(row: Row, request: codec.GroupRequest) -> list[Sample]:
            return [(row, completion) async for completion in self._read(request, seconds=seconds)]

        for wave in _waves(requests, max(1, capacity)):
            asked = [asyncio.ensure_future(ask(*pair)) for pair in wave]
            try:
                for part in await asyncio.gather(*asked):
                    samples += part
            finally:
                # If one fails, the others must not keep running.
                for call in asked:
                    call.cancel()
        return samples


def _waves(requests: Sequence[RowRequest], capacity: int) -> list[list[RowRequest]]:
    """The same completions in waves of at most `capacity`; in a wave those of one row are one request."""
    wanted = [(number, one) for number, (_, request) in enumerate(requests) for one in request.completions]
    waves = []
    for start in range(0, len(wanted), capacity):
        wave: list[RowRequest] = []
        for number, part in itertools.groupby(wanted[start : start + capacity], key=operator.itemgetter(0)):
            row, request = requests[number]
            wave.append((row, dataclasses.replace(request, completions=tuple(one for _, one in part))))
        waves.append(wave)
    return waves

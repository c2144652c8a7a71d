"""One server, seen from the trainer: its heartbeat, and the reactions to each status.

    state    what is known of it, and every change of that                server_state.py
    calls    the requests sent to it                                      calls.py
    upkeep   the versions sent to it, and what it samples for the probe    upkeep.py

A server that is given up ends up in `connecting` with all its calls cancelled, and returns the way a new one arrives.
Everything here runs on the fleet's event loop.
"""

import asyncio
import contextlib
import time

import grpc

from scalerl_jax.contract import peer_text, security
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.rollouts.errors import ProbeError
from scalerl_jax.rollouts.servers import server_state, validate_status
from scalerl_jax.rollouts.servers.calls import Calls
from scalerl_jax.rollouts.servers.context import ClientContext
from scalerl_jax.rollouts.servers.server_state import ServerState
from scalerl_jax.rollouts.servers.upkeep import Upkeep
from scalerl_jax.rollouts.servers.validate_status import StatusCheck

SPEED_SECONDS = 30.0
SURE_AFTER = 8  # failed calls in a row: then it is an authentication failure, not a restart that looks like one
GONE = "is lost repeatedly"
AUTH_FAILURE = "one end does not trust the other"
PATIENCE_SECONDS = 5.0  # total time a finished batch waits for a candidate that is about to be ready

SUPERSEDED_BY = "owned by a newer trainer (incarnation {}; ours {}); if that trainer is gone, restart the server"


class ServerClient(ServerState):
    """See the module."""

    def __init__(self, address: str, context: ClientContext):
        super().__init__(address, context, end_calls=self._end_work)
        self._config, self._incarnation = context.config, context.incarnation
        self._channel = security.connect(address, context.servers.credentials)
        self._stub = Stub(self._channel)
        self.calls = Calls(self, self._stub, context, finished=self._call_finished)
        self._upkeep = Upkeep(self, self._stub, context, self.calls)
        self.tried = False  # whether a status call has ended, with or without an answer
        self.auth_failures = 0  # calls in a row that ended because one end does not authenticate the other
        self._statuses = StatusCheck()
        self._sampled = (0, -1.0)  # (tokens, when it had sampled that many)
        self._polled_at = time.monotonic()
        self._count_from_here = False  # its usage up to the next status is not booked
        self._held = False  # whether it held completions of ours at its last status
        self._evaluates = False  # whether its time since the last status is booked as evaluation

    # ---- what the fleet reads

    def completions_per_second(self, now: float) -> float:
        """Its measured speed over the last SPEED_SECONDS, or since it became active; 0 while it is not active."""
        since = max(now - SPEED_SECONDS, self.state_since if self.state == server_state.ACTIVE else now)
        return sum(at > since for at in self.calls.finishes) / max(1.0, now - since)

    # ---- what the fleet decides

    def leave(self) -> None:
        """Makes it leave: it is no longer listed."""
        if self.unlisted:
            return
        self.unlisted = True
        if not self.calls.in_flight:
            self.lose("")
        self.enter(server_state.LEAVING, "it is no longer listed")

    def probe_again(self) -> None:
        """If it has groups, it also samples a little for the probe."""
        if self.state == server_state.ACTIVE and self.step is not None:
            self._upkeep.probe(self.step)

    def _end_work(self) -> None:
        self._upkeep.end()
        self.calls.end()

    def _call_finished(self) -> None:
        if self.evaluation is not None and not self._evaluates and self.calls.only(self.evaluation.buffer):
            self.hurry()  # drained: from here on its time is the evaluation's

    # ---- heartbeat

    async def run(self) -> None:
        """Until cancelled: requests the status about once a heartbeat and acts on it."""
        try:
            while True:
                self.hurried.clear()
                began, asked_at = time.monotonic(), validate_status.clock()
                try:
                    status = await self._stub.Status(pb.StatusRequest(), timeout=self._config.status_seconds)
                except grpc.aio.AioRpcError as error:
                    self._excuse()
                    self._unheard(error)
                else:
                    self._excuse()
                    if status is not None:
                        self._heard(status, began, asked_at)
                    elif not self.offend("sends a status that cannot be decoded") and self._met:
                        self.lose("its status cannot be decoded")
                self.tried = True
                pause = self._config.heartbeat_seconds
                # Not wait_for: it loses a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(pause, 0.25) if self.state == server_state.CONNECTING else pause):
                        await self.hurried.wait()
        finally:
            self._upkeep.end()
            self.calls.close()
            await self._channel.close()

    @property
    def _met(self) -> bool:
        return self.state in (*server_state.ANSWERING, server_state.LEAVING)

    def _excuse(self) -> None:
        """Extends deadlines by the time in which the trainer did not poll, because it was stopped or stalled."""
        now = time.monotonic()
        longest = self._config.status_seconds + self._config.heartbeat_seconds  # from one poll to the next
        missed, self._polled_at = now - self._polled_at - longest, now
        if missed > 0 and self.heard_at >= 0:
            self.heard_at = min(now, self.heard_at + missed)
            self._sampled = (self._sampled[0], min(now, self._sampled[1] + missed))
            self.calls.excuse(missed, now=now)

    def _heard(self, status: pb.StatusReply, began: float, asked_at: float) -> None:
        now, version = time.monotonic(), status.version
        newest = self._context.publisher.latest if version.incarnation == self._incarnation.value else None
        found = self._statuses.check(status, asked_at=asked_at, heard_at=validate_status.clock(), newest=newest)
        if found.lie:
            self._lied(status, found.lie)
            return
        another_process = status.server_id != self.status.server_id
        if another_process and self._met:
            self._gone("it was restarted")
        self.record = self._context.records.of(self.address, status.server_id, now=now)
        self.heard_at, self.auth_failures = now, 0
        if self.record.banished:  # a rejected process may reappear between others; its time is not booked
            if self.state != server_state.REJECTED:
                self.lose("")
                self.enter(server_state.REJECTED, "it was sent away before")
            return
        waits = now < self.record.until  # if it is not met yet
        self._observe(status, another_process, found.from_here, waits)
        if not self._incarnation.outranks(version.incarnation):
            if self.state != server_state.SUPERSEDED and not (self.state == server_state.CONNECTING and waits):
                self._supersede(version.incarnation)
            return
        # A status requested before a push ended may be older than that push's report.
        step = version.step if version.incarnation == self._incarnation.value else None
        applied = self._upkeep.applied_by(began)
        if began > self._upkeep.applied_at:
            self.set_version(step)
        if self._stands_still(status, now):
            return
        self.calls.expire(now)
        if self._met and applied is not None and (step is None or step < applied):
            if self.offend("no longer holds the weights that it took"):
                return
            if self.state == server_state.ACTIVE:
                self.lose("it no longer holds this run's weights")
        try:
            self._context.servers.check(self.address, status)  # each time: it costs nothing
        except ProbeError as error:
            self.reject(str(error))
            return
        if (
            self.state in (server_state.CONNECTING, server_state.REJECTED, server_state.SUPERSEDED)
            and not now < self.record.until
        ):
            self.patience = PATIENCE_SECONDS if self.record.meet() else 0.0
            self.enter(server_state.UPDATING, "")
            self._upkeep.begin()

    def _observe(self, status: pb.StatusReply, another_process: bool, from_here: bool, waits: bool) -> None:
        """Reports its time and tokens, to be booked."""
        self._count_from_here = self._count_from_here or from_here
        if self.state == server_state.CONNECTING and waits:  # not met yet: its time is not booked
            self._count_from_here = True
        else:
            self._events.observe(status, self._evaluates and not another_process, self._count_from_here)
            self._count_from_here = False
        self._evaluates = self.evaluation is not None and self.calls.only(self.evaluation.buffer)
        if not another_process and self._held:  # all the time since the last status
            self.record.sample(status.sampled_tokens - self.status.sampled_tokens, held=self.calls.in_flight)
        self._held = self.calls.in_flight > 0
        self.status = status

    def _supersede(self, incarnation: int) -> None:
        met = self.state in server_state.ANSWERING
        self.lose("")
        if met:
            self.refuse(GONE, "it is another trainer's now")
        if not self.record.banished:
            self.enter(server_state.SUPERSEDED, SUPERSEDED_BY.format(incarnation, self._incarnation.value))

    def _stands_still(self, status: pb.StatusReply, now: float) -> bool:
        """Whether it has sampled nothing for too long although it has requests."""
        tokens = status.sampled_tokens + status.prefill_tokens
        if tokens != self._sampled[0] or not self.calls.in_flight:
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
        if self.state == server_state.REJECTED:
            return
        if status.server_id == self.status.server_id:
            self.offend("sends an implausible status", lie)
            return
        # The first status of a process: nothing else is known of it.
        self.lose("")
        self.record = self._context.records.of(self.address, status.server_id, now=time.monotonic())
        self.status = pb.StatusReply(server_id=status.server_id[: validate_status.MAXIMUM_NAME])
        self.reject(f"server {self.address}: its status is implausible: {lie}")

    def _unheard(self, error: grpc.aio.AioRpcError) -> None:
        why = security.refusal(error, self._context.servers.credentials)
        self.auth_failures = self.auth_failures + 1 if why else 0
        certain = error.code() is grpc.StatusCode.UNAUTHENTICATED  # stated by the server, not guessed
        if why and self.state == server_state.CONNECTING:
            # A process that exits closes half-open connections, too.
            sure = certain or self.heard_at < 0 or self.auth_failures >= SURE_AFTER
            if sure and (reason := peer_text.printable(why, longest=960)) != self.reason:
                self.reason = reason  # may contain the server's own text, different each time
                if self._log_limit.happened(AUTH_FAILURE, now=time.monotonic()):
                    self.enter(server_state.CONNECTING, why)
            return
        if why and certain:
            self._gone(why)
            return
        if self.state == server_state.CONNECTING or self.state == server_state.REJECTED:
            return
        silent = time.monotonic() - self.heard_at
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._gone("the connection is broken")
        elif silent >= self._config.silence_seconds:
            self._gone(f"no answer for {silent:.0f} s")

    def _gone(self, reason: str) -> None:
        """Gives up a server that no longer answers. If it had been met this counts as a refusal, see offences.py."""
        met = self.state in (*server_state.ANSWERING, server_state.SUPERSEDED)
        self.lose(reason)
        if met:
            self.refuse(GONE, reason)

"""One server, seen from the trainer: heartbeat, what it holds, in which state it is (states.py).

    calls    what it is asked for                                         calls.py
    upkeep   the versions sent to it, and what it samples for the probe    upkeep.py
    record   what it delivered and what it did wrong                      offences.py

A server that is given up ends up in `connecting` with all its calls cancelled, and comes back the way a new one comes.
Everything here runs on the fleet's event loop.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any

import grpc

from scalerl_jax.config import FleetConfig
from scalerl_jax.contract import codec, peer_text, security
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.rollouts.errors import ProbeError
from scalerl_jax.rollouts.incarnation import Incarnation
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers import validate_status
from scalerl_jax.rollouts.servers.calls import Calls
from scalerl_jax.rollouts.servers.events import ServerEvents
from scalerl_jax.rollouts.servers.offences import Consequence, Record, Records, Telling
from scalerl_jax.rollouts.servers.probe_samples import Sample
from scalerl_jax.rollouts.servers.states import (
    ACTIVE,
    ANSWERING,
    CANDIDATE,
    CONNECTING,
    LEAVING,
    REJECTED,
    SUPERSEDED,
    UPDATING,
)
from scalerl_jax.rollouts.servers.upkeep import Upkeep
from scalerl_jax.rollouts.servers.validate import validate
from scalerl_jax.rollouts.servers.validate_status import StatusCheck
from scalerl_jax.rollouts.weights.publisher import Publisher

_log = logging.getLogger(__name__)

SPEED_SECONDS = 30.0
SURE_AFTER = 8  # calls in a row: then it was no restart that looked like mistrust
GONE = "is lost again and again"
MISTRUST = "one end does not trust the other"
PATIENCE_SECONDS = 5.0  # a finished batch waits so long in all for a candidate that is about to be ready

SUPERSEDED_BY = (
    "it holds weights of a trainer that was started later than this one: {}, this one is {}; "
    "where that one is no more, start the server anew"
)


class ServerClient:
    """See the module. `address` is what gRPC dials; it names the server in everything people read."""

    def __init__(
        self,
        address: str,
        *,
        config: FleetConfig,
        requests: Requests,
        publisher: Publisher,
        events: ServerEvents,
        incarnation: Incarnation,
        records: Records | None = None,
        credentials: security.Credentials = security.PLAIN,
        vocabulary: int = 0,
    ):
        self.address, self._config = address, config
        self._publisher, self._events, self._incarnation = publisher, events, incarnation
        self._credentials, self._vocabulary = credentials, vocabulary
        self._channel = security.connect(address, credentials)
        self._stub = Stub(self._channel)
        self._hurry = asyncio.Event()  # do not wait for the next heartbeat
        self._statuses = StatusCheck()
        self._sampled = (0, -1.0)  # (tokens, when it had sampled that many)
        self._looked_at = time.monotonic()
        self._book_from_here = False  # what its counters say of the time up to its next status is not booked
        self._held = False  # completions of ours, at its last status
        self._telling = Telling()
        self._records = Records() if records is None else records
        self.record = Record()  # of the process that answered last
        parts: dict[str, Any] = {"stub": self._stub, "config": config, "requests": requests, "events": events}
        self.calls = Calls(self, **parts, validate=self._validate, finished=self._call_finished)
        self._upkeep = Upkeep(self, **parts, publisher=publisher, target=self._target, validate=self._validate)
        self.state, self.reason = CONNECTING, "not reached yet"
        self.status = pb.StatusReply()
        self.step: int | None = None  # the version held, None: not one of ours
        self.heard_at = -1.0
        self.tried = False  # it has answered, or not
        self.state_since = time.monotonic()
        self.evaluation: Any = None  # evaluation.Evaluation it works for
        self.samples: tuple[Sample, ...] = ()  # for the probe, to be looked at
        self.samples_step: int | None = None
        self.leaving = False  # no longer listed
        self.mistrusted = 0  # calls in a row that ended because one end does not trust the other
        self.patience = 0.0  # seconds that the trainer would still wait for it to be ready, see Fleet
        self._evaluates = False  # what its time since the last status is booked as

    # ---- what the fleet reads

    @property
    def in_flight(self) -> int:
        """Completions asked of it and not yet delivered."""
        return self.calls.in_flight

    @property
    def free_at(self) -> float:
        """It is asked for nothing new before."""
        return self.record.until

    def completions_per_second(self, now: float) -> float:
        """Its measured speed: over the last SPEED_SECONDS, or since it was given up last."""
        since = max(now - SPEED_SECONDS, self.state_since if self.state == ACTIVE else now)
        return sum(at > since for at in self.calls.finishes) / max(1.0, now - since)

    # ---- heartbeat

    async def run(self) -> None:
        """Until cancelled: asks for the status about once a heartbeat and acts on what it says."""
        try:
            while True:
                self._hurry.clear()
                began, asked_at = time.monotonic(), validate_status.clock()
                try:
                    status = await self._stub.Status(pb.StatusRequest(), timeout=self._config.status_seconds)
                except grpc.aio.AioRpcError as error:
                    self._excuse()
                    self._unheard(error)
                else:
                    self._excuse()
                    if status is None:
                        self._not_a_status()
                    else:
                        self._heard(status, began, asked_at)
                self.tried = True
                pause = self._config.heartbeat_seconds
                if self.state == CONNECTING:
                    pause = min(pause, 0.25)
                await _wait(self._hurry, pause)
        finally:
            self._end_calls()
            await self._channel.close()

    def _excuse(self) -> None:
        """Nothing is judged for time in which the trainer did not look: it was stopped, or stood still."""
        now = time.monotonic()
        longest = self._config.status_seconds + self._config.heartbeat_seconds  # from one look to the next
        missed, self._looked_at = now - self._looked_at - longest, now
        if missed > 0 and self.heard_at >= 0:
            self.heard_at = min(now, self.heard_at + missed)
            self._sampled = (self._sampled[0], min(now, self._sampled[1] + missed))
            self.calls.excuse(missed, now=now)

    def _not_a_status(self) -> None:
        if not self.offend("sends a status that cannot be decoded") and self.state in (*ANSWERING, LEAVING):
            self.lose("its status cannot be decoded")

    def _heard(self, status: pb.StatusReply, began: float, asked_at: float) -> None:
        now = time.monotonic()
        newest = self._publisher.latest if status.version.incarnation == self._incarnation.value else None
        found = self._statuses.look(status, asked_at=asked_at, heard_at=validate_status.clock(), newest=newest)
        if found.lie:
            self._lied(status, found.lie)
            return
        another_process = status.server_id != self.status.server_id
        if another_process and self.state in (*ANSWERING, LEAVING):
            self._gone("it was started anew")
        self.record = self._records.of(self.address, status.server_id, now=now)
        self.heard_at, self.mistrusted = now, 0
        if self.record.banished:  # a process that was sent away may come back between others; its time is not booked
            if self.state != REJECTED:
                self.lose("")
                self.enter(REJECTED, "it was sent away before")
            return
        self._book_from_here = self._book_from_here or found.anew
        if self.state == CONNECTING and now < self.record.until:  # not met yet: its time is its own
            self._book_from_here = True
        else:
            self._events.observe(status, self._evaluates and not another_process, self._book_from_here)
            self._book_from_here = False
        self._evaluates = self.evaluation is not None and self.calls.only(self.evaluation.book)
        if not another_process and self._held:  # all the time since the last status
            self.record.sample(status.sampled_tokens - self.status.sampled_tokens, held=self.in_flight)
        self._held = self.in_flight > 0
        self.status = status
        version = codec.version_from_proto(status.version)
        if not self._incarnation.outranks(version.incarnation):
            if self.state != SUPERSEDED and not (self.state == CONNECTING and now < self.record.until):
                met = self.state in ANSWERING
                self.lose("")
                if met:
                    self.refuse(GONE, "it is another trainer's now")
                if self.record.banished:
                    return
                self.enter(SUPERSEDED, SUPERSEDED_BY.format(version.incarnation, self._incarnation.value))
            return
        # A status asked for before the last push ended may be older than what the push said.
        if began > self._upkeep.applied_at:
            self.holds(version.step if version.incarnation == self._incarnation.value else None)
        tokens = status.sampled_tokens + status.prefill_tokens
        if tokens != self._sampled[0] or not self.in_flight:
            self._sampled = (tokens, now)
        elif now - self._sampled[1] >= self._config.stall_seconds:
            seconds = now - self._sampled[1]
            if not self.offend("answers, but samples nothing", f"{seconds:.0f} s"):
                self.lose(f"it answers, but has sampled nothing for {seconds:.0f} s")
            return
        self.calls.look(now)
        if self.state == ACTIVE and self.step is None:
            if self.offend("no longer holds the weights that it took"):
                return
            self.lose("it no longer holds this run's weights")
        try:
            self._events.check(self.address, status)  # each time: it costs nothing
        except ProbeError as error:
            self.reject(str(error))
            return
        if self.state in (CONNECTING, REJECTED, SUPERSEDED):
            if now < self.record.until:
                return
            self.patience = PATIENCE_SECONDS if self.record.meet() else 0.0
            self.enter(UPDATING, "")
            self._upkeep.begin()

    def _lied(self, status: pb.StatusReply, lie: str) -> None:
        """A status that cannot be is dropped: nothing of it is booked or acted upon."""
        if self.state == REJECTED:
            return
        if status.server_id == self.status.server_id:
            self.offend("its status says what cannot be", lie)
            return
        # The first of a process: nothing is known of it but this.
        self.lose("")
        self.record = self._records.of(self.address, status.server_id, now=time.monotonic())
        self.status = pb.StatusReply(server_id=status.server_id[: validate_status.MAXIMUM_NAME])
        self.reject(f"server {self.address}: its status says what cannot be: {lie}")

    def _unheard(self, error: grpc.aio.AioRpcError) -> None:
        why = security.refusal(error, self._credentials)
        self.mistrusted = self.mistrusted + 1 if why else 0
        certain = error.code() is grpc.StatusCode.UNAUTHENTICATED  # in so many words, not guessed
        if why and self.state == CONNECTING:
            # A process that ends closes the connections half made to it, too.
            sure = certain or self.heard_at < 0 or self.mistrusted >= SURE_AFTER
            if sure and _reason(why) != self.reason:
                self.reason = _reason(why)  # may hold words of its own, other ones each time
                if self._telling.happened(MISTRUST, now=time.monotonic()):
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
        """It was met, and does not answer any more. Of a process that does nothing else this is a refusal to work."""
        met = self.state in (*ANSWERING, SUPERSEDED)
        self.lose(reason)
        if met:
            self.refuse(GONE, reason)

    def holds(self, step: int | None) -> None:
        if step != self.step:
            self.step = step
            self._upkeep.wake()
            self._events.changed()

    def hurry(self) -> None:
        """The next status is asked for now."""
        self._hurry.set()

    def _call_finished(self) -> None:
        if self.evaluation is not None and not self._evaluates and self.calls.only(self.evaluation.book):
            self.hurry()  # drained: from here on its time is the evaluation's

    # ---- states

    def enter(self, state: str, reason: str) -> None:
        reason = _reason(reason)
        self.state, self.reason, self.state_since = state, reason, time.monotonic()
        said = f" ({reason})" if reason else ""
        # Of a rejection the fleet knows whether it ends the run, which says it by itself.
        # Of one that was never heard, too: see ServerPool.
        warn = state == SUPERSEDED or (state == CONNECTING and self.heard_at >= 0)
        level = logging.WARNING if warn else logging.INFO
        _log.log(level, "server %s: %s%s", self.address, state, said)
        self._events.event("server", {"server": self.address, "state": state, "reason": reason, "step": self.step})
        self._events.changed()

    def lose(self, reason: str) -> None:
        """Gives the server up: what it has not delivered is asked of others. It may come back."""
        self._end_calls()
        self.step, self.evaluation, self.samples, self.samples_step = None, None, (), None
        if reason:
            self.enter(CONNECTING, reason)

    def _target(self) -> int | None:
        """The version that it should hold."""
        return self.evaluation.version if self.evaluation is not None else self._publisher.latest

    def reject(self, reason: str) -> None:
        """Turns this process away for good."""
        self.record.banished = True
        self.lose("")
        self.enter(REJECTED, reason)
        self._events.rejected(reason)

    def offend(self, kind: str, detail: str = "", *, times: int = 1) -> bool:
        """It has done wrong, `times` times: counted, logged now and then. True: by this it is sent away for good.

        kind: a few words of ours that name what it does. detail: of this time; may hold its own words.
        """
        now = time.monotonic()
        return self._act(kind, detail, self.record.offend(kind, now=now, times=times), now)

    def refuse(self, kind: str, detail: str = "", *, tell: bool = False) -> None:
        """It did not take what it was sent: it is left alone for a moment. An offence where it never does.

        tell: this is worth a line by itself.
        """
        now = time.monotonic()
        consequence = self.record.refuse(kind, now=now)
        if tell and not consequence.tell and (times := self._telling.happened(kind, now=now)):
            _log.warning("server %s: %s (%s)%s", self.address, kind, _detail(detail), f", {times} times" * (times > 1))
        self._act(kind, detail, consequence, now)

    def _act(self, kind: str, detail: str, consequence: Consequence, now: float) -> bool:
        said, wait = f"{kind}{f' ({_detail(detail)})' if detail else ''}", max(0.0, consequence.until - now)
        if consequence.banished:
            self.reject(f"server {self.address}: {said}, {self.record.counts[kind]} times")
            return True
        asyncio.get_running_loop().call_later(wait, self._events.changed)
        if consequence.tell:
            _log.warning("server %s: %s, %d times; not asked for %.0f s", self.address, said, consequence.tell, wait)
        return False

    def leave(self) -> None:
        """It is no longer listed."""
        if self.leaving:
            return
        self.leaving = True
        if not self.in_flight:
            self.lose("")
        self.enter(LEAVING, "it is no longer listed")

    def admit(self) -> None:
        assert self.state == CANDIDATE
        self.samples = ()
        self.enter(ACTIVE, "")

    def _end_calls(self) -> None:
        self._upkeep.end()
        self.calls.end()

    def retarget(self) -> None:
        """The version the server should hold may have changed, or what it works on."""
        self._upkeep.wake()
        self.hurry()  # what it did up to here is booked before the next thing begins

    def probe_again(self) -> None:
        """It has groups, and samples a little for the probe beside them."""
        if self.state == ACTIVE and self.step is not None:
            self._upkeep.probe(self.step)

    def _validate(self, completion: codec.Completion, request: codec.GroupRequest) -> None:
        newest = self._publisher.latest
        assert newest is not None  # nothing is asked of a server before it holds a version
        validate(completion, request, newest=newest, vocabulary=self._vocabulary)


def _reason(text: str) -> str:
    """Of a state: our words, and of the server's as many as are fit for a line."""
    return peer_text.said(text, longest=960)


def _detail(text: str) -> str:
    return peer_text.said(text, longest=600)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    # Not wait_for: it loses a cancellation that comes together with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()

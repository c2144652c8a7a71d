"""What the trainer knows of one server, and every change of it: only the methods here, and of ServerClient, make one.

    state        one of those below, and why
    version      the one it holds, and the one it should hold
    evaluation   the one that it works for, instead of training groups
    samples      for the probe, to be looked at by the trainer's thread
    record       what its process delivered and what it did wrong    offences.py

Lives on the fleet's event loop.

The states of one server, seen from the trainer.

connecting ──answers──> updating ──holds the version──> probing ──samples are in──> candidate ──admit()──> active
    ^                      |   ^─────────────── a newer version came ──────────────────┘                    |
    └──── no answer for silence_seconds, connection refused, another process on the port, ... ──────────────┘
rejected: turned away for good; another process on the same address is met as a new one
superseded: it holds weights of a trainer that was started later; left alone until it does not
leaving:  no longer listed; delivers what it was asked for, and is released then
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from scalerl_jax.contract import peer_text
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.group_buffer import GroupBuffer, Process
from scalerl_jax.rollouts.servers.context import ClientContext
from scalerl_jax.rollouts.servers.offences import Consequence, Record

CONNECTING, UPDATING, PROBING, CANDIDATE = "connecting", "updating", "probing", "candidate"
ACTIVE, REJECTED, SUPERSEDED, LEAVING = "active", "rejected", "superseded", "leaving"
ANSWERING = (UPDATING, PROBING, CANDIDATE, ACTIVE)


_log = logging.getLogger(__name__)

Sample = tuple[Row, Completion]


class Probed(NamedTuple):
    """What a server has sampled for the probe."""

    process: Process
    samples: tuple[Sample, ...]


class PinnedWork(Protocol):
    """An evaluation, as far as a server has to do with it."""

    @property
    def version(self) -> int: ...

    @property
    def buffer(self) -> GroupBuffer: ...


class ServerState:
    """See the module. `address` is what gRPC dials; it names the server in everything people read."""

    def __init__(self, address: str, context: ClientContext, *, end_calls: Callable[[], None]):
        """end_calls: ends everything that is asked of it."""
        self._end_calls = end_calls
        self.address, self._context, self._events = address, context, context.events
        self.state, self.reason, self.state_since = CONNECTING, "not reached yet", time.monotonic()
        self.status = pb.StatusReply()
        self.heard_at = -1.0  # time.monotonic() of the last status
        self.record = Record()  # of the process that answered last
        self.step: int | None = None  # the version held, None: not one of ours
        self.evaluation: PinnedWork | None = None
        self.samples: tuple[Sample, ...] = ()
        self.samples_step: int | None = None  # the version that they are by
        self.paused = False  # it gets nothing new: the probe waits for room
        self.unlisted = False  # no longer listed
        self.patience = 0.0  # seconds that the trainer would still wait for it to be ready, see Candidates
        self.version_changed = asyncio.Event()  # the one held, or the one that it should hold
        self.hurried = asyncio.Event()  # do not wait for the next heartbeat
        self._log_limit = peer_text.LogLimit()

    @property
    def free_at(self) -> float:
        """It is asked for nothing new before."""
        return self.record.until

    @property
    def process(self) -> Process:
        """The one that answered last."""
        return Process(self.address, self.status.server_id)

    @property
    def target(self) -> int | None:
        """The version that it should hold."""
        return self._context.publisher.latest if self.evaluation is None else self.evaluation.version

    def hurry(self) -> None:
        """The next status is asked for now."""
        self.hurried.set()

    # ---- versions, and what it works on

    def set_version(self, step: int | None) -> None:
        """It holds this one."""
        if step != self.step:
            self.step = step
            self.version_changed.set()
            self._events.changed()

    def retarget(self) -> None:
        """The version that it should hold may have changed, or what it works on."""
        self.version_changed.set()
        self.hurry()  # what it did up to here is booked before the next thing begins

    def assign(self, evaluation: PinnedWork) -> None:
        """It finishes the groups that it has, and works for this evaluation alone."""
        self.evaluation = evaluation
        self.retarget()

    def release(self) -> None:
        """Of its evaluation: it catches up with the latest version, and gets training groups."""
        self.evaluation = None
        self.retarget()

    # ---- the probe

    def set_samples(self, samples: tuple[Sample, ...], step: int | None) -> None:
        """What it has sampled for the probe, by version `step`."""
        self.samples, self.samples_step = samples, step

    def pop_samples(self) -> tuple[Sample, ...]:
        """They are looked at once."""
        samples, self.samples = self.samples, ()
        return samples

    def pause(self, wanted: bool) -> None:
        """For the probe: as long as it is wanted it gets nothing new."""
        self.paused = wanted

    def spend_patience(self, seconds: float) -> None:
        """So long the trainer has waited for it."""
        self.patience -= seconds

    def admit(self) -> None:
        """Its samples are those of the policy: it gets groups."""
        assert self.state == CANDIDATE
        self.samples = ()
        self.enter(ACTIVE, "")

    # ---- states

    def enter(self, state: str, reason: str) -> None:
        # Our words, and of the server's as many as are fit for a line.
        reason = peer_text.printable(reason, longest=960)
        self.state, self.reason, self.state_since = state, reason, time.monotonic()
        suffix = f" ({reason})" if reason else ""
        # Of a rejection the fleet knows whether it ends the run, which says it by itself.
        # Of one that was never heard, too: see ServerPool.
        warn = state == SUPERSEDED or (state == CONNECTING and self.heard_at >= 0)
        level = logging.WARNING if warn else logging.INFO
        _log.log(level, "server %s: %s%s", self.address, state, suffix)
        self._events.event("server", {"server": self.address, "state": state, "reason": reason, "step": self.step})
        self._events.changed()

    def lose(self, reason: str) -> None:
        """Gives the server up: what it has not delivered is asked of others. It may come back."""
        self._end_calls()
        self.step, self.evaluation, self.samples, self.samples_step = None, None, (), None
        if reason:
            self.enter(CONNECTING, reason)

    def reject(self, reason: str) -> None:
        """Turns this process away for good."""
        self.record.banish()
        self.lose("")
        self.enter(REJECTED, reason)
        self._events.rejected(self.reason)

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
        if tell and not consequence.tell and (times := self._log_limit.happened(kind, now=now)):
            _log.warning("server %s: %s (%s)%s", self.address, kind, _detail(detail), f", {times} times" * (times > 1))
        self._act(kind, detail, consequence, now)

    def _act(self, kind: str, detail: str, consequence: Consequence, now: float) -> bool:
        message, wait = f"{kind}{f' ({_detail(detail)})' if detail else ''}", max(0.0, consequence.until - now)
        if consequence.banished:
            self.reject(f"server {self.address}: {message}, {self.record.counts[kind]} times")
            return True
        asyncio.get_running_loop().call_later(wait, self._events.changed)
        if consequence.tell:
            _log.warning("server %s: %s, %d times; not asked for %.0f s", self.address, message, consequence.tell, wait)
        return False


def _detail(text: str) -> str:
    return peer_text.printable(text, longest=600)

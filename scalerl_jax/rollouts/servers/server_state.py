"""What the trainer knows of one server. Only the methods here and those of ServerClient change it.

    state        one of those below, and why
    version      the one it holds, and the one it should hold
    evaluation   the one that it works for, instead of training groups
    samples      for the probe, to be compared by the trainer's thread
    record       what its process delivered, and its offences    offences.py

Lives on the fleet's event loop.

The states of one server, seen from the trainer.

connecting ──answers──> updating ──holds the version──> probing ──samples are in──> candidate ──admit()──> active
    ^                      |   ^─────────────── a newer version came ──────────────────┘                    |
    └──── no answer for silence_seconds, connection refused, another process on the port, ... ──────────────┘
rejected: for good; another process on the same address is met as a new one
superseded: it holds weights of a trainer that was started later; left alone as long as it does
leaving:  no longer listed; delivers what it was asked for, and is then released
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
    """A server's samples for the probe."""

    process: Process
    samples: tuple[Sample, ...]


class PinnedWork(Protocol):
    """The parts of an evaluation that a server needs."""

    @property
    def version(self) -> int: ...

    @property
    def buffer(self) -> GroupBuffer: ...


class ServerState:
    """See the module. `address` is what gRPC dials; it names the server in logs and messages."""

    def __init__(self, address: str, context: ClientContext, *, end_calls: Callable[[], None]):
        """end_calls: ends all calls of the server."""
        self._end_calls = end_calls
        self.address, self._context, self._events = address, context, context.events
        self.state, self.reason, self.state_since = CONNECTING, "not reached yet", time.monotonic()
        self.status = pb.StatusReply()
        self.heard_at = -1.0  # time.monotonic() of the last status
        self.record = Record()  # of the process that answered last
        self.step: int | None = None  # the version held; None: not one of ours
        self.evaluation: PinnedWork | None = None
        self.samples: tuple[Sample, ...] = ()
        self.samples_step: int | None = None  # the version that sampled them
        self.paused = False  # it gets no new requests: the probe waits for capacity
        self.unlisted = False  # no longer listed
        self.patience = 0.0  # seconds that the trainer would still wait for it to be ready, see Candidates
        self.version_changed = asyncio.Event()  # the one held, or the one that it should hold
        self.hurried = asyncio.Event()  # do not wait for the next heartbeat
        self._log_limit = peer_text.LogLimit()

    @property
    def free_at(self) -> float:
        """Time before which it gets no new requests."""
        return self.record.until

    @property
    def process(self) -> Process:
        """The process that answered last."""
        return Process(self.address, self.status.server_id)

    @property
    def target(self) -> int | None:
        """The version that it should hold."""
        return self._context.publisher.latest if self.evaluation is None else self.evaluation.version

    def hurry(self) -> None:
        """Requests the next status now."""
        self.hurried.set()

    # ---- versions, and what it works on

    def set_version(self, step: int | None) -> None:
        """Records the version that it holds."""
        if step != self.step:
            self.step = step
            self.version_changed.set()
            self._events.changed()

    def retarget(self) -> None:
        """Called when the version that it should hold, or what it works on, may have changed."""
        self.version_changed.set()
        self.hurry()  # its work so far is booked before the next begins

    def assign(self, evaluation: PinnedWork) -> None:
        """Lets it finish its groups, and then work for this evaluation alone."""
        self.evaluation = evaluation
        self.retarget()

    def release(self) -> None:
        """Releases it from its evaluation: it catches up with the latest version, and gets training groups."""
        self.evaluation = None
        self.retarget()

    # ---- the probe

    def set_samples(self, samples: tuple[Sample, ...], step: int | None) -> None:
        """Stores its samples for the probe, by version `step`."""
        self.samples, self.samples_step = samples, step

    def pop_samples(self) -> tuple[Sample, ...]:
        """Returns the samples, once."""
        samples, self.samples = self.samples, ()
        return samples

    def pause(self, wanted: bool) -> None:
        """While the probe wants this, it gets no new requests."""
        self.paused = wanted

    def spend_patience(self, seconds: float) -> None:
        """Counts the time that the trainer has waited for it."""
        self.patience -= seconds

    def admit(self) -> None:
        """Its samples match the policy: it gets groups."""
        assert self.state == CANDIDATE
        self.samples = ()
        self.enter(ACTIVE, "")

    # ---- states

    def enter(self, state: str, reason: str) -> None:
        # Our text, and as much of the server's as is fit for a line.
        reason = peer_text.printable(reason, longest=960)
        self.state, self.reason, self.state_since = state, reason, time.monotonic()
        suffix = f" ({reason})" if reason else ""
        # A rejection is logged by the fleet, which knows whether it ends the run.
        # A server that never answered is logged by ServerPool.
        warn = state == SUPERSEDED or (state == CONNECTING and self.heard_at >= 0)
        level = logging.WARNING if warn else logging.INFO
        _log.log(level, "server %s: %s%s", self.address, state, suffix)
        self._events.event("server", {"server": self.address, "state": state, "reason": reason, "step": self.step})
        self._events.changed()

    def lose(self, reason: str) -> None:
        """Gives the server up: its missing completions are requested from others. It may come back."""
        self._end_calls()
        self.step, self.evaluation, self.samples, self.samples_step = None, None, (), None
        if reason:
            self.enter(CONNECTING, reason)

    def reject(self, reason: str) -> None:
        """Rejects this process for good."""
        self.record.banish()
        self.lose("")
        self.enter(REJECTED, reason)
        self._events.rejected(self.reason)

    def offend(self, kind: str, detail: str = "", *, times: int = 1) -> bool:
        """Records `times` offences and logs them now and then. True: this one rejects it for good.

        kind: our own short name of the offence. detail: of this time; may contain the server's own text.
        """
        now = time.monotonic()
        return self._act(kind, detail, self.record.offend(kind, now=now, times=times), now)

    def refuse(self, kind: str, detail: str = "", *, tell: bool = False) -> None:
        """Records that it did not accept what it was sent: no requests for a moment. Repeated, it is an offence.

        tell: log this one by itself.
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

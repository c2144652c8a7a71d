"""Who is let in: a server that was met is a candidate, and gets no group before the trainer's thread has admitted it.

A candidate has sampled with the version that the trainer has reached; the trainer compares its log-probs with the
policy's, and admits or rejects it. A run ends where nobody is left that could be admitted.
"""

import logging
import time
from collections.abc import Callable

from scalerl_jax.rollouts.errors import FleetError, ProbeError
from scalerl_jax.rollouts.group_buffer import GroupBuffer
from scalerl_jax.rollouts.loop_thread import LoopThread, on_loop
from scalerl_jax.rollouts.servers import states
from scalerl_jax.rollouts.servers.pool import ServerPool
from scalerl_jax.rollouts.servers.probe_samples import Probed

_log = logging.getLogger(__name__)


class Candidates:
    """buffer: of the groups to be trained on. fail: ends the run, on the loop."""

    def __init__(
        self, thread: LoopThread, pool: ServerPool, buffer: GroupBuffer, *, fail: Callable[[BaseException], None]
    ):
        self._thread, self._pool, self._buffer, self._fail = thread, pool, buffer, fail
        self._ever_admitted = False
        self._patient_until = 0.0  # from wait_for_the_first() on
        self._held_at: float | None = None  # when a batch that is ready was held back for a candidate, last

    # ---- the trainer's thread

    def wait_for_the_first(self, *, connect_seconds: float, status_seconds: float) -> None:
        """Until a server has answered, and there was time for a word of the others: our incarnation is to be above
        theirs when the first version goes out.

        Raises FleetError where none answers within connect_seconds, or where trust is missing between us and each.
        """
        began = time.monotonic()
        self._patient_until = began + connect_seconds
        while True:
            elapsed = time.monotonic() - began
            if self._thread.call(lambda: self._pool.in_state(*states.ANSWERING)):
                if elapsed > status_seconds or self._thread.call(lambda: self._pool.all_tried):
                    return
            elif error := self._thread.call(self._pool.why_nobody, connect_seconds, elapsed > connect_seconds):
                raise FleetError(error)
            time.sleep(0.05)

    @on_loop
    def due(self) -> list[Probed]:
        """Those to be compared now: each has sampled with the version that the trainer has reached."""
        found = self._pool.in_state(states.CANDIDATE)
        return [Probed(c.process, c.samples) for c in found if c.samples_step == c.step == self._buffer.trained]

    @on_loop
    def admit(self, server: str) -> None:
        """Lets a candidate have groups. Nothing happens if it was lost meanwhile."""
        client = self._pool.named(server)
        if client is not None and client.state == states.CANDIDATE:
            self._ever_admitted = True
            client.admit()

    @on_loop
    def reject(self, server: str, why: str) -> None:
        """Turns a candidate away; a new process on the same address may come again."""
        client = self._pool.named(server)
        if client is not None:
            client.reject(why)

    # ---- the loop

    def begin_wait(self) -> None:
        """The trainer begins to wait for a batch."""
        self._held_at = None

    def holds_batch(self) -> bool:
        """Whether a batch that is ready is to wait for a server that is about to be. A trainer that is the slower side
        never waits for a batch: a candidate would always be one version behind it, and never be met."""
        soon = (states.UPDATING, states.PROBING, states.CANDIDATE)
        expected = [c for c in self._pool.in_state(*soon) if c.patience > 0 and not c.leaving]
        now = time.monotonic()
        for c in expected:
            c.spend_patience(now - (self._held_at or now))
        self._held_at = now if expected else None
        return bool(expected)

    def rejected(self, reason: str) -> None:
        """A run ends where none is left. Before the first was admitted it is the user's mistake, most likely."""
        if any(c.state != states.REJECTED for c in self._pool.clients):
            _log.warning("turned away: %s", reason)
        elif not self._ever_admitted:
            self._fail(ProbeError(reason))
        elif self._pool.fixed:
            self._fail(FleetError(f"every rollout server was turned away; the last one: {reason}"))
        else:
            _log.warning("turned away: %s; no other one is left", reason)

    def expire(self) -> None:
        """Nobody was admitted, somebody was turned away, and the others do not answer: nothing will come of it."""
        if self._ever_admitted or self._pool.in_state(*states.ANSWERING) or time.monotonic() < self._patient_until:
            return
        for client in self._pool.in_state(states.REJECTED):
            others = ", ".join(c.address for c in self._pool.clients if c.state != states.REJECTED)
            self._fail(ProbeError(f"{client.reason}; and nobody answers at {others}"))

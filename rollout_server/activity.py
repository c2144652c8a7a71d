"""Periodic activity log of a generator.

    a trainer comes      its first accepted request or version, and from where
    a trainer is gone    it made no call for AWAY_SECONDS; its completions and versions
    heartbeat            every BEAT_SECONDS in which something was sampled: completions, tokens a second, slots, queue

A trainer is identified by its incarnation; a call without one (Status) counts for the trainer of the same connection.
The number of trainers remembered and of lines logged a minute is bounded, whatever incarnations clients send.
"""

import dataclasses
import logging
import time
from collections.abc import Callable

from rollout_server.engines.engine import EngineStatus
from rollout_server.guard import QuietLog
from scalerl_jax.contract.peer_text import printable

AWAY_SECONDS = 60.0
BEAT_SECONDS = 60.0
MOST_TRAINERS = 8
MOST_CONNECTIONS = 64

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _TrainerActivity:
    came: float
    heard: float
    completions: int = 0
    versions: int = 0


class Activity:
    """Lives on the service's event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic):
        self._clock, self._quiet = clock, QuietLog(log, clock=clock)
        self._trainers: dict[int, _TrainerActivity] = {}  # by incarnation; the most recent caller is last
        self._connections: dict[str, int] = {}  # peer -> incarnation, in the same order
        self._completions = 0  # since the last heartbeat
        self._beat_at, self._beat_tokens = clock(), 0

    def welcome(self, incarnation: int, peer: str) -> None:
        """Records an accepted request or version of a trainer, and its connection."""
        now = self._clock()
        trainer = self._trainers.pop(incarnation, None)
        if trainer is None:
            trainer = _TrainerActivity(came=now, heard=now)
            self._quiet.log(
                "comes", logging.INFO, "%s comes: its first call is from %s", _name(incarnation), printable(peer)
            )
        trainer.heard = now
        self._trainers[incarnation] = trainer
        self._connections.pop(peer, None)
        self._connections[peer] = incarnation
        if len(self._trainers) > MOST_TRAINERS:
            del self._trainers[next(iter(self._trainers))]
        if len(self._connections) > MOST_CONNECTIONS:
            del self._connections[next(iter(self._connections))]

    def called(self, peer: str) -> None:
        """Records a call without an incarnation."""
        self._heard(self._connections.get(peer, -1))

    def completed(self, incarnation: int) -> None:
        self._completions += 1
        self._heard(incarnation).completions += 1

    def applied(self, incarnation: int) -> None:
        self._heard(incarnation).versions += 1

    def _heard(self, incarnation: int) -> _TrainerActivity:
        """The trainer of this incarnation, marked as active now; an unknown one is not remembered."""
        now = self._clock()
        trainer = self._trainers.get(incarnation, _TrainerActivity(now, now))
        trainer.heard = now
        return trainer

    def tick(self, status: EngineStatus) -> None:
        """To be called about once a second."""
        now = self._clock()
        for incarnation, trainer in list(self._trainers.items()):
            if now - trainer.heard > AWAY_SECONDS:
                del self._trainers[incarnation]
                served = f"{trainer.completions} completions, {trainer.versions} versions"
                text = f"{_name(incarnation)} is gone, no call for {AWAY_SECONDS:.0f} s; it had {served}"
                self._quiet.log("gone", logging.INFO, "%s in %.0f s", text, trainer.heard - trainer.came)
        seconds = now - self._beat_at
        if seconds < BEAT_SECONDS:
            return
        tokens = status.sampled_tokens - self._beat_tokens
        if tokens or self._completions:
            log.info(
                "in %.0f s: %d completions, %d tokens (%.0f a second); now %d slots busy, %d queued, step %d",
                *(seconds, self._completions, tokens, tokens / seconds),
                *(status.busy_slots, status.queued, status.version.step),
            )
        self._beat_at, self._beat_tokens, self._completions = now, status.sampled_tokens, 0


def _name(incarnation: int) -> str:
    return f"trainer {incarnation}" if incarnation else "a client without weights of its own"

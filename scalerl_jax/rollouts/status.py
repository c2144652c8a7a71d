"""What the trainer waits for, for how long, how deep the queues are: as text and as values. Read-only.

Where the time of a step went: how long the trainer waited, for what, how long it computed, and on how many cores.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scalerl_jax.rollouts.evaluation import Evaluation
from scalerl_jax.rollouts.group_buffer import GroupBuffer, GroupInFlight
from scalerl_jax.rollouts.servers import server_state
from scalerl_jax.rollouts.servers.client import ServerClient


@dataclasses.dataclass(frozen=True)
class BatchWait:
    """The trainer waits for a batch."""

    batch: int
    since: float  # time.monotonic()


def waiting(waits: BatchWait | None, buffer: GroupBuffer, clients: Sequence[ServerClient], unscored: int) -> str:
    """One line on what the trainer waits for; empty if it does not wait."""
    if waits is None:
        return ""
    now = time.monotonic()
    missing = buffer.missing(waits.batch)
    unopened = max(0, buffer.pacing.last_needed(waits.batch) + 1 - buffer.next_number)
    text = f"batch {waits.batch}, {now - waits.since:.0f} s: {len(missing) + unopened} groups missing"
    if missing:
        text += f"; oldest {_group(missing[0], now)}"
    elif unopened:
        text += f"; group {buffer.next_number} not asked for yet"
    in_flight = sum(c.in_flight for c in clients)
    queued = sum(c.status.queued for c in clients if c.state == server_state.ACTIVE)
    text += f"; in flight {in_flight} completions, queued {queued}, pending {buffer.pending()}, unscored {unscored}"
    counts = collections.Counter(c.state for c in clients)
    text += "; servers " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    away = [c for c in clients if c.state not in server_state.ANSWERING]
    if away:
        text += " (" + "; ".join(f"{c.address} {now - c.state_since:.0f} s: {c.reason}" for c in away) + ")"
    return text


def waits_for(waits: BatchWait | None, buffer: GroupBuffer) -> list[str]:
    """What the oldest group that the trainer waits for depends on: server addresses, or the names below. [] if none.

    "verifier": every completion has arrived, a score is missing
    "teacher NAME": likewise, but only that teacher's scores are missing
    "a free server": no server is asked for the missing completions
    "new weights": the group is not opened yet, because no server may sample it
    """
    if waits is None:
        return []
    missing = buffer.missing(waits.batch)
    if not missing:
        return [] if buffer.is_ready(waits.batch) else ["new weights"]
    if asked := _asked(missing[0]):
        return asked
    if _pending(missing[0]):
        return ["a free server"]
    return [f"teacher {name}" for name in _teachers(missing[0])] or ["verifier"]


def _teachers(group: GroupInFlight) -> list[str]:
    """The teachers that are all it waits for, once every completion has arrived; [] if another score is missing."""
    unscored = [wanted.index for wanted in group.requests if wanted.index not in group.scores]
    names = {group.with_teacher.get(index, "") for index in unscored}
    return [] if "" in names else sorted(names)


def _asked(group: GroupInFlight) -> list[str]:
    """The servers that have some of it."""
    return sorted({address for one in (group, *group.turns) for address in one.asked.values()})


def _pending(group: GroupInFlight) -> bool:
    return any(one.pending for one in (group, *group.turns))


def held_back(buffer: GroupBuffer) -> str:
    """Why no server may begin another group, even one that holds the newest weights; empty if it may."""
    pacing, number, trained = buffer.pacing, buffer.next_number, buffer.trained
    stored = buffer.stored()
    if pacing.admits(number, step=trained, trained=trained, stored=stored):
        return ""
    batch = pacing.batch(number)
    if batch >= pacing.batches:
        return "the run's last group is asked for"
    if pacing.admits(number, step=trained, trained=trained, stored=0):
        return f"{stored} finished groups wait for the trainer, which has trained {trained} batches"
    return f"batch {batch} is too far ahead of the trainer, which has trained {trained} batches (k is {pacing.k})"


def _group(group: GroupInFlight, now: float) -> str:
    text = f"{group.group_id} ({group.delivered()} of {len(group.requests)}, {now - group.opened_at:.0f} s"
    if asked := _asked(group):
        text += f", on {', '.join(asked)}"
    elif _pending(group):
        text += ", on no server"
    elif teachers := _teachers(group):
        text += f", with teacher {', '.join(teachers)}"
    else:
        text += ", with the verifier"
    return text + ")"


def status(
    waits: BatchWait | None,
    buffer: GroupBuffer,
    clients: Sequence[ServerClient],
    *,
    unscored: int,
    evaluation: Evaluation | None,
) -> dict[str, Any]:
    """Plain values for metrics and the progress line."""
    now = time.monotonic()
    return {
        "waiting": waiting(waits, buffer, clients, unscored),
        "waits_for": waits_for(waits, buffer),
        "held_back": held_back(buffer),
        "trained": buffer.trained,
        "next_group": buffer.next_number,
        "groups_in_flight": len(buffer.in_flight),
        "groups_ready": len(buffer.ready),
        "in_flight": sum(c.in_flight for c in clients),
        "pending": buffer.pending(),
        "unscored": unscored,
        "evaluation": None if evaluation is None else _evaluation(evaluation),
        "servers": {c.address: _server(c, now) for c in clients},
    }


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    buffer = evaluation.buffer
    return {
        "version": evaluation.version,
        "seconds": time.monotonic() - evaluation.asked_at,
        "prompts": buffer.pacing.groups,
        "ready": len(buffer.ready),
        "in_flight": len(buffer.in_flight),
    }


def _server(c: ServerClient, now: float) -> dict[str, Any]:
    return {
        "state": c.state,
        "reason": c.reason,
        "state_seconds": now - c.state_since,
        "step": c.step,
        "evaluating": c.evaluation is not None,
        "in_flight": c.in_flight,
        "completions_per_second": c.completions_per_second(now),
        "slots": c.status.slots,
        "busy_slots": c.status.busy_slots,
        "queued": c.status.queued,
        "silent_seconds": now - c.heard_at if c.heard_at >= 0 else None,
        "engine": c.status.engine,
        "sampled_tokens": c.status.sampled_tokens,
        "busy_seconds": c.status.busy_seconds,
        "up_seconds": c.status.up_seconds,
    }


class WaitTimes:
    """Time waited and computed between two rows of metrics. Used by the trainer's thread alone.

    clock: monotonic seconds. processor: CPU seconds of this process, over all its threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, processor: Callable[[], float] = time.process_time):
        self._clock, self._processor = clock, processor
        self._processed = processor()
        self._waited = self._worked = 0.0
        self._seconds: dict[str, float] = {}
        self._held_by: Sequence[str] = ()
        self._since = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for the fleet."""
        began = self._clock()
        yield
        self.hold(())
        self._waited += self._clock() - began

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around the computation of an update."""
        began = self._clock()
        yield
        self._worked += self._clock() - began

    def hold(self, held_by: Sequence[str]) -> None:
        """These hold the trainer up from now to the next call, in equal parts; (): it does not wait."""
        now = self._clock()
        for name in self._held_by:
            self._seconds[name] = self._seconds.get(name, 0.0) + (now - self._since) / len(self._held_by)
        self._held_by, self._since = held_by, now

    def drain(self) -> dict[str, Any]:
        """Since the last call: waited_seconds, waited_for, update_seconds and cpu_seconds.

        waited_for: (name, seconds), the longest first. cpu_seconds: CPU time of the trainer's process on this machine,
        without the processes that it has started.
        """
        self.hold(())
        before, self._processed = self._processed, self._processor()
        row = {
            "waited_seconds": self._waited,
            "waited_for": sorted(self._seconds.items(), key=lambda item: -item[1]),
            "update_seconds": self._worked,
            "cpu_seconds": self._processed - before,
        }
        self._waited, self._worked, self._seconds = 0.0, 0.0, {}
        return row

"""Who is waited for, for how long, how deep the queues are: in words and as values. Reads, changes nothing."""

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from scalerl_jax.rollouts.evaluation import Evaluation
from scalerl_jax.rollouts.group_buffer import GroupBuffer, OpenGroup
from scalerl_jax.rollouts.servers import states
from scalerl_jax.rollouts.servers.client import ServerClient


@dataclasses.dataclass(frozen=True)
class Waits:
    """The trainer waits for a batch."""

    batch: int
    since: float  # time.monotonic()


def waiting(waits: Waits | None, book: GroupBuffer, connections: Sequence[ServerClient], unscored: int) -> str:
    """One line on what the trainer waits for; empty where it does not wait."""
    if waits is None:
        return ""
    now = time.monotonic()
    missing = book.missing(waits.batch)
    unopened = max(0, book.pacing.last_needed(waits.batch) + 1 - book.next_number)
    text = f"batch {waits.batch}, {now - waits.since:.0f} s: {len(missing) + unopened} groups missing"
    if missing:
        text += f"; oldest {_group(missing[0], now)}"
    elif unopened:
        text += f"; group {book.next_number} not asked for yet"
    in_flight = sum(c.in_flight for c in connections)
    queued = sum(c.status.queued for c in connections if c.state == states.ACTIVE)
    text += f"; in flight {in_flight} completions, queued {queued}, unasked {book.unasked()}, unscored {unscored}"
    counts = collections.Counter(c.state for c in connections)
    text += "; servers " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    away = [c for c in connections if c.state not in states.ANSWERING]
    if away:
        text += " (" + "; ".join(f"{c.address} {now - c.state_since:.0f} s: {c.reason}" for c in away) + ")"
    return text


def waits_for(waits: Waits | None, book: GroupBuffer) -> list[str]:
    """Who has the oldest group that the trainer waits for: server addresses, or one of the names below. [] no wait.

    "verifier": every completion has come, a score is missing
    "a free server": nobody is asked for what is missing
    "new weights": the group is not opened yet, because no server may sample it
    """
    if waits is None:
        return []
    missing = book.missing(waits.batch)
    if not missing:
        return [] if book.ready(waits.batch) else ["new weights"]
    if missing[0].asked:
        return sorted(set(missing[0].asked.values()))
    return ["a free server"] if missing[0].unasked else ["verifier"]


def held_back(book: GroupBuffer) -> str:
    """Why no server may begin another group, even one that holds the newest weights; empty where it may."""
    pacing, number = book.pacing, book.next_number
    stored = book.stored()
    if pacing.admits(number, step=book.trained, trained=book.trained, stored=stored):
        return ""
    batch = pacing.batch(number)
    if batch >= pacing.batches:
        return "the run's last group is asked for"
    if pacing.admits(number, step=book.trained, trained=book.trained, stored=0):
        return f"{stored} finished groups wait for the trainer, which has trained {book.trained} batches"
    return f"batch {batch} is too far ahead of the trainer, which has trained {book.trained} batches (k is {pacing.k})"


def _group(group: OpenGroup, now: float) -> str:
    text = f"{group.group_id} ({len(group.completions)} of {len(group.requests)}, {now - group.opened_at:.0f} s"
    if group.asked:
        text += f", on {', '.join(sorted(set(group.asked.values())))}"
    elif group.unasked:
        text += ", on no server"
    else:
        text += ", with the verifier"
    return text + ")"


def status(
    waits: Waits | None,
    book: GroupBuffer,
    connections: Sequence[ServerClient],
    unscored: int,
    *,
    evaluation: Evaluation | None,
) -> dict[str, Any]:
    """Plain values for metrics and the progress line."""
    now = time.monotonic()
    return {
        "waiting": waiting(waits, book, connections, unscored),
        "waits_for": waits_for(waits, book),
        "held_back": held_back(book),
        "trained": book.trained,
        "next_group": book.next_number,
        "open_groups": len(book.open),
        "finished_groups": len(book.finished),
        "in_flight": sum(c.in_flight for c in connections),
        "unasked": book.unasked(),
        "unscored": unscored,
        "evaluation": None if evaluation is None else _evaluation(evaluation),
        "servers": {c.address: _server(c, now) for c in connections},
    }


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    book = evaluation.book
    return {
        "version": evaluation.version,
        "seconds": time.monotonic() - evaluation.asked_at,
        "prompts": book.pacing.groups,
        "finished": len(book.finished),
        "open": len(book.open),
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

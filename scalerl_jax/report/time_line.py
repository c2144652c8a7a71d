"""Waits along the run, and how the devices' hours were spent.

Between two rows of metrics.jsonl the compute ledger's columns differ by what each side did meanwhile:

    trainer      update | waiting for rollouts | evaluating | set-up | other (publishing, writing) | stalled
    generators   sampling | idle | evaluating | set-up | stalled

Waiting is measured by the trainer's loop; `waited_for` names what held the oldest missing group. Idle generators have
nothing they may sample: the store of untrained groups is full, or the weights they need are not published yet.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.report.log_rows import Row, five_digits, groups_of, rounded
from scalerl_jax.run.ledger_file import CLASSES

_MOST_INTERVALS = 300
_MOST_NAMES = 8  # shown of those waited for


def hours(row: Row | None) -> dict[str, dict[str, float]]:
    """Device-hours by role and class, from a row's ledger columns; zeros if it has none."""
    compute = {} if row is None else row.get("compute", row)
    return {
        side: {kind: float(compute.get(f"{side}_{kind}_hours") or 0.0) for kind in CLASSES}
        for side in ("trainer", "generator")
    }


def totals(metrics: Sequence[Row], evals: Sequence[Row]) -> dict[str, Any]:
    """The cost of the run by its latest row."""
    # An evaluation beside training is written late, with the compute of the step that it is of.
    latest = max([*metrics[-1:], *evals[-1:]], key=lambda row: (row["step"], "compute" not in row))
    compute: Mapping[str, Any] = latest.get("compute", latest)
    names = ("device_hours", "model_flops", "trainer_flops", "generator_flops", "evaluation_flops")
    tokens = ("trained_tokens", "sampled_tokens", "evaluation_tokens")
    return {
        "hours": {side: dict(zip(CLASSES, rounded(parts.values()))) for side, parts in hours(latest).items()},
        **{name: five_digits(compute.get(name)) for name in names},
        **{name: compute.get(name) for name in tokens},
    }


def time_line(metrics: Sequence[Row], evals: Sequence[Row]) -> dict[str, Any]:
    """Intervals in order, with neighbours merged if there are many.

    Seconds count from the start of the first one, without the pauses between two starts of the run.
    """
    if not metrics:
        return {"intervals": []}
    # The evaluation of step 0 has the compute before it and the time after it.
    first = evals[0] if evals and evals[0]["step"] < metrics[0]["step"] else None
    begin = first["time"] - first["seconds"] if first else metrics[0]["time"] - measured_seconds(metrics[0])
    intervals, waited_for = [], collections.Counter[str]()
    # Seconds of running: `left_out` is the time between starts so far, which is not part of the run.
    before, start, left_out = first, begin, 0.0
    for row in metrics:
        pause = None
        if before is not None and before.get("incarnation") != row.get("incarnation"):
            # The new trainer's start is not recorded: its first update is drawn with the time it measured itself.
            began = row["time"] - measured_seconds(row)
            pause = max(0.0, began - start)
            left_out += began - start
            start = began
        elif row["time"] < start:  # the clock was set back: drawn as if no time had passed
            left_out += row["time"] - start
            start = row["time"]
        end = max(start, row["time"])
        intervals.append(interval(before, row, start - begin - left_out, end - begin - left_out, pause))
        for name, seconds in row.get("waited_for") or []:
            waited_for[name] += seconds
        before, start = row, row["time"]
    # Servers report each second: an update between two of their reports gets the shares of the next or the last one.
    for one, neighbour in [*zip(intervals[-2::-1], intervals[:0:-1]), *zip(intervals[1:], intervals)]:
        if not sum(one["generators"]):
            one["generators"] = neighbour["generators"]
    groups = groups_of(len(intervals), _MOST_INTERVALS)
    names = waited_for.most_common()
    return {
        "intervals": [together(intervals[group]) for group in groups],
        "each": groups[0].stop,
        "begin": begin,
        "names": [[name, five_digits(seconds)] for name, seconds in names[:_MOST_NAMES]],
        "other_names": len(names[_MOST_NAMES:]),
        "other_seconds": five_digits(sum(seconds for _, seconds in names[_MOST_NAMES:])),
        "named": any("waited_for" in row for row in metrics),
    }


def running_seconds(rows: Sequence[Row]) -> float:
    """Seconds between rows of the same start, summed over all starts; nothing where the clock was set back."""
    pairs = itertools.pairwise(rows)
    of_one = (b["time"] - a["time"] for a, b in pairs if a.get("incarnation") == b.get("incarnation"))
    return float(sum(max(0.0, seconds) for seconds in of_one))


def measured_seconds(row: Row) -> float:
    """The trainer's own measurement of a batch: waiting and the update."""
    return float(row.get("waited_seconds") or 0.0) + float(row.get("update_seconds") or 0.0)


def interval(before: Row | None, row: Row, start: float, end: float, pause: float | None) -> dict[str, Any]:
    """Device-hours of both sides between two rows. pause: seconds left out before it, at a new start."""
    spent, had = hours(row), hours(before)
    used = {side: {kind: max(0.0, spent[side][kind] - had[side][kind]) for kind in CLASSES} for side in spent}
    trainer = used["trainer"]
    waiting = float(row.get("waited_seconds") or 0.0) / max(end - start, 1e-9) * sum(trainer.values())
    waiting = min(trainer["idle"], waiting)
    other = trainer["idle"] - waiting
    return {
        "step": row["step"],
        "start": start,
        "end": end,
        "pause": five_digits(pause),
        "trainer": [trainer["busy"], waiting, trainer["evaluation"], trainer["setup"], other, trainer["stalled"]],
        "generators": [used["generator"][kind] for kind in CLASSES],
        "waited_for": dict(row.get("waited_for") or []),
    }


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges neighbouring intervals: device-hours become shares, and the name most waited for is kept."""
    trainer, generators = (
        [sum(column) for column in zip(*(part[side] for part in parts))] for side in ("trainer", "generators")
    )
    names = collections.Counter[str]()
    for part in parts:
        names.update(part["waited_for"])
    pauses = [part["pause"] for part in parts if part["pause"] is not None]
    most = max(names.items(), key=lambda item: item[1], default=None)
    return {
        "step": parts[-1]["step"],
        "start": five_digits(parts[0]["start"]),
        "end": five_digits(parts[-1]["end"]),
        "pause": None if not pauses else five_digits(sum(pauses)),
        "trainer": rounded(value / (sum(trainer) or 1.0) for value in trainer),
        "generators": rounded(value / (sum(generators) or 1.0) for value in generators),
        "waited_for": None if most is None else [most[0], five_digits(most[1])],
    }

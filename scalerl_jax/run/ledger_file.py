"""The ledger's file: its contents, and reading it with validation; a broken file is rebuilt from the run's rows.

    read      ledger.json as it was written; ValueError names what is broken: it is not JSON, or a number is missing,
              not finite, negative, or larger than anything a run can have spent
    recover   the ledger from the columns `compute` of metrics.jsonl and those of evals.jsonl: the latest valid row. The
              generators' tokens by class are not in the rows; the FLOPs counted from them are

What was spent between the last row and the moment the file broke is lost; server processes are treated as new.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from scalerl_jax.system.files import write_whole

_MOST = {
    "seconds": 1e11,
    "hours": 1e11 / 3600,
    "flops": 1e33,
    "tokens": 1e18,
}  # 28 million device-hours, ...: far beyond any run

CLASSES = ("busy", "idle", "evaluation", "setup", "stalled")
_LATER = ("trainer_stalled", "generator_stalled", "teacher")  # missing in older files and rows, where they are 0
TOKENS = ("training", "evaluation", "setup")
_PARTS = {  # parts of the file: its numbers, each with its unit
    "seconds": {f"{side}_{kind}": "seconds" for side in ("trainer", "generator") for kind in CLASSES}
    | {"teacher": "seconds"},
    "trainer": {"flops": "flops", "tokens": "tokens"},
    "sampled": dict.fromkeys(TOKENS, "tokens"),
    "decoded": dict.fromkeys(TOKENS, "tokens"),  # sampled and forced ones: each passes the model once
    "prefilled": dict.fromkeys(TOKENS, "tokens"),
    "estimated": dict.fromkeys(TOKENS, "flops"),  # the generators'
    "recovered": dict.fromkeys(TOKENS, "flops"),  # of generators, spent before the file was repaired
}
_FLOPS = {"training": "generator_flops", "evaluation": "evaluation_flops", "setup": "setup_flops"}


def nothing_spent() -> dict[str, Any]:
    """The contents of ledger.json at the start of a run, part by part."""
    books: dict[str, Any] = {
        part: {name: 0 if unit == "tokens" else 0.0 for name, unit in units.items()} for part, units in _PARTS.items()
    }
    # Sums over finished completions: tokens, positions they attended to; prompt tokens, positions of the prefill.
    books["finished"] = {kind: [0, 0.0, 0, 0.0] for kind in ("training", "evaluation")}
    # For each server: the counters of its latest status, and the unix seconds of it.
    return books | {"servers": {}, "heard": {}}


def read(path: str) -> dict[str, Any]:
    """The contents of ledger.json. Raises ValueError naming what is broken."""
    try:
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(saved, dict):
        raise ValueError("it is not an object")
    saved = {"recovered": dict.fromkeys(TOKENS, 0.0), "heard": {}} | saved  # missing in older files
    for part, units in _PARTS.items():
        values = _object(saved, part)
        for name, unit in units.items():
            _check(f"{part}.{name}", values.get(name, 0.0 if name in _LATER else None), unit)
    for kind in ("training", "evaluation"):
        _check_all(f"finished.{kind}", _object(saved, "finished").get(kind), "four", 4, "flops")
    for name, values in _object(saved, "servers").items():
        _check_all(f"servers.{name[:32]!r}", values, "six", 6, "tokens")
    for name, value in _object(saved, "heard").items():
        _check(f"heard.{name[:32]!r}", value, "seconds")
    return saved


def recover(path: str, why: str) -> tuple[dict[str, Any], str]:
    """What `read` would return, rebuilt from the rows beside `path`, and a line on it. Keeps a copy of the broken file.

    The file itself is not changed: a run interrupted before the repaired one is written finds it broken again.

    Raises ValueError (one line) if no row has the cost.
    """
    folder = os.path.dirname(path)
    rows = list(_rows(folder))
    if not rows:
        raise ValueError(
            f"{path}: the compute ledger of this run is broken ({why}), and no row of metrics.jsonl or evals.jsonl "
            "says what was spent: move the file away to count from zero"
        )
    spent, origin = max(rows, key=lambda row: row[0]["device_hours"])
    aside = f"{path}.broken"
    with open(path, "rb") as file:  # it stays in place until a whole one replaces it
        write_whole(aside, file.read())
    flops = {kind: spent[name] for kind, name in _FLOPS.items()}
    saved = {
        "seconds": {name: spent[f"{name}_hours"] * 3600 for name in _PARTS["seconds"]},
        "trainer": {"flops": spent["trainer_flops"], "tokens": int(spent["trained_tokens"])},
        "sampled": {
            "training": int(spent["sampled_tokens"]),
            "evaluation": int(spent["evaluation_tokens"]),
            "setup": 0,
        },
        "estimated": flops,
        "recovered": flops,
        "servers": {},
    }
    return saved, (
        f"{path}: the compute ledger was broken ({why}); it goes on from {spent['device_hours'] * 3600:.0f} "
        f"device-seconds, as {origin} has it, and the broken one is kept as {os.path.basename(aside)}"
    )


def _rows(folder: str) -> Iterator[tuple[dict[str, float], str]]:
    """(the ledger's columns, where they are) of every valid row."""
    for name, columns_of in (("metrics.jsonl", lambda row: row.get("compute")), ("evals.jsonl", lambda row: row)):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    columns = columns_of(row) if isinstance(row, dict) else None
                    yield _sane(columns), f"step {row['step']} of {name}"
                except (ValueError, KeyError, RecursionError):
                    continue  # a torn or broken row: another one has the columns


def _sane(columns: Any) -> dict[str, float]:
    """The ledger's columns of a row. Raises ValueError if one is missing or broken."""
    if not isinstance(columns, dict):
        raise ValueError("no columns of the ledger")
    units = dict.fromkeys(("device_hours", *(f"{name}_hours" for name in _PARTS["seconds"])), "hours")
    units |= dict.fromkeys(("trainer_flops", *_FLOPS.values()), "flops")
    units |= dict.fromkeys(("trained_tokens", "sampled_tokens", "evaluation_tokens"), "tokens")
    columns = {f"{name}_hours": 0.0 for name in _LATER} | columns
    for name, unit in units.items():
        _check(name, columns.get(name), unit)
    return {name: columns[name] for name in units}


def _object(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(saved.get(name), dict):
        raise ValueError(f"{name} is missing")
    return saved[name]


def _check_all(name: str, values: Any, word: str, count: int, unit: str) -> None:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name} is not {word} numbers")
    for value in values:
        _check(name, value, unit)


def _check(name: str, value: Any, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is missing" if value is None else f"{name} is not a number")
    if not 0 <= value <= _MOST[unit]:  # NaN fails too; not converted, since an integer may be larger than any float
        raise ValueError(f"{name} is {str(value)[:40]}")

"""The ledger's file, read with care: what is broken in it is found, and made again from the run's rows.

    read      ledger.json as it was written; ValueError says what is broken: it is not JSON, or a number is missing, not
              finite, negative, or larger than anything a run can have spent
    recover   the ledger from the columns `compute` of metrics.jsonl and those of evals.jsonl: the latest row that is
              sane in itself. The generators' tokens by class are not in the rows; the FLOPs counted from them are

What lies between the last row and the moment the file broke is lost; server processes are met as if for the first time.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from scalerl_jax.system.files import write_whole

_MOST = {"seconds": 1e11, "flops": 1e33, "tokens": 1e18}  # 28 million device-hours, ...: far beyond any run

_SIDES, _CLASSES = ("trainer", "generator"), ("busy", "idle", "evaluation", "setup")
_TOKENS = ("training", "evaluation", "setup")
_KEYS: dict[str, tuple[tuple[str, ...], str]] = {
    "seconds": (tuple(f"{side}_{kind}" for side in _SIDES for kind in _CLASSES), "seconds"),
    "trainer": (("flops", "tokens"), "flops"),
    "sampled": (_TOKENS, "tokens"),
    "decoded": (_TOKENS, "tokens"),
    "prefilled": (_TOKENS, "tokens"),
    "estimated": (_TOKENS, "flops"),
}
_LATER_KEYS = {"recovered": (_TOKENS, "flops")}  # an older file lacks them
_FLOPS = {"training": "generator_flops", "evaluation": "evaluation_flops", "setup": "setup_flops"}


def read(path: str) -> dict[str, Any]:
    """The contents of ledger.json. Raises ValueError saying what is broken."""
    try:
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(saved, dict):
        raise ValueError("it is not an object")
    for part, (names, unit) in {**_KEYS, **_LATER_KEYS}.items():
        if part in _LATER_KEYS and part not in saved:
            continue
        values = _object(saved, part)
        for name in names:
            _check(f"{part}.{name}", values.get(name), _MOST[unit])
    for kind in ("training", "evaluation"):
        sums = _object(saved, "finished").get(kind)
        if not isinstance(sums, list) or len(sums) != 4:
            raise ValueError(f"finished.{kind} is not four numbers")
        for value in sums:
            _check(f"finished.{kind}", value, _MOST["flops"])
    for name, values in _object(saved, "servers").items():
        if not isinstance(values, list) or len(values) != 6:
            raise ValueError(f"servers.{name[:32]!r} is not six numbers")
        for value in values:
            _check(f"servers.{name[:32]!r}", value, _MOST["tokens"])
    for name, value in (_object(saved, "heard") if "heard" in saved else {}).items():
        _check(f"heard.{name[:32]!r}", value, _MOST["seconds"])
    return saved


def recover(path: str, why: str) -> dict[str, Any]:
    """What `read` would give, from the rows beside `path`; "said" is a line on it. A copy of the broken file is kept.

    The file itself is left as it is: whoever is interrupted before the repaired one is written finds it broken again.

    Raises ValueError (one line) where no row says what was spent.
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
    with open(path, "rb") as file:  # it stays where it is until a whole one takes its place
        write_whole(aside, file.read())
    return {
        "seconds": {name: spent[f"{name}_hours"] * 3600 for name in _KEYS["seconds"][0]},
        "trainer": {"flops": spent["trainer_flops"], "tokens": int(spent["trained_tokens"])},
        "sampled": {
            "training": int(spent["sampled_tokens"]),
            "evaluation": int(spent["evaluation_tokens"]),
            "setup": 0,
        },
        "estimated": {kind: spent[name] for kind, name in _FLOPS.items()},
        "recovered": {kind: spent[name] for kind, name in _FLOPS.items()},
        "servers": {},
        "said": f"{path}: the compute ledger was broken ({why}); it goes on from {spent['device_hours'] * 3600:.0f} "
        f"device-seconds, as {origin} has it, and the broken one is kept as {os.path.basename(aside)}",
    }


def _rows(folder: str) -> Iterator[tuple[dict[str, float], str]]:
    """(the ledger's columns, where they stand) of every row that is sane."""
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
                    continue  # a torn or a broken row: another one says it


def _sane(columns: Any) -> dict[str, float]:
    """The ledger's columns of a row. Raises ValueError where one is missing or broken."""
    if not isinstance(columns, dict):
        raise ValueError("no columns of the ledger")
    units = dict.fromkeys((f"{name}_hours" for name in _KEYS["seconds"][0]), "seconds")
    units |= dict.fromkeys(("trainer_flops", *_FLOPS.values()), "flops")
    units |= dict.fromkeys(("trained_tokens", "sampled_tokens", "evaluation_tokens"), "tokens")
    units["device_hours"] = "seconds"
    for name, unit in units.items():
        _check(name, columns.get(name), _MOST[unit] / (3600 if unit == "seconds" else 1))
    return {name: columns[name] for name in units}


def _object(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(saved.get(name), dict):
        raise ValueError(f"{name} is missing")
    return saved[name]


def _check(name: str, value: Any, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is missing" if value is None else f"{name} is not a number")
    if not 0 <= value <= most:  # NaN neither; compared as it is, since an integer may be larger than any float
        raise ValueError(f"{name} is {str(value)[:40]}")

"""Rows of a run's logs for the page, and their numbers as it draws them.

Rows are checked for the columns that are drawn; an error is one line that names the row. Numbers have five digits, only
values that JSON allows, and no more points than are visible.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.run.jsonl import read_rows

Row = dict[str, Any]

MOST_POINTS = 400  # of a series; a chart is not much wider in pixels

_LARGEST = sys.float_info.max
_LAG = re.compile(r"[0-9]{1,9}", re.ASCII)

# Columns that are not numbers; any other is a number or null, or missing.
_MAPPINGS = ("compute", "lags", "pushes", "forecast", "forecasts", "tasks", "environments")
_LISTS = ("groups", "waited_for", "passes")
_NEEDED = {
    "metrics.jsonl": ("step", "time"),
    "evals.jsonl": ("step", "time", "pass_rate", "prompts", "samples", "passes", "seconds"),
}


def log_rows(workdir: str, name: str, numbers: Sequence[str]) -> list[Row]:
    """The rows of metrics.jsonl or evals.jsonl; [] without the file. Raises ValueError naming file and row.

    numbers: columns that must be numbers or null if present, besides those that are required.
    """
    path = os.path.join(workdir, name)
    if not os.path.exists(path):
        return []
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        if wrong := _fault(row, _NEEDED[name], numbers):
            raise ValueError(f"{path}: row {number} {wrong}")
    return rows


def _fault(row: Row, needed: Sequence[str], numbers: Sequence[str]) -> str:
    """The fault of a row; "" if it has none."""
    for column in needed:
        if row.get(column) is None:
            return f"has no {column!r}"
    for column, value in row.items():
        if value is None:
            if column == "compute":  # an older run's row has no such column; its own columns are the ledger's
                return f"has a {column!r} that is null"
            continue
        if column in _MAPPINGS:
            if not isinstance(value, dict):
                return f"has a {column!r} that is not an object: {str(value)[:40]}"
            if column == "tasks" and not all(
                isinstance(part, dict) and _is_given(part.get("prompts")) and _is_number(part.get("pass_rate"))
                for part in value.values()
            ):
                return "has 'tasks' that do not say their prompts and pass rates in numbers"
            if column == "environments" and (odd := next((n for n, v in value.items() if not _is_part(v)), None)):
                return f"has 'environments' whose {odd!r} does not say its prompts, samples, passes and pass rate"
            if column == "lags" and not all(_LAG.fullmatch(lag) and _is_count(count) for lag, count in value.items()):
                return "has 'lags' that are not counts by whole numbers"
            if column == "compute" and (odd := next((n for n, v in value.items() if not _is_number(v)), None)):
                return f"has a {column!r} whose {odd!r} is not a number: {str(value[odd])[:40]}"
        elif column in _LISTS:
            if not isinstance(value, list):
                return f"has a {column!r} that is not a list: {str(value)[:40]}"
            if column == "passes" and (not value or not all(map(_is_given, value))):
                return f"has {column!r} that are not numbers"
            if column == "waited_for" and not all(map(_is_wait, value)):
                return f"has a {column!r} that is not a list of pairs of a name and seconds"
        elif isinstance(value, int | float) and column not in needed and not _is_number(value):
            return f"has a {column!r} that is not finite"
        elif column in (*needed, *numbers) and not _is_number(value):  # others, of a later version, do not matter
            return f"has a {column!r} that is not a number: {str(value)[:40]}"
    return ""


def _is_part(value: Any) -> bool:
    """Whether it has the columns of an evaluation."""
    return isinstance(value, dict) and not _fault(value, ("prompts", "samples", "passes", "pass_rate"), ())


def _is_number(value: Any) -> bool:
    return value is None or _is_given(value)


def _is_given(value: Any) -> bool:
    """Whether it is a finite number. Not converted: an integer may be larger than any float; NaN fails."""
    return isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST


def _is_count(value: Any) -> bool:
    return _is_given(value) and value >= 0


def _is_wait(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_given(value[1])


def five_digits(value: float | None) -> float | None:
    """Five significant digits; None for a missing value, an infinity or NaN."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """`five_digits` of each."""
    return [five_digits(value) for value in values]


def groups_of(count: int, most: int = MOST_POINTS) -> list[slice]:
    """`count` points as at most `most` groups of neighbours, each of the same size but the last."""
    size = max(1, -(-count // most))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def thinned(values: Sequence[float | None], groups: Sequence[slice]) -> dict[str, list[float | None]]:
    """Mean of each group, and its minimum and maximum if groups have more than one point. None without values."""
    numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    parts = [part[np.isfinite(part)] for part in (numbers[group] for group in groups)]
    out = {"mean": rounded(part.mean() if part.size else None for part in parts)}
    if any(group.stop - group.start > 1 for group in groups):
        out["low"] = rounded(part.min() if part.size else None for part in parts)
        out["high"] = rounded(part.max() if part.size else None for part in parts)
    return out

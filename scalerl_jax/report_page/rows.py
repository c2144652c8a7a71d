"""Rows of a run's logs for the page: objects whose columns are what it draws, or one line that names the row."""

import math
import os
from collections.abc import Sequence
from typing import Any

from scalerl_jax.telemetry import read_rows

Row = dict[str, Any]

# Columns that are no numbers; all others are, or null, or are not there.
_MAPPINGS = ("compute", "lags", "pushes", "forecast", "tasks")
_LISTS = ("groups", "waited_for", "passes")
_NEEDED = {
    "metrics.jsonl": ("step", "time"),
    "evals.jsonl": ("step", "time", "pass_rate", "prompts", "samples", "passes", "seconds"),
}


def log_rows(workdir: str, name: str) -> list[Row]:
    """Of metrics.jsonl or evals.jsonl; [] without the file. Raises ValueError naming file and row."""
    path = os.path.join(workdir, name)
    if not os.path.exists(path):
        return []
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        if wrong := _fault(row, _NEEDED[name]):
            raise ValueError(f"{path}: row {number} {wrong}")
    return rows


def _fault(row: Row, needed: Sequence[str]) -> str:
    """What is wrong with a row; "" if nothing is."""
    for column in needed:
        if row.get(column) is None:
            return f"has no {column!r}"
    for column, value in row.items():
        if value is None:
            continue
        if column in _MAPPINGS:
            if not isinstance(value, dict):
                return f"has a {column!r} that is not an object: {str(value)[:40]}"
            if column == "tasks" and not all(
                isinstance(p, dict) and _is_number(p.get("prompts", "")) for p in value.values()
            ):
                return "has 'tasks' that do not say their prompts"
            if column == "compute" and (odd := next((n for n, v in value.items() if not _is_number(v)), None)):
                return f"has a {column!r} whose {odd!r} is not a number: {str(value[odd])[:40]}"
        elif column in _LISTS:
            if not isinstance(value, list):
                return f"has a {column!r} that is not a list: {str(value)[:40]}"
            if column == "passes" and (not value or not all(map(_is_number, value))):
                return f"has {column!r} that are not numbers"
            if column == "waited_for" and not all(isinstance(one, list) and len(one) == 2 for one in value):
                return f"has a {column!r} that is not a list of pairs"
        elif isinstance(value, list | dict):
            continue  # of no concern here: what a later version writes down
        elif column in needed and not _is_number(value):
            return f"has a {column!r} that is not a number: {str(value)[:40]}"
        elif isinstance(value, float) and not math.isfinite(value):
            return f"has a {column!r} that is not finite"
    return ""


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def numbers_only(rows: Sequence[Row], columns: Sequence[str], path: str) -> None:
    """Raises ValueError naming the first row in which one of these columns is neither a number nor null."""
    for number, row in enumerate(rows, 1):
        for column in columns:
            if not _is_number(row.get(column)):
                raise ValueError(f"{path}: row {number} has a {column!r} that is not a number: {str(row[column])[:40]}")

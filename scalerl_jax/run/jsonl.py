"""The rows of a run's JSONL files: metrics.jsonl, evals.jsonl, rollouts/step-*.jsonl. Each row has its `step`."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.scaling.units import TYPICAL_HOURS, typical_hours
from scalerl_jax.system import files
from scalerl_jax.system.files import write_whole

_TAIL = 1 << 14  # bytes that hold most rows
_MEND = "remove that row, or put the file back from a copy"


def line_of(row: Mapping[str, Any]) -> str:
    """The row as a line, with its newline."""
    return json.dumps(row, allow_nan=False) + "\n"


def read_rows(path: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file of a run; a torn last line (no newline) is left out.

    Raises ValueError (one line) naming file and row if one is not a row: not JSON, not an object, or without a step.
    """
    with files.naming(path), open(path, "rb") as file:
        lines = file.read().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = row_of(line)
            if not isinstance(row.get("step"), int) or isinstance(row["step"], bool):
                raise ValueError("has no step")
        except ValueError as error:
            raise ValueError(f"{path}: row {number} {error}; {_MEND}") from error
        rows.append(row)
    return rows


def last_row(path: str) -> dict[str, Any] | None:
    """The last whole row, read from the end of the file; None if there is none or it is not a row."""
    try:
        with open(path, "rb") as file:
            size = end = file.seek(0, os.SEEK_END)
            read = _TAIL
            while True:
                file.seek(max(0, end - read))
                lines = file.read(read).split(b"\n")[:-1]
                if len(lines) > 1 or read >= size:
                    break
                read *= 4
        row = row_of(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return None
    return row if isinstance(row.get("step"), int) else None


def row_of(line: bytes) -> dict[str, Any]:
    """The row of a line. Raises ValueError naming what is wrong with it."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("is not JSON") from error
    if not isinstance(row, dict):
        raise ValueError("is not an object")
    return row


def cut(path: str, step: int) -> None:
    """Drops rows past `step`, and a torn last row; where only the file's end is cut off, this needs no disk space."""
    rows = read_rows(path)
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) == len(rows) and files.ends_whole(path):
        return
    if rows[: len(kept)] == kept:
        with open(path, "rb") as file:
            end = sum(len(file.readline()) for _ in kept)
        with files.naming(path):
            os.truncate(path, end)
    else:
        write_whole(path, "".join(line_of(row) for row in kept))


def evaluation_counts(evals: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(passes, trials) of N rows of evals.jsonl, as fit_sigmoid takes them.

    By prompt [N, prompts], or totals [N] where the prompts changed and only totals can be compared.
    """
    if len({len(row["passes"]) for row in evals}) == 1:
        passes = np.array([row["passes"] for row in evals], np.float64)
        return passes, np.broadcast_to(np.array([[row["samples"]] for row in evals], np.float64), passes.shape)
    totals = np.array([sum(row["passes"]) for row in evals], np.float64)
    return totals, np.array([len(row["passes"]) * row["samples"] for row in evals], np.float64)


def column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Column `name` [N] of rows of evals.jsonl. Raises ValueError if a row does not have it."""
    if name == TYPICAL_HOURS:
        return typical_hours(column(rows, "step"), column(rows, "device_hours"))
    for row in rows:
        if row.get(name) is None:
            raise ValueError(f"evals.jsonl: the row of step {row['step']} has no {name!r}")
    return np.array([row[name] for row in rows], np.float64)


def hours_rate(evals: Sequence[Mapping[str, Any]]) -> float | None:
    """Device-hours per typical device-hour, over the whole run up to the last row; None if it is unknown."""
    if not evals or not all("device_hours" in row for row in evals):
        return None
    hours, typical = float(evals[-1]["device_hours"] or 0.0), float(column(evals, TYPICAL_HOURS)[-1])
    return hours / typical if hours > 0 and typical > 0 else None


def environments_of(evals: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each environment of a mixture, by name, from rows of evals.jsonl; {} if there is only one."""
    names = dict.fromkeys(name for row in evals for name in row.get("environments") or {})
    whole: dict[str, Any] = {"environments": {}, "tasks": {}}
    return {
        name: [
            {**row, **whole, **row["environments"][name]} for row in evals if name in (row.get("environments") or {})
        ]
        for name in names
    }

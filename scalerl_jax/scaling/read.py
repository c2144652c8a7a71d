"""Evaluations out of files: CSV, TSV, JSONL, run folders, TensorBoard event folders, Weights & Biases exports.

Every source becomes a Table: named columns of text or numbers, and where each row stands. Cells that are empty are
metrics not logged at that step, and their rows are left out; anything else that is no number is the user's mistake, and
is said with file and row. A run folder of ours (it holds evals.jsonl) brings its counts along.
"""

import csv
import dataclasses
import difflib
import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.scaling import tfevents

RUN_FOLDER_FILE = "evals.jsonl"
RUN_FOLDER_X = "device_hours"
RUN_FOLDER_Y = "pass_rate"


class InputError(ValueError):
    """A mistake in a file or in what was asked of it: one line, naming the file and the row or the column."""


@dataclasses.dataclass(frozen=True)
class Table:
    source: str
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    places: list[str]  # of each row, for messages: "FILE: line 3"


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """One run as it was read: N rows with both x and y, compute in the file's unit, y as it stands there."""

    name: str
    source: str
    seed: str
    compute: np.ndarray  # [N]
    reward: np.ndarray  # [N]
    passes: np.ndarray | None  # [N, prompts] or None
    trials: np.ndarray | None  # [N, prompts]
    places: list[str]


def read_table(path: str) -> Table:
    """Raises InputError where the file is missing or is none of the formats."""
    if os.path.isdir(path):
        ours = os.path.join(path, RUN_FOLDER_FILE)
        if os.path.isfile(ours):
            return _json_lines(ours)
        found = tfevents.event_files(path)
        if not found:
            raise InputError(f"{path}: holds neither {RUN_FOLDER_FILE} nor TensorBoard event files")
        return _events(path, found)
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file or folder")
    if tfevents.is_event_file(path):
        return _events(path, [path])
    ending = os.path.splitext(path)[1].lower()
    if ending in (".jsonl", ".ndjson"):
        return _json_lines(path)
    if ending in (".csv", ".tsv"):
        return _separated(path, "\t" if ending == ".tsv" else ",")
    raise InputError(f"{path}: is not .csv, .tsv, .jsonl, a run folder or a TensorBoard event file")


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8 text") from None


def _separated(path: str, separator: str) -> Table:
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=separator)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}") from None
    if not lines:
        raise InputError(f"{path}: is empty")
    header = tuple(cell.strip() for cell in lines[0][1])
    if all(_is_number(cell) or not cell for cell in header):
        raise InputError(f"{path}: line {lines[0][0]} is no header: it holds numbers, not the names of the columns")
    twice = sorted(name for name in set(header) if header.count(name) > 1)
    if twice:
        raise InputError(f"{path}: column {twice[0]!r} appears twice in the header")
    rows, places = [], []
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            raise InputError(f"{path}: line {line}: {len(cells)} cells, but the header has {len(header)}")
        rows.append({name: cell.strip() for name, cell in zip(header, cells)})
        places.append(f"{path}: line {line}")
    if not rows:
        raise InputError(f"{path}: has no rows below its header")
    return Table(path, header, rows, places)


def _json_lines(path: str) -> Table:
    rows, places = [], []
    for line, text in enumerate(_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}: line {line}: is not JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}: line {line}: is not a JSON object")
        rows.append(row)
        places.append(f"{path}: line {line}")
    if not rows:
        raise InputError(f"{path}: is empty")
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    return Table(path, columns, rows, places)


def _events(path: str, files: list[str]) -> Table:
    try:
        scalars = tfevents.read_scalars(files)
    except tfevents.EventFileError as error:
        raise InputError(str(error)) from None
    if not scalars:
        raise InputError(f"{path}: the event files hold no scalars")
    steps = sorted({step for series in scalars.values() for step in series})
    rows = [
        {"step": step, **{tag: series[step] for tag, series in scalars.items() if step in series}} for step in steps
    ]
    return Table(path, ("step", *scalars), rows, [f"{path}: step {step}" for step in steps])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _number(value: Any, *, place: str, column: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InputError(f"{place}: column {column!r}: {json.dumps(value)[:40]} is not a number")
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"{place}: column {column!r}: {value!r} is not a number") from None
    if not math.isfinite(number):
        raise InputError(f"{place}: column {column!r}: {value} is not a finite number")
    return number


def _require(table: Table, column: str, flag: str) -> None:
    if column in table.columns:
        return
    near = difflib.get_close_matches(column, table.columns, n=3, cutoff=0.5)
    near += [name for name in table.columns if column.lower() in name.lower() and name not in near][:3]
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"it has: {', '.join(table.columns[:12])}"
    raise InputError(f"{table.source}: no column {column!r} (--{flag}); {hint}")


def read_runs(
    paths: Sequence[str],
    *,
    x: str | None,
    y: str | None,
    run_column: str | None = None,
    seed_column: str | None = None,
    seeds_by_folder: bool = False,
    passes_column: str | None = None,
    trials_column: str | None = None,
) -> list[Evaluations]:
    """One Evaluations for each run and seed, in the order of the files. Raises InputError.

    x, y: columns; None is allowed for run folders only. run_column, seed_column: columns that tell runs, and seeds of a
    run, apart within a file. seeds_by_folder: files of one folder are seeds of one run, which is named by the folder.
    passes_column, trials_column: counts of each row.
    """
    runs = []
    for path in paths:
        table = read_table(path)
        ours = os.path.basename(table.source) == RUN_FOLDER_FILE
        x_here, y_here = x or (RUN_FOLDER_X if ours else None), y or (RUN_FOLDER_Y if ours else None)
        if x_here is None or y_here is None:
            flag = "x" if x_here is None else "y"
            raise InputError(f"{table.source}: --{flag} is needed; the columns are {', '.join(table.columns[:12])}")
        name, seed = _label(path, seeds_by_folder)
        wide = [c for c in table.columns if c.endswith(f" - {y_here}")]
        if wide and y_here not in table.columns:
            # The table that the charts of Weights & Biases export: one column for each run, "RUN - METRIC".
            _require(table, x_here, "x")
            for column in wide:
                one = column.removesuffix(f" - {y_here}")
                runs.append(_one_run(table, range(len(table.rows)), x_here, column, one, seed, None))
            continue
        for flag, column in (
            ("x", x_here), ("y", y_here), ("run_column", run_column), ("seed_column", seed_column),
            ("passes", passes_column), ("trials", trials_column),
        ):  # fmt: skip
            if column is not None:
                _require(table, column, flag)
        counts = None if passes_column is None or trials_column is None else (passes_column, trials_column)
        if ours and y_here == RUN_FOLDER_Y and counts is None and {"passes", "samples"} <= set(table.columns):
            counts = ("passes", "samples")
        groups: dict[tuple[str, str], list[int]] = {}
        for index, row in enumerate(table.rows):
            label = (
                name if run_column is None else _cell(row, run_column, table.places[index]),
                seed if seed_column is None else _cell(row, seed_column, table.places[index]),
            )
            groups.setdefault(label, []).append(index)
        for (of_run, of_seed), chosen in groups.items():
            runs.append(_one_run(table, chosen, x_here, y_here, of_run, of_seed, counts))
    return runs


def _cell(row: dict[str, Any], column: str, place: str) -> str:
    if _blank(row.get(column)):
        raise InputError(f"{place}: column {column!r} is empty")
    return str(row[column])


def _label(path: str, seeds_by_folder: bool) -> tuple[str, str]:
    """Run and seed of a file by its place."""
    whole = os.path.abspath(path)
    if tfevents.is_event_file(whole) or os.path.basename(whole) == RUN_FOLDER_FILE:
        whole = os.path.dirname(whole)
    stem = os.path.basename(whole) if os.path.isdir(whole) else os.path.splitext(os.path.basename(whole))[0]
    return (os.path.basename(os.path.dirname(whole)), stem) if seeds_by_folder else (stem, "")


def _one_run(
    table: Table, chosen: Iterable[int], x: str, y: str, name: str, seed: str, counts: tuple[str, str] | None
) -> Evaluations:
    compute: list[float] = []
    reward: list[float] = []
    places: list[str] = []
    passed: list[list[float]] = []
    tried: list[list[float]] = []
    for index in chosen:
        row, place = table.rows[index], table.places[index]
        if _blank(row.get(y)):
            continue
        if _blank(row.get(x)):
            raise InputError(f"{place}: column {x!r} is empty, but {y!r} is not")
        compute.append(_number(row[x], place=place, column=x))
        reward.append(_number(row[y], place=place, column=y))
        places.append(place)
        if compute[-1] < 0:
            raise InputError(f"{place}: column {x!r}: {compute[-1]:g} is below 0")
        if len(compute) > 1 and compute[-1] <= compute[-2]:
            raise InputError(
                f"{place}: column {x!r}: {compute[-1]:g} does not increase on the row before ({compute[-2]:g}); "
                "several runs in one file are told apart by --run_column or --seed_column"
            )
        if counts is not None:
            passed.append(_count(row, counts[0], place))
            tried.append(_count(row, counts[1], place))
    if not compute:
        raise InputError(f"{table.source}: no row has a value in column {y!r}")
    passes, trials = (None, None) if counts is None else _arrays(table.source, passed, tried)
    return Evaluations(name, table.source, seed, np.array(compute), np.array(reward), passes, trials, places)


def _count(row: dict[str, Any], column: str, place: str) -> list[float]:
    """A number, or a list with one for each prompt."""
    value = row.get(column)
    if _blank(value):
        raise InputError(f"{place}: column {column!r} is empty")
    values = value if isinstance(value, list) else [value]
    return [_number(v, place=place, column=column) for v in values]


def _arrays(source: str, passed: list[list[float]], tried: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """[N, prompts] each; one trials for a row is that of each of its prompts."""
    for p, t in zip(passed, tried):
        if len(t) not in (1, len(p)):
            raise InputError(f"{source}: passes and trials do not have one number for each prompt")
    tried = [t if len(t) == len(p) else t * len(p) for p, t in zip(passed, tried)]
    if len({len(p) for p in passed}) > 1:  # not the same prompts in every evaluation: only totals can be compared
        passed, tried = [[sum(p)] for p in passed], [[sum(t)] for t in tried]
    return np.array(passed), np.array(tried)

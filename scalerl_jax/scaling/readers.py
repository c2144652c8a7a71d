"""Reads runs from tables: assigns rows to runs, and orders each run's evaluations by compute.

    rows without a score     metrics not logged at that step: left out
    NaN                      left out, and their number reported
    rows out of order        sorted, and reported
    repeated compute         --duplicates: "last" of them, their "mean", or an error that says which it looks like

Anything else that is no number is the user's mistake, and is reported with file and row. A run folder (with
evals.jsonl) also contains the counts; the log of transformers' trainers is read by its steps.
"""

import dataclasses
import difflib
import os
from collections.abc import Sequence

import numpy as np

from scalerl_jax.scaling import cells as cells_lib
from scalerl_jax.scaling import repeats, tfevents
from scalerl_jax.scaling.cells import BAD, BLANK, NAN
from scalerl_jax.scaling.points import Counts
from scalerl_jax.scaling.tables import RUN_FOLDER_FILE, TRAINER_STATE_FILE, InputError, Table, read_table
from scalerl_jax.scaling.units import TYPICAL_HOURS, typical_hours

RUN_FOLDER_X = TYPICAL_HOURS  # a measure of work that does not depend on how busy the machine is
RUN_FOLDER_HOURS = "device_hours"
RUN_FOLDER_Y = "pass_rate"
_TIMES = ("time", "_timestamp", "timestamp", "wall_time", "Wall time")  # columns with a row's time


@dataclasses.dataclass(frozen=True)
class RunPoints:
    """One run as read: N rows with both x and y, in order of x, both in the file's units.

    remarks: changes made to the rows, a line each.
    """

    name: str
    seed: str
    compute: np.ndarray  # [N] increasing
    reward: np.ndarray  # [N]
    counts: Counts | None
    table: Table
    rows: np.ndarray  # [N] of the table
    remarks: tuple[str, ...]
    x: str  # column of the compute
    folder: str = ""  # that holds the run, or the seeds of a run by folder
    task: str = ""
    hours: float | None = None  # device-hours up to the last row, for a run folder with x = RUN_FOLDER_X

    @property
    def source(self) -> str:
        return self.table.source

    def place(self, at: int) -> str:
        """The place of a row, for messages."""
        return self.table.place(int(self.rows[at]))


class _Columns:
    """The columns of one table as numbers, each converted once."""

    def __init__(self, table: Table, numeric: Sequence[str]):
        self.table = table
        texts = (cell for name in numeric for cell in table.cells.get(name, ()))
        try:
            self._comma = cells_lib.decimal_comma(texts, commas_between=table.separator == ",")
        except cells_lib.AmbiguousComma as error:
            raise InputError(f"{table.source}: {error}") from None
        self._made: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def get(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and states [N] of a column."""
        if name not in self._made:
            self._made[name] = cells_lib.numbers(self.table.cells[name], comma=self._comma)
        return self._made[name]

    def compute(self, x: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `get`, for the axis x and rows [M] of one run."""
        if x != TYPICAL_HOURS:
            return self.get(x)
        (step, of_step), (hours, of_hours) = map(self.get, _made_of(x))
        good = rows[(of_step[rows] == cells_lib.GOOD) & (of_hours[rows] == cells_lib.GOOD)]
        found = np.full(len(step), np.nan)
        found[good] = typical_hours(step[good], hours[good])
        return found, np.where(of_step == cells_lib.GOOD, of_hours, of_step)

    def refuse(self, name: str, rows: np.ndarray, wrong: np.ndarray) -> None:
        """Raises InputError on the first of these rows, [M], whose cell is wrong, [M] bool."""
        if wrong.any():
            row = int(rows[np.argmax(wrong)])
            blank = self.get(name)[1][row] == BLANK
            what = " is empty" if blank else f": {cells_lib.complaint(self.table.cells[name][row])}"
            raise InputError(f"{self.table.place(row)}: column {name!r}{what}")


def _made_of(x: str) -> tuple[str, ...]:
    """The columns of a table that an axis is computed from."""
    return ("step", RUN_FOLDER_HOURS) if x == TYPICAL_HOURS else (x,)


def _require(table: Table, column: str, flag: str) -> None:
    if column in table.twice:
        raise InputError(f"{table.source}: column {column!r} appears twice in the header")
    if column in table.columns:
        return
    near = difflib.get_close_matches(column, table.columns, n=3, cutoff=0.5)
    near += [name for name in table.columns if column.lower() in name.lower() and name not in near][:3]
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"it has: {table.listed()}"
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
    task_column: str | None = None,
    duplicates: str = "error",
    parts_too: bool = True,
) -> list[RunPoints]:
    """One RunPoints for each run and seed, in the order of the files. Raises InputError.

    x, y: columns; None is allowed for run folders only (and x for trainer_state.json). run_column, seed_column: columns
    that distinguish runs, and seeds of a run, within a file. seeds_by_folder: files of one folder are seeds of one run,
    which is named after the folder. passes_column, trials_column: counts of each row. task_column: a run's task.
    duplicates: error | last | mean. parts_too: of the run folder of a mixture also the curve of each environment, as
    RUN/NAME.
    """
    runs = []
    asked = {x, y, run_column, seed_column, passes_column, trials_column, task_column, "passes", "samples", *_TIMES}

    def wanted(name: str) -> bool:
        ends = (f" - {y or RUN_FOLDER_Y}", " - passes", " - samples")
        return name in asked or name in (RUN_FOLDER_HOURS, RUN_FOLDER_Y, "step") or name.endswith(ends)

    for path in paths:
        table = read_table(path, wanted)
        ours = os.path.basename(table.source) == RUN_FOLDER_FILE
        logged = os.path.basename(table.source) == TRAINER_STATE_FILE
        x_here = x or (RUN_FOLDER_X if ours else "step" if logged else None)
        y_here = y or (RUN_FOLDER_Y if ours else None)
        if x_here is None or y_here is None:
            flag = "x" if x_here is None else "y"
            raise InputError(f"{table.source}: --{flag} is needed; the columns are {table.listed()}")
        if runs and x_here != runs[0].x:
            there = f"{runs[0].x!r} in {runs[0].source}"
            raise InputError(f"{table.source}: --x is needed: by default it is {x_here!r} here, and {there}")
        if task_column is not None:
            _require(table, task_column, "task_column")
        name, seed, folder = _label(table.source if logged else path, seeds_by_folder)
        given = (
            ("run_column", run_column), ("seed_column", seed_column), ("passes", passes_column),
            ("trials", trials_column),
        )  # fmt: skip
        wide = [c for c in table.columns if c.endswith(f" - {y_here}")]
        every, counts = np.arange(len(table)), None
        if wide and y_here not in table.columns:
            # A table exported from a chart of Weights & Biases: one column for each run, "RUN - METRIC".
            for flag, column in given:
                if column is not None:
                    raise InputError(f"{table.source}: --{flag}={column}: the export of a chart has no such column")
            for column in _made_of(x_here):
                _require(table, column, "x")
            for column in wide:
                if column in table.twice:
                    raise InputError(
                        f"{table.source}: column {column!r} appears twice in the header, as two runs of one name have "
                        "it: give one of them another name"
                    )
            parts = [(c, c.removesuffix(f" - {y_here}"), seed, every, None) for c in wide]
        else:
            for flag, asked_for in (*(("x", column) for column in _made_of(x_here)), ("y", y_here), *given):
                if asked_for is not None:
                    _require(table, asked_for, flag)
            if passes_column is not None and trials_column is not None:
                counts = (passes_column, trials_column)
            elif ours and y_here.endswith(RUN_FOLDER_Y):
                counted_by = tuple(y_here.removesuffix(RUN_FOLDER_Y) + name for name in ("passes", "samples"))
                counts = counted_by if {*counted_by} <= {*table.columns} else None
            labels = _by_label(table, run_column, seed_column, name, seed)
            parts = [(y_here, *label, chosen, counts) for label, chosen in labels.items()]
            if ours and parts_too and run_column is None:
                for part in (column.removesuffix(f" - {y_here}") for column in wide):
                    own = (f"{part} - passes", f"{part} - samples") if counts is not None else None
                    parts.append((f"{part} - {y_here}", f"{name}/{part}", seed, every, own))
        needed = (column for part in parts for column in (part[0], *(part[4] or ())))
        columns = _Columns(table, (*_made_of(x_here), *dict.fromkeys(needed)))
        for score, of_run, of_seed, chosen, counted in parts:
            one = _one_run(columns, chosen, x_here, score, of_run, of_seed, counted, duplicates)
            task = table.cells[task_column][int(one.rows[0])] if task_column is not None else ""
            runs.append(dataclasses.replace(one, task=str(task), folder=folder))
        table.cells.clear()  # they are converted; the table is only needed for the places of rows
    return runs


def _by_label(
    table: Table, run_column: str | None, seed_column: str | None, name: str, seed: str
) -> dict[tuple[str, str], np.ndarray]:
    """The rows of each run and seed, in order."""
    if run_column is None and seed_column is None:
        return {(name, seed): np.arange(len(table))}
    labels = []
    for column, one in ((run_column, name), (seed_column, seed)):
        cells = [one] * len(table) if column is None else table.cells[column]
        for row, cell in enumerate(cells if column is not None else ()):
            if cell is None or (isinstance(cell, str) and not cell.strip()):
                raise InputError(f"{table.place(row)}: column {column!r} is empty")
        labels.append(cells)
    groups: dict[tuple[str, str], list[int]] = {}
    for row, (of_run, of_seed) in enumerate(zip(*labels)):
        groups.setdefault((str(of_run).strip(), str(of_seed).strip()), []).append(row)
    return {label: np.array(rows) for label, rows in groups.items()}


def _label(path: str, seeds_by_folder: bool) -> tuple[str, str, str]:
    """Run and seed of a file, from its path, and the folder around it, which names the run if its files are seeds."""
    whole = os.path.abspath(path)
    if tfevents.is_event_file(whole) or os.path.basename(whole) in (RUN_FOLDER_FILE, TRAINER_STATE_FILE):
        whole = os.path.dirname(whole)
        parent = os.path.dirname(whole)
        if os.path.basename(path) == TRAINER_STATE_FILE and os.path.basename(whole).startswith("checkpoint-"):
            whole = parent  # a checkpoint belongs to the run's folder around it
    stem = os.path.basename(whole)
    if not os.path.isdir(whole):
        stem = os.path.splitext(stem.removesuffix(".gz"))[0]
    folder = os.path.dirname(whole)
    return (os.path.basename(folder), stem, folder) if seeds_by_folder else (stem, "", folder)


def _one_run(
    columns: _Columns,
    chosen: np.ndarray,
    x: str,
    y: str,
    name: str,
    seed: str,
    counted: tuple[str, str] | None,
    duplicates: str,
) -> RunPoints:
    """Reads one run. chosen: [M] its rows of the table. counted: the columns of passes and trials."""
    table = columns.table
    reward, of_y = columns.get(y)
    rows = chosen[of_y[chosen] != BLANK]
    compute, of_x = columns.compute(x, rows)
    if not rows.size:
        raise InputError(f"{table.source}: no row has a value in column {y!r}")
    for column in (*_made_of(x), y):
        columns.refuse(column, rows, columns.get(column)[1][rows] == BAD)
    for column in _made_of(x):
        empty = columns.get(column)[1][rows] == BLANK
        if empty.any():
            where = table.place(int(rows[np.argmax(empty)]))
            raise InputError(f"{where}: column {column!r} is empty, but {y!r} is not")
    remarks = list(table.remarks)
    # A label is only needed for several runs in one file.
    of_whom = table.source if len(chosen) == len(table) else f"{table.source}: {name}{f', {seed}' if seed else ''}"
    nan = (of_x[rows] == NAN) | (of_y[rows] == NAN)
    if nan.any():
        where = " and ".join(repr(c) for c, state in ((x, of_x), (y, of_y)) if (state[rows] == NAN).any())
        if nan.all():
            raise InputError(f"{of_whom}: every row that has a value in column {y!r} has NaN in {where}")
        remarks.append(f"{of_whom}: {int(nan.sum())} of {len(rows)} rows are left out: NaN in {where}")
        rows = rows[~nan]
    if (compute[rows] < 0).any():
        row = int(rows[np.argmax(compute[rows] < 0)])
        raise InputError(f"{table.place(row)}: column {x!r}: {compute[row]:g} is below 0")

    times = next((columns.get(c)[0] for c in _TIMES if c in table.cells and c != x), None)
    found = repeats.in_order(compute[rows], reward[rows], None if times is None else times[rows])
    counts = None if counted is None else _counts(columns, rows, counted)
    if found.repeated.any():
        if duplicates == "error":
            first, again = (int(rows[at]) for at in found.first_pair)
            value = f"{compute[again]:g}"
            raise InputError(
                f"{table.place(again)}: column {x!r}: {value} is there already, in {table.unit} "
                f"{table.numbers[first]}{f' ({name})' if len(chosen) < len(table) else ''}; {found.looks_like(x)}"
            )
        count = int(found.repeated.sum())
        what = {"last": "the last of each is kept", "mean": "their mean is taken"}[duplicates]
        remarks.append(f"{of_whom}: {count} rows repeat a value of {x!r}; {what} (--duplicates={duplicates})")
    elif found.descents:
        remarks.append(
            f"{of_whom}: column {x!r} goes back {found.descents} times; the rows were sorted by it "
            "(several runs in one file are told apart by --run_column or --seed_column)"
        )
    kept, one_reward, counts = repeats.without(found, duplicates, reward[rows], counts)
    rows = rows[kept]
    hours = None
    if x == RUN_FOLDER_X and RUN_FOLDER_HOURS in table.cells and os.path.basename(table.source) == RUN_FOLDER_FILE:
        spent, state = columns.get(RUN_FOLDER_HOURS)
        hours = float(spent[rows[-1]]) if rows.size and state[rows[-1]] == cells_lib.GOOD else None
    return RunPoints(name, seed, compute[rows], one_reward, counts, table, rows, tuple(remarks), x, hours=hours)


def _counts(columns: _Columns, rows: np.ndarray, counted: tuple[str, str]) -> Counts:
    """Passes and trials of the rows; a single trials value of a row applies to each of its prompts."""
    table = columns.table
    if not any(list in set(map(type, table.cells[column])) for column in counted):
        for column in counted:
            columns.refuse(column, rows, columns.get(column)[1][rows] != cells_lib.GOOD)
        return Counts(*(columns.get(column)[0][rows][:, None] for column in counted))
    passed, tried = ([_list(columns, int(row), column) for row in rows] for column in counted)
    for row, p, t in zip(rows, passed, tried):
        if len(t) not in (1, len(p)):
            raise InputError(f"{table.place(int(row))}: passes and trials do not have one number for each prompt")
    tried = [t if len(t) == len(p) else t * len(p) for p, t in zip(passed, tried)]
    if len({len(p) for p in passed}) > 1:  # not the same prompts in every evaluation: use totals
        passed, tried = [[sum(p)] for p in passed], [[sum(t)] for t in tried]
    return Counts(np.array(passed), np.array(tried))


def _list(columns: _Columns, row: int, column: str) -> list[float]:
    """A cell as a list: of one number, or of one for each prompt."""
    table = columns.table
    value = table.cells[column][row]
    place = f"{table.place(row)}: column {column!r}"
    values, state = cells_lib.numbers(value if isinstance(value, list) else [value])
    if not len(values) or (state == BLANK).any():
        raise InputError(f"{place} is empty")
    if (state != cells_lib.GOOD).any():
        at = int(np.argmax(state != cells_lib.GOOD))
        raise InputError(f"{place}: {cells_lib.complaint(value[at] if isinstance(value, list) else value)}")
    return values.tolist()


def hours_rate(members: Sequence[RunPoints]) -> float | None:
    """Device-hours per unit of compute, over all seeds of a run so far; None if not known."""
    hours, compute = [one.hours for one in members], sum(float(one.compute.max()) for one in members)
    return sum(filter(None, hours)) / compute if compute > 0 and None not in hours else None


def seeds_together(
    members: Sequence[RunPoints],
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None, np.ndarray]:
    """Compute, reward, counts and seed number, [N] each, of all seeds of a run, as arguments of fit_sigmoid."""
    compute = np.concatenate([one.compute for one in members])
    reward = np.concatenate([one.reward for one in members])
    label = np.repeat(np.arange(len(members)), [len(one.compute) for one in members])
    known = [one.counts for one in members if one.counts is not None]
    if len(known) < len(members):
        return compute, reward, None, label
    parts = [[one.passes for one in known], [one.trials for one in known]]
    if len({one.passes.shape[1] for one in known}) > 1:  # seeds evaluated on different prompts
        parts = [[part.sum(axis=1, keepdims=True) for part in both] for both in parts]
    return compute, reward, (np.concatenate(parts[0]), np.concatenate(parts[1])), label

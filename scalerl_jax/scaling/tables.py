"""Reads tables from files, row by row: CSV, TSV, JSONL, JSON, trainer_state.json, TensorBoard events; also gzipped.

Only the requested columns are kept, each as a list of raw cells, so that a million rows need only the memory of these.
The separator of a CSV file (comma, semicolon, tab) is detected in its header.
"""

import contextlib
import csv
import dataclasses
import gc
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from scalerl_jax.scaling import tfevents
from scalerl_jax.scaling.tfevents import InputError

RUN_FOLDER_FILE = "evals.jsonl"
TRAINER_STATE_FILE = "trainer_state.json"  # of transformers' and TRL's trainers, in each checkpoint
_BLOCK = 16_384  # rows read at once
_LISTED = 12  # columns named in a message


@dataclasses.dataclass(frozen=True)
class Table:
    source: str
    columns: tuple[str, ...]  # all columns of the file
    cells: dict[str, list[Any]]  # of the requested columns: N raw cells each, None for a missing one
    numbers: Sequence[int]  # [N] number of the line, step or entry of each row
    unit: str = "line"  # line | step | entry | row
    separator: str = ","
    twice: tuple[str, ...] = ()  # columns that appear more than once in the header
    remarks: tuple[str, ...] = ()  # omissions, a line each

    def __len__(self) -> int:
        return len(self.numbers)

    def place(self, row: int) -> str:
        return f"{self.source}: {self.unit} {self.numbers[row]}"

    def listed(self) -> str:
        return ", ".join(self.columns[:_LISTED])


Wanted = Callable[[str], bool]


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disables garbage collection: a million rows are a million lists without cycles, and searching them for cycles
    takes longer than reading."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@_nothing_collected()
def read_table(path: str, wanted: Wanted = lambda name: True) -> Table:
    """Reads the wanted columns of a file or folder. Raises InputError where it is missing or of unknown format."""
    if os.path.isdir(path):
        found = files_of(path)
        if not found:
            raise InputError(f"{path}: holds none of {RUN_FOLDER_FILE}, {TRAINER_STATE_FILE}, TensorBoard event files")
        kind = os.path.basename(found[0])
        if kind == RUN_FOLDER_FILE:
            return _json_lines(found[0], wanted, torn=True)
        return _json(found[0], wanted) if kind == TRAINER_STATE_FILE else _events(path, found, wanted)
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file or folder")
    if tfevents.is_event_file(path):
        return _events(path, [path], wanted)
    ending = os.path.splitext(path.removesuffix(".gz"))[1].lower()
    if ending in (".jsonl", ".ndjson"):
        return _json_lines(path, wanted)
    if ending == ".json":
        return _json(path, wanted)
    if ending in (".csv", ".tsv"):
        return _separated(path, wanted, tabs=ending == ".tsv")
    raise InputError(
        f"{path}: is not .csv, .tsv, .jsonl, .json (or one of these with .gz), a run folder or a TensorBoard event file"
    )


def files_of(path: str) -> list[str]:
    """The files that are read for a file or folder; none where a folder has none."""
    if not os.path.isdir(path):
        return [path]
    ours = os.path.join(path, RUN_FOLDER_FILE)
    one = ours if os.path.isfile(ours) else _trainer_state(path)
    return [one] if one else tfevents.event_files(path)


def _trainer_state(folder: str) -> str:
    """The trainer_state.json of a checkpoint, or of the latest checkpoint in a folder of them; "" without one."""
    checkpoints = [re.fullmatch(r"checkpoint-(\d+)", name) for name in os.listdir(folder)]
    steps = sorted((int(found[1]) for found in checkpoints if found), reverse=True)
    for name in (TRAINER_STATE_FILE, *(os.path.join(f"checkpoint-{step}", TRAINER_STATE_FILE) for step in steps)):
        if os.path.isfile(os.path.join(folder, name)):
            return os.path.join(folder, name)
    return ""


# ---------------------------------------------------------------------- text


def _lines(path: str, newline: str | None) -> Iterator[str]:
    """The lines of a text file in UTF-8 (or UTF-16 with a byte order mark), gzipped or not."""
    packed = path.endswith(".gz")
    opened: Callable[..., IO[Any]] = gzip.open if packed else open
    try:
        with opened(path, "rb") as file:
            wide = file.read(2) in (b"\xff\xfe", b"\xfe\xff")
        with opened(path, "rt", encoding="utf-16" if wide else "utf-8-sig", newline=newline) as file:
            yield from file
    except UnicodeDecodeError:
        raise InputError(f"{path}: {_undecodable(opened, path, wide)}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be unpacked: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def _undecodable(opened: Callable[..., IO[Any]], path: str, wide: bool) -> str:
    if wide:
        return "is not UTF-16 text, though it begins as such"
    before = 0
    with opened(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"line {number}: byte {before + error.start} is not UTF-8 text"
            before += len(line)
    return "is not UTF-8 text"


def _separated(path: str, wanted: Wanted, *, tabs: bool) -> Table:
    header_line = next((line for line in _lines(path, newline="") if line.strip()), None)
    if header_line is None:
        raise InputError(f"{path}: is empty")
    separator = "\t" if tabs else _separator(header_line)
    reader = csv.reader(_lines(path, newline=""), delimiter=separator)
    numbers: list[int] = []
    try:
        header = next(tuple(cell.strip() for cell in row) for row in reader if any(cell.strip() for cell in row))
        if all(not cell or _is_number(cell) for cell in header):
            at = reader.line_num
            raise InputError(f"{path}: line {at} is no header: it holds numbers, not the names of the columns")
        chosen = {name: at for at, name in reversed(list(enumerate(header))) if wanted(name)}
        cells: dict[str, list[Any]] = {name: [] for name in chosen}
        while block := [(reader.line_num, row) for row in itertools.islice(reader, _BLOCK)]:
            if odd := [(line, row) for line, row in block if len(row) != len(header)]:
                for line, row in odd:
                    if any(cell.strip() for cell in row):
                        raise InputError(f"{path}: line {line}: {len(row)} cells, but the header has {len(header)}")
                block = [(line, row) for line, row in block if len(row) == len(header)]
            numbers.extend([line for line, _ in block])
            for name, at in chosen.items():
                cells[name].extend([row[at] for _, row in block])
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}") from None
    if not numbers:
        raise InputError(f"{path}: has no rows below its header")
    twice = tuple(sorted({name for name in header if header.count(name) > 1}))
    return Table(path, tuple(dict.fromkeys(header)), cells, numbers, separator=separator, twice=twice)


def _separator(header: str) -> str:
    """The column separator: the candidate most frequent in the header outside quotes."""
    bare = re.sub(r'"[^"]*"', "", header)
    return max(",;\t", key=lambda mark: (bare.count(mark), mark == ","))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _of_objects(path: str, wanted: Wanted, unit: str, parts: Iterable[tuple[Sequence[int], Sequence[Any]]]) -> Table:
    """Makes a table. parts: row numbers, and as many objects of names and values."""
    names: dict[str, None] = {}
    cells: dict[str, list[Any]] = {}
    numbers: list[int] = []
    for places, rows in parts:
        if not set(map(type, rows)) <= {dict}:
            at = next(at for at, row in enumerate(rows) if not isinstance(row, dict))
            raise InputError(f"{path}: {unit} {places[at]}: is not a JSON object")
        if not set().union(*rows) <= names.keys():
            for name in dict.fromkeys(name for row in rows for name in row):
                if name not in names:
                    names[name] = None
                    if wanted(name):
                        cells[name] = [None] * len(numbers)
        for name, column in cells.items():
            column.extend([row.get(name) for row in rows])
        numbers.extend(places)
    if not numbers:
        raise InputError(f"{path}: is empty")
    return Table(path, tuple(names), cells, numbers, unit)


def _parsed(path: str, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{place} is not JSON: {error.msg}") from None
    except RecursionError:
        raise InputError(f"{path}:{place} is nested too deeply") from None
    except ValueError as error:  # an integer with thousands of digits
        raise InputError(f"{path}:{place} is not JSON: {str(error).partition(';')[0]}") from None


def _json_lines(path: str, wanted: Wanted, *, torn: bool = False) -> Table:
    """Reads JSON lines. torn: the last line may be incomplete, if the trainer was killed or is writing it."""
    ours, remarks = os.path.basename(path) == RUN_FOLDER_FILE, []

    def blocks() -> Iterator[tuple[Sequence[int], Sequence[Any]]]:
        numbered = enumerate(_lines(path, newline="\n"), start=1)
        while block := list(itertools.islice(numbered, _BLOCK)):
            try:  # as one list, which is parsed in a third of the time
                found = json.loads(f"[{','.join([text for _, text in block])}]")
            except (ValueError, RecursionError):
                found = []
            if len(found) != len(block):  # empty lines, or a mistake
                block = [(number, text) for number, text in block if text and not text.isspace()]
                found = []
                for number, text in block:
                    try:
                        found.append(_parsed(path, f" line {number}:", text))
                    except InputError:
                        if not torn or text.endswith("\n"):
                            raise
                        remarks.append(f"{path}: line {number} is left out: it is cut off")
            yield [number for number, _ in block[: len(found)]], [*map(_with_parts, found)] if ours else found

    table = _of_objects(path, wanted, "line", blocks())
    return dataclasses.replace(table, remarks=tuple(remarks))


def _with_parts(row: Any) -> Any:
    """Adds the columns of each environment to an evaluation of a mixture, as "NAME - COLUMN"."""
    parts = row.get("environments") if isinstance(row, dict) else None
    if not isinstance(parts, dict):
        return row
    found = [(name, part) for name, part in parts.items() if isinstance(part, dict)]
    return row | {f"{name} - {column}": value for name, part in found for column, value in part.items()}


def _json(path: str, wanted: Wanted) -> Table:
    """Reads the log_history of a trainer_state.json, or a list of objects."""
    document = _parsed(path, "", "".join(_lines(path, newline=None)))
    unit = "row"
    if isinstance(document, Mapping) and isinstance(document.get("log_history"), list):
        document, unit = document["log_history"], "log entry"
    if not isinstance(document, list):
        raise InputError(f"{path}: holds neither a log_history, as transformers writes it, nor a list of objects")
    return _of_objects(path, wanted, unit, [(range(1, len(document) + 1), document)])


def _events(path: str, files: list[str], wanted: Wanted) -> Table:
    try:
        scalars = tfevents.read_scalars(files)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if not scalars:
        raise InputError(f"{path}: the event files hold no scalars")
    steps = sorted(set().union(*scalars.values()))
    cells: dict[str, list[Any]] = {"step": list(steps)} if wanted("step") else {}
    for tag, series in scalars.items():
        if wanted(tag):
            cells[tag] = [series.get(step) for step in steps]
    return Table(path, ("step", *scalars), cells, np.array(steps).tolist(), "step")

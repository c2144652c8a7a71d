"""Reads files of rows as streams: one row at a time, with the name that messages use for it.

    .jsonl .ndjson    one object per line; blank lines are skipped
    .json             a list of objects, or as .jsonl; the columns of a list of lists are 0, 1, ...
    .csv .tsv         a header, then cells, all of them texts
    .parquet          read with pyarrow
    ... .gz           any of these except Parquet

Text is UTF-8, with or without a byte order mark. A malformed row is counted and the reader continues after it; a file
that cannot be read to its end is an error.

Also converts other kinds of cells to JSON values (json_value).
"""

import base64
import csv
import datetime
import decimal
import difflib
import glob
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from scalerl_jax.environments.data.columns import Malformed, MalformedRows

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_MARK = b"\xef\xbb\xbf"
_PARQUET_ROWS = 256  # rows held as Python objects at a time: cells of code problems have megabytes
_LONGEST_CELL = 2**31 - 1  # characters; the csv module's own limit is 128 KiB
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?=[-_.]|$)")

NamedColumns = tuple[str, dict[str, Any]]  # ("FILE row N", the row's columns)


def kind_of(path: str) -> str:
    """The file's suffix, one of SUFFIXES; "" if it is not a file of rows."""
    name = path.lower()
    packed = name.endswith(".gz")
    suffix = os.path.splitext(name.removesuffix(".gz"))[1]
    return suffix if suffix in SUFFIXES and not (packed and suffix == ".parquet") else ""


def files_of(where: str, field: str) -> list[str]:
    """The files of a path, a folder or a pattern, sorted by name. Raises ValueError naming `field`."""
    given = f"{field}={where}"
    if os.path.isdir(where):
        there = sorted(os.listdir(where))
        names = [
            name for name in there if kind_of(name) and name[0] != "." and os.path.isfile(os.path.join(where, name))
        ]
        if not names:
            inside = [name for name in there if os.path.isdir(os.path.join(where, name))]
            more = f"; there are folders in it: {', '.join(inside[:5])}" if inside else ""
            raise ValueError(f"{given}: the folder has no file of rows ({', '.join(SUFFIXES)}){more}")
        splits = {match[1] for name in names if (match := _SPLIT.search(name.lower()))}
        if len(splits) > 1:
            raise ValueError(
                f"{given}: the folder has files of several splits ({', '.join(sorted(splits))}): name those that are "
                f"meant, as in {os.path.join(where, min(splits))}*"
            )
        return [os.path.join(where, name) for name in names]
    found = [where]
    if not os.path.exists(where):
        if not glob.has_magic(where):
            raise ValueError(f"{given}: {os.strerror(2)}{_meant(where)}")
        found = sorted(path for path in glob.glob(where, recursive=True) if os.path.isfile(path))
        if not found:
            raise ValueError(f"{given}: no file is of that pattern")
    for path in found:
        if not kind_of(path):
            raise ValueError(f"{given}: {path} is not one of {', '.join(SUFFIXES)} by its name (.gz may follow)")
    return found


def _meant(where: str) -> str:
    """A hint on a path that does not exist: files with similar names, or a data set of the hub."""
    folder, name = os.path.split(where)
    near = difflib.get_close_matches(name, os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
    hint = f"; did you mean {' or '.join(os.path.join(folder, one) for one in near)}?" if near else ""
    if os.path.isdir(folder) and "/" not in folder and not kind_of(where):
        hint += f" (if it is a data set of the hub: {where}#SPLIT)"
    return hint


def read_file(path: str, malformed: MalformedRows) -> Iterator[NamedColumns]:
    """Every row of a file. Raises ValueError naming the file if its content does not match its suffix."""
    kind = kind_of(path)
    if kind == ".parquet":
        yield from _parquet(path, malformed)
        return
    try:
        with (gzip.open if path.lower().endswith(".gz") else open)(path, "rb") as file:
            if kind in (".csv", ".tsv"):
                yield from _cells(file, path, "\t" if kind == ".tsv" else ",", malformed)  # type: ignore[arg-type]
            elif kind == ".json" and _first_character(file) == b"[":  # type: ignore[arg-type]
                yield from _list(file, path, malformed)  # type: ignore[arg-type]
            else:
                yield from _lines(file, path, malformed)  # type: ignore[arg-type]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: is not gzip, or is cut off ({error})") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error


def _first_character(file: IO[bytes]) -> bytes:
    start = file.read(4096).removeprefix(_MARK).lstrip()[:1]
    file.seek(0)
    return start


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


_DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)


def _loads(text: bytes) -> Any:
    """Parses JSON, with NaN and infinities as None. Raises Malformed."""
    try:
        return _DECODER.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Malformed(f"is not UTF-8 text ({error})") from error
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not JSON ({error})") from error


def _lines(file: IO[bytes], path: str, malformed: MalformedRows) -> Iterator[NamedColumns]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(_MARK)
        if not line.strip():
            continue
        name = f"{path} row {number}"
        try:
            value = _loads(line)
        except Malformed as error:
            malformed.skip(name, str(error))
            continue
        if isinstance(value, dict):
            yield name, value
        else:
            malformed.skip(name, "is not a JSON object" + (": a file that is a list is a .json" * (number == 1)))


def _list(file: IO[bytes], path: str, malformed: MalformedRows) -> Iterator[NamedColumns]:
    try:
        values = _loads(file.read().removeprefix(_MARK))
    except Malformed as error:
        raise ValueError(f"{path}: {error}") from error
    for number, value in enumerate(values, 1):
        if isinstance(value, list):
            value = {str(n): cell for n, cell in enumerate(value)}
        if isinstance(value, dict):
            yield f"{path} row {number}", value
        else:
            malformed.skip(f"{path} row {number}", "is not a JSON object")


def _cells(file: IO[bytes], path: str, separator: str, malformed: MalformedRows) -> Iterator[NamedColumns]:
    csv.field_size_limit(_LONGEST_CELL)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=separator, strict=True)
    number = 0
    try:
        header = next(reader, [])
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise ValueError(f"{path}: the header has {twice[0]!r} twice")
        for cells in reader:
            if not cells:
                continue
            number += 1
            name = f"{path} row {number}"
            if len(cells) == len(header):
                yield name, dict(zip(header, cells, strict=True))
            else:
                malformed.skip(name, f"has {len(cells)} cells, the header has {len(header)}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error})") from error
    except csv.Error as error:
        raise ValueError(f"{path}: behind row {number}, line {reader.line_num}: {error}") from error


def read_batch(batch: Any, name: Callable[[int], str], malformed: MalformedRows) -> Iterator[NamedColumns]:
    """Every row of an Arrow batch or table, the n-th with the name name(n).

    A row is malformed if a cell has no Python equivalent: a text that is not UTF-8, a time after the year 9999. Floats
    of less than 64 bits become the shortest decimal that rounds to them: 0.1, not 0.10000000149011612.
    """
    narrow = {field.name: field.type for field in batch.schema if "float" in str(field.type)}  # float64 is "double"

    def columns_of(row: dict[str, Any]) -> dict[str, Any]:
        return json_row({**row, **{column: _shortest(row[column], kind) for column, kind in narrow.items()}})

    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # the error does not name the row: convert one row at a time
        for n in range(batch.num_rows):
            try:
                (columns,) = batch.slice(n, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                malformed.skip(name(n), f"has a cell that cannot be read: {' '.join(str(error).split())}")
            else:
                yield name(n), columns_of(columns)
        return
    for n, columns in enumerate(rows):
        yield name(n), columns_of(columns)


def _shortest(value: Any, kind: Any) -> Any:
    """A cell of an Arrow type, with float32 and float16 converted to the float64 of their shortest decimals."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if types.is_struct(kind):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_shortest(inner, kind.value_type) for inner in value]
    return value


def _parquet(path: str, malformed: MalformedRows) -> Iterator[NamedColumns]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install 'scalerl-jax[environments]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                yield from read_batch(batch, lambda n, first=number + 1: f"{path} row {first + n}", malformed)  # type: ignore[misc]
                number += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: is not Parquet, or is broken ({' '.join(str(error).split())})") from error


def json_value(value: Any) -> Any:
    """Converts to JSON values: dates to ISO texts, NaN and infinities to None, decimals to numbers, bytes to text.

    Bytes that are not UTF-8 become base64, and values of any other type str(value).
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(inner) for inner in value]
    if isinstance(value, decimal.Decimal):
        whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if whole else json_value(float(value))
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        held = bytes(value)
        try:
            return held.decode("utf-8")
        except UnicodeDecodeError:
            return base64.b64encode(held).decode("ascii")
    if hasattr(value, "tolist"):  # numpy, scalars and arrays
        return json_value(value.tolist())
    return str(value)


def json_row(columns: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): json_value(value) for key, value in columns.items()}

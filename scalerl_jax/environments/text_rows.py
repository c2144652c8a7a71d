"""JSONL files: one object a line, of texts."""

import json
import math
from collections.abc import Iterator, Sequence


def read_jsonl(
    path: str, field: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, ...]]:
    """The texts of each row, and the row's name for messages: "FILE row N". Blank lines are skipped.

    A column of `optional` is "" where a row has none.

    Raises ValueError naming file and row, or `field` of the config where there is no such file.
    """
    if not path:
        raise ValueError(f"{field}: no file is given")
    try:
        with open(path, encoding="utf-8") as file:
            lines = list(file)
    except OSError as error:
        raise ValueError(f"{field}={path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error})") from error
    for number, line in enumerate(lines, 1):
        where = f"{path} row {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: is not a JSON object")
        texts = []
        for column in (*columns, *optional):
            value = row.get(column)
            if value is None and column in optional:
                texts.append("")
                continue
            if column == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
                value = None if isinstance(value, float) and not math.isfinite(value) else str(value)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{where}: {column!r} is not a text, or is empty")
            texts.append(value)
        yield *texts, where

"""Parses the cells of one column as numbers: missing ones, NaN, decimal commas, thousands separators.

A column that Python's float() accepts is parsed by it. Otherwise all commas together decide their meaning: 0,5 or
1234,5 is a decimal comma; 1,234,567 or 1,234.5 has thousands separators. If all cells are like 1,234, both are
possible: with commas between the file's columns they are thousands separators, otherwise the file is refused.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

GOOD, BLANK, NAN, BAD = range(4)  # states of a cell

_MISSING = ("na", "n/a", "<na>", "null", "none")  # other programs' spellings of NaN, in lower case
_POWER = r"([eE][+-]?\d+)?"
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?" + _POWER)
_DECIMAL = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d*),\d*" + _POWER)
_DOTS_APART = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")


class AmbiguousComma(ValueError):
    """A comma that may be a decimal mark or a thousands separator, and the file does not show which."""


def decimal_comma(cells: Iterable[Any], *, commas_between: bool) -> bool:
    """Whether the commas in these cells are decimal marks. commas_between: commas separate the file's columns.

    Raises AmbiguousComma.
    """
    either = None
    for cell in cells:
        if not isinstance(cell, str) or "," not in cell:
            continue
        text = cell.strip()
        thousands, decimal = bool(_THOUSANDS.fullmatch(text)), bool(_DECIMAL.fullmatch(text))
        if thousands != decimal:
            return decimal
        if thousands:
            either = text
    if either is not None and not commas_between:
        plain = either.replace(",", "")
        raise AmbiguousComma(f"{either!r} may be {either.replace(',', '.')} or {plain}; write it with a decimal point")
    return False


def numbers(cells: Sequence[Any], *, comma: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The numbers [N] float64 (NaN without one) and the state of each cell [N]: GOOD, BLANK, NAN, BAD.

    comma: commas are decimal marks, and points thousands separators. Infinities are BAD.
    """
    kinds = set(map(type, cells))
    try:
        if kinds <= {int, float} or (kinds == {str} and not comma):
            values = np.fromiter(map(float, cells), np.float64, count=len(cells))
            state = np.where(np.isnan(values), NAN, np.where(np.isinf(values), BAD, GOOD)).astype(np.uint8)
            return values, state
    except (ValueError, OverflowError):
        pass  # some cell is not a number: parse one at a time
    values, state = np.full(len(cells), np.nan), np.full(len(cells), GOOD, np.uint8)
    for at, cell in enumerate(cells):
        if cell is None or (isinstance(cell, str) and (not cell or cell.isspace())):
            state[at] = BLANK
            continue
        values[at] = value = _number(cell, comma)
        if not math.isfinite(value):
            state[at] = NAN if math.isnan(value) else BAD
    return values, state


def _number(cell: Any, comma: bool) -> float:
    """The number of a cell; NaN for a spelling of NaN, infinite if it is no number."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        return math.inf
    if isinstance(cell, str) and cell.strip().lower() in _MISSING:
        return math.nan
    if isinstance(cell, str) and comma:
        text = cell.strip()
        if "," in text or _DOTS_APART.fullmatch(text):
            cell = text.replace(".", "").replace(",", ".")
        elif "." in text:
            return math.inf  # both point and comma as decimal marks in one file: one is a mistake
    elif isinstance(cell, str) and _THOUSANDS.fullmatch(cell.strip()):
        cell = cell.replace(",", "")
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return math.inf


def complaint(cell: Any) -> str:
    """Describes the fault of a BAD cell."""
    if isinstance(cell, str):
        try:
            finite = math.isfinite(float(cell))
        except ValueError:
            return f"{cell[:40]!r} is not a number"
        return (
            f"{cell[:40]!r}: commas are the decimal marks of this file" if finite else f"{cell} is not a finite number"
        )
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return f"{str(cell)[:40]} is not a finite number"
    return f"{json.dumps(cell)[:40]} is not a number"

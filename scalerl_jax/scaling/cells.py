"""Numbers out of the cells of one column: missing ones, NaN, decimal commas, separators of thousands.

A column that Python's float() takes as it stands is taken so. Where commas are in the way, all of them together tell
what they are: 0,5 or 1234,5 is a decimal comma; 1,234,567 or 1,234.5 has separators of thousands. A file in which only
cells such as 1,234 stand leaves both open: with commas between its columns they are thousands, otherwise it is refused.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

GOOD, BLANK, NAN, BAD = range(4)  # what a cell is

_MISSING = ("na", "n/a", "<na>", "null", "none")  # how other programs write NaN, in small letters
_POWER = r"([eE][+-]?\d+)?"
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?" + _POWER)
_DECIMAL = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d*),\d*" + _POWER)
_DOTS_APART = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")


class AmbiguousComma(ValueError):
    """A comma that is a decimal mark or a separator of thousands, and nothing in the file tells which."""


def decimal_comma(cells: Iterable[Any], *, commas_between: bool) -> bool:
    """Whether the commas in these cells are decimal marks. commas_between: the file's columns are told apart by commas.

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
    """The numbers [N] float64 (NaN where there is none) and what each cell is [N]: GOOD, BLANK, NAN, BAD.

    comma: commas are decimal marks, and points separators of thousands. Infinities are BAD.
    """
    kinds = set(map(type, cells))
    try:
        if kinds <= {int, float} or (kinds == {str} and not comma):
            values = np.fromiter(map(float, cells), np.float64, count=len(cells))
            state = np.where(np.isnan(values), NAN, np.where(np.isinf(values), BAD, GOOD)).astype(np.uint8)
            return values, state
    except (ValueError, OverflowError):
        pass  # some cell is no number: one at a time
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
    """NaN where the cell says so; infinite where it is no number."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        return math.inf
    if isinstance(cell, str) and cell.strip().lower() in _MISSING:
        return math.nan
    if isinstance(cell, str) and comma:
        text = cell.strip()
        if "," in text or _DOTS_APART.fullmatch(text):
            cell = text.replace(".", "").replace(",", ".")
        elif "." in text:
            return math.inf  # points and commas as decimal marks of one file: one of them is a mistake
    elif isinstance(cell, str) and _THOUSANDS.fullmatch(cell.strip()):
        cell = cell.replace(",", "")
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return math.inf


def complaint(cell: Any) -> str:
    """What is wrong with a BAD cell."""
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

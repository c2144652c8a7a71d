"""Whether what a program gave is what was wanted. It is compared out here, where no program has a say.

Standard output, line by line; lines at the beginning and end with nothing on them do not count:
    a line is right if its words are the wanted ones, each of them alike
    words are alike if they are the same, or numbers of the same value; where the wanted one has a decimal point or an
    exponent, within 1e-6 of it, absolute or relative; a wanted 010101 is a text

Values, after both went through JSON (a tuple is a list, keys are texts):
    lists and objects part by part; numbers by value, within 1e-6 where the wanted one is a float (5.0 is the integer 5,
    5.000001 is not); else the same
"""

import decimal
import re
from typing import Any

TOLERANCE = 1e-6
LONGEST_NUMBER = 1_000  # characters; longer ones are compared as words
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_TEXT = re.compile(r"0\d+", re.ASCII)


def same_output(wanted: str, given: str) -> bool:
    return differing_line(wanted, given) is None


def differing_line(wanted: str, given: str) -> tuple[str, str] | None:
    """(wanted, given): the first that is wrong; "" for one that is not there."""
    wanted_lines, given_lines = wanted.strip().split("\n"), given.strip().split("\n")
    for i in range(max(len(wanted_lines), len(given_lines))):
        left = wanted_lines[i].strip() if i < len(wanted_lines) else None
        right = given_lines[i].strip() if i < len(given_lines) else None
        if left == right:
            continue
        if left is None or right is None:
            return left or "", right or ""
        words, others = left.split(), right.split()
        if len(words) != len(others) or not all(map(_alike, words, others)):
            return left, right
    return None


def _alike(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    if max(len(wanted), len(given)) > LONGEST_NUMBER:
        return False
    if not _NUMBER.fullmatch(wanted) or not _NUMBER.fullmatch(given) or _TEXT.fullmatch(wanted):
        return False
    if re.search(r"[.eE]", wanted):
        return _near(float(wanted), float(given))
    return decimal.Decimal(wanted) == decimal.Decimal(given)


def _near(wanted: float, given: float) -> bool:
    return wanted == given or abs(wanted - given) <= TOLERANCE * max(1.0, abs(wanted)) < float("inf")


def same_value(wanted: Any, given: Any) -> bool:
    """Of values of JSON."""
    if isinstance(wanted, list) and isinstance(given, list):
        return len(wanted) == len(given) and all(map(same_value, wanted, given))
    if isinstance(wanted, dict) and isinstance(given, dict):
        return wanted.keys() == given.keys() and all(same_value(wanted[key], given[key]) for key in wanted)
    if isinstance(wanted, int | float) and isinstance(given, int | float):
        if not isinstance(wanted, float):
            return wanted == given
        try:
            return _near(wanted, float(given))
        except OverflowError:  # an integer that no float comes near
            return False
    return type(wanted) is type(given) and wanted == given

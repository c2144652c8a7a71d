"""Whether a text gives the gold answer: compares text first, then words, then numbers, and the rest by math-verify.

    gold and answer are the same text     correct
    gold is a choice or words             the words must be equal; math-verify is not used
    gold only looks like a number         an address, a date, a ratio, a formula: compared as text
    both are numbers, perhaps with units  compared exactly: 1/2, 0.5, 50\\%, \\$1,000; units only if both have them
    gold is mathematics                   math-verify on the mathematics in the answer, unless numeric values disagree
                                          (expressions.py)

A text that names several answers gives none of them, unless the gold is a list too.
"""

import re
from fractions import Fraction
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import And, Basic, Set, Union
from sympy.core.relational import Relational

from scalerl_jax.environments import answer_text, expressions
from scalerl_jax.environments.answer_text import (
    bare,
    final_answers,
    in_parentheses,
    is_mathematics,
    items,
    operators,
    same_primes,
    same_text,
    squeezed,
    subscripts_gone,
    unwrapped,
    words,
)

LONGEST_GIVEN = 2_000  # characters of one answer; longer ones are only compared as text
_LATEX = LatexExtractionConfig(
    # Units are compared in this module: math-verify's include single letters, which are as often variables.
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
    )
)
_SYSTEM = re.compile(r"\$?\\begin\s*\{cases\}(.*)\\end\s*\{cases\}\$?", re.DOTALL)
_POINT = re.compile(r"\$?\s*(?:\\left)?\(.*(?:\\right)?\)\s*\$?", re.DOTALL)
_VALUE_OF = re.compile(r"[A-Za-z](?:_\w|_\{\w+\})?\s*=[^=<>]+")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<money>\\\$|[€£¥])?\s*(?P<inner>[+-]?)\s*(?:"
    rf"(?:(?P<whole>\d+)(?:\s*(?=\\frac)|\s+(?=\d+\s*/)))?"
    r"(?:\\frac\s*\{\s*(?P<up>-?\d+(?:\.\d*)?)\s*\}\s*\{\s*(?P<down>\d+(?:\.\d*)?)\s*\}"
    rf"|(?P<over>\d+)\s*/\s*(?P<under>\d+))"
    rf"|(?:(?P<integer>{_DIGITS})(?P<decimals>\.\d*)?|(?P<fraction>\.\d+))"
    r"(?:[eE](?P<tens>[+-]?\d{1,3})(?!\d)|\s*\\(?:times|cdot)\s*10\s*\^\s*\{?\s*(?P<power>[+-]?\d{1,3})\s*\}?(?!\d))?)"
    r"(?P<rest>.*)",
    re.DOTALL,
)
_NAMES = re.compile(
    r"(?<![a-zA-Z\\])(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|exp|max|min|gcd|pi)(?![a-zA-Z])"
)
_LONGEST_NUMBER = 4_000  # digits; Python refuses to read more
# The first word is the canonical name of each unit; unlisted words are units only equal to themselves.
_UNITS = {
    name: names.split()[0]
    for names in (
        "% percent pct percentage", "$ dollar usd", "cent ¢", "€ euro eur", "£ gbp", "° degree deg", "°c", "°f",
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
        "in inch inches", "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram", "kg kilogram", "lb pound lbs",
        "oz ounce", "ml milliliter millilitre", "l liter litre", "s second sec", "min minute", "h hour hr", "day",
        "week", "month", "year yr", "m/s", "km/h kmh kph", "mph", "rad radian",
    )
    for name in names.split()
}  # fmt: skip
_PROSE = frozenset("is are was be the because or and to so not but then if than with for from by".split())
_MAGNITUDES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12
}  # fmt: skip
_MAGNITUDE = re.compile(
    r"\s*(?:" + answer_text.TEXT_COMMAND + rf"\s*\{{\s*)?((?:{'|'.join(_MAGNITUDES)})s?)(?![a-zA-Z])(?:\s*\}})?",
    re.IGNORECASE,
)
# After a number these words change its value, or make it no number.
CHANGING = (
    "half halves third thirds quarter quarters fourth fourths fifth fifths"
    "  sixth sixths seventh sevenths eighth eighths "
    "ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth millionths squared cubed "
    "factorial minus plus modulo below less fewer more lower higher greater smaller under over negative power "
    "choose double twice wrong incorrect false no never none"
).split()
# A sentence with one of these does not give a single number.
_OPEN = re.compile(
    r"(?<![a-zA-Z])(?:or|either|neither|nor|not|no|none|never|cannot|between|less|more|greater|fewer|larger|smaller|"
    r"higher|lower|bigger|above|below|under|over|at least|at most|up to|one of|any of|some of|such as|from|"
    r"impossible|unlikely|doubt|wrong|incorrect|false|isn't|except|minimum of|maximum of|approximately|about|around|"
    r"perhaps|maybe|might|may|could|if|whether|exceeds?|until|before|after|beyond)(?![a-zA-Z])|n't(?![a-zA-Z])",
    re.IGNORECASE,
)
_CHANGED = re.compile(
    rf"\d\s*(?:{answer_text.TEXT_COMMAND}\s*\{{\s*)?(?:[kK]|{'|'.join(CHANGING)}|(?:{'|'.join(_MAGNITUDES)})s?)(?![a-zA-Z])",
    re.IGNORECASE,
)
_BASE = re.compile(r"(\d+)[)\s]*_\s*(?:\{[\s(]*(\w+)[\s)]*\}|(\d+|[a-zA-Z]))")  # 101_2, (101)_{two}
_BASES = {
    name: str(base) for base, name in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)
} | {"sixteen": "16"}
_NO_UNITS = _PROSE | frozenset(CHANGING)
_POWERS = {"square": "2", "sq": "2", "sq.": "2", "cubic": "3", "cu": "3"}
_OF_THE_UNIT = frozenset("long tall wide high deep old apart away each total altogether exactly".split())
_PLURALS = {"people": "person", "children": "child", "men": "man", "women": "woman", "mice": "mouse", "feet": "foot"}
_CHOICE = re.compile(r"[A-Za-z]")
# Addresses, dates, scores and telephone numbers, hexadecimal numbers, formulas, ratios: compared as text.
_LOOKS_LIKE_NUMBERS = re.compile(
    r"\d+(?:\.\d+){2,}|\d+-\d+(?:-\d+)*|0[xX][0-9a-fA-F]+|\d+(?::\d+)+|(?:[A-Z][a-z]?\d*)*[A-Z][a-z]?\d+(?:[A-Z][a-z]?\d*)+"
    r"|(?:[A-Z][a-z]?){2,}\d+"
)
_LABEL = re.compile(r"\s*(?:\\text\s*\{[^{}]*\}|\\lim(?![a-zA-Z])[^=]*?|[a-zA-Z]\(-?\d+\))\s*=\s*(?=[^=]+$)")
_UNIT_BEHIND = re.compile(r"\s*" + answer_text.TEXT_COMMAND + r"\s*\{[A-Za-z /.°]+\}\s*(?:\^\s*\{?\s*[23]\s*\}?\s*)?$")
_OR = re.compile(
    answer_text.TEXT_COMMAND + r"\s*\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor(?![a-zA-Z])|\\vee(?![a-zA-Z])"
)
_CONDITION = re.compile(r"\\le|\\ge|<|>|\\cup|\\infty")
_BUILDER = re.compile(
    r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:|\\colon)(?P<condition>.*)\\\}", re.DOTALL
)


def right(text: str, answer: str) -> bool:
    """Whether the final answer of `text` equals `answer`."""
    if text.strip() == answer.strip() or same_text(text, answer):
        return True
    gold = next(iter(final_answers(answer)), answer)  # it may come boxed, or with its solution
    for reading in final_answers(text):
        if same_text(reading, gold):
            return True
        if len(reading) <= LONGEST_GIVEN and len(gold) <= LONGEST_GIVEN and _gives(reading, gold):
            return True
    return False


def _values(text: str) -> list[tuple[str, str]]:
    """(unknown, value) pairs of "x=1, y=2" or of a cases system; empty for any other text."""
    found = _SYSTEM.fullmatch(text.strip())
    rows = found[1].replace("&", "").split("\\\\") if found else re.split(r",|;|\\text\s*\{\s*and\s*\}", text)
    rows = [row.strip(" ,;.$") for row in rows]
    rows = [row for row in rows if row]
    each = [(name.strip(), value.strip()) for name, _, value in (row.partition("=") for row in rows)]
    if len(each) < 2 or len(dict(each)) < len(each) or not all(map(_VALUE_OF.fullmatch, rows)):
        return []
    return each


def _as_point(reading: str, gold: str) -> tuple[str, str]:
    """(reading, gold): "x=1, y=2" becomes the point (1, 2) if the other one is a point, a cases system a list."""
    wanted, given = _values(gold), _values(reading)
    if wanted and _POINT.fullmatch(reading.strip()):
        return reading, f"({', '.join(value for _, value in wanted)})"
    if given and _POINT.fullmatch(gold.strip()):
        return f"({', '.join(value for _, value in sorted(given))})", gold
    texts = [", ".join(map("=".join, each)) if each else text for each, text in ((given, reading), (wanted, gold))]
    return texts[0], texts[1]


def _gives(reading: str, gold: str) -> bool:
    reading, gold = _as_point(reading, gold)
    if _LABEL.match(gold) and "=" not in reading:
        gold = _LABEL.sub("", gold)
    if several := letters(gold):
        return (letters(reading) or sorted(squeezed(reading))) == several
    if re.fullmatch(r"[A-H]{2,}", squeezed(gold)) and letters(reading):
        return letters(reading) == sorted(squeezed(gold))
    one = letter(gold)
    if one is not None:
        return names_choice(reading, one)
    if _LOOKS_LIKE_NUMBERS.fullmatch(squeezed(gold)):
        return subscripts_gone(reading) == subscripts_gone(gold)
    number = measure(gold)
    if number is None:
        (gold, unit), (reading, other) = _units_apart(gold), _units_apart(reading)
        if unit and other and unit != other:
            return False
    if number is None and not is_mathematics(gold):
        same = words(reading) == words(gold) != () and operators(reading) == operators(gold)
        return same and not is_mathematics(reading)
    given = measure(reading)
    if number is not None and given is not None:
        return number.equals(given)
    if _in_bases(reading) != _in_bases(gold) or not _as_many(gold, reading):  # math-verify does not check these
        return False
    if not is_mathematics(reading) and given is None:
        return _same_sets(gold, reading) or _found_in_prose(reading, gold, number)
    if not same_primes(gold, reading):
        return False
    same = _same(_parsed(_without_units(gold, number)), _parsed(_without_units(reading, given)))
    return same or _same_sets(gold, reading)


# ---- Words ---------------------------------------------------------------------------------------------------------


def letter(gold: str) -> str | None:
    """The letter of a gold answer that is a single choice: B, (B), \\text{B}; else None."""
    found = words(gold)
    return (
        found[0]
        if len(found) == 1 and _CHOICE.fullmatch(found[0]) and not (is_mathematics(gold) or operators(gold))
        else None
    )


def letters(text: str) -> list[str]:
    """The letters of a list of several choices, in alphabetical order; empty for any other text."""
    s = bare(unwrapped(text)).replace("*", "")
    if not re.fullmatch(r"\(?[A-Z]\)?(?:\s*(?:,|;|\band\b)\s*\(?[A-Z]\)?)+", s) or re.match(r"\([^)]*,", s):
        return []
    return sorted(re.findall(r"[A-Z]", s))


def names_choice(reading: str, choice: str) -> bool:
    """Whether `reading` names only this choice (a lower-case letter), optionally followed by the choice's content."""
    text = re.sub(r"\s+", " ", unwrapped(answer_text.plain(reading))).replace("*", "")
    if operators(text):  # -x
        return False
    text = text.strip(" \"'`")
    found = [word for word in words(text) if word not in ("option", "choice", "answer")]
    if found == [choice]:
        return True
    match = answer_text.MARKED_CHOICE.match(text)
    if match is None or next(filter(None, match.groups())).casefold() != choice:
        return False
    rest = text[match.end() :].strip()
    if re.match(r"(?:,|/|&|;|or\b|and\b|not\b)", rest, re.IGNORECASE):
        return False
    return not answer_text.MARKED_CHOICE.search(rest) and not re.search(
        r"\b(?:or|and|nor)\s+\(?[A-Za-z]\)?(?:\W|$)", rest
    )


# ---- Numbers -------------------------------------------------------------------------------------------------------


class Measure:
    """A number with its unit: "" for none, "%" for percent, the word itself for an unknown unit."""

    def __init__(self, value: Fraction, unit: str, *, decimal_places: int | None, variable: str):
        self.value, self.unit, self.decimal_places = value, unit, decimal_places
        self.variable = variable  # x in "x = 5", else ""

    def equals(self, other: "Measure") -> bool:
        """Whether `other`, from the text, equals this number, from the gold answer."""
        if {self.unit, other.unit} == {"$", "cent"}:
            return self.value * (100 if self.unit == "$" else 1) == other.value * (100 if other.unit == "$" else 1)
        if self.unit and other.unit and self.unit != other.unit and not _degrees(self.unit, other.unit):
            return False
        if self.variable and other.variable and self.variable != other.variable:
            return False
        mine, theirs = self.value, other.value
        a_share = self.unit != "%" == other.unit and abs(mine) <= 1  # 0.5 is not 0.5 %, though 50 may be 50 %
        if mine == theirs and not a_share:
            return True
        if self.unit != other.unit and "%" in (self.unit, other.unit):  # 50 % is 0.5 too
            mine, theirs = (v / 100 if unit == "%" else v for v, unit in ((mine, self.unit), (theirs, other.unit)))
            return mine == theirs
        # A repeating decimal needs six correct places, as in math-verify: 0.333333 equals 1/3.
        return any(
            a.decimal_places is None and b.decimal_places is not None and b.decimal_places >= 6
            and _endless(a.value) and abs(a.value - b.value) < Fraction(1, 2 * 10**6)
            for a, b in ((self, other), (other, self))
        )  # fmt: skip


def _degrees(a: str, b: str) -> bool:
    """Whether both are degrees and one does not name the scale (° equals °C)."""
    return "°" in (a, b) and a[0] == b[0] == "°"


def _endless(value: Fraction) -> bool:
    """Whether its decimal expansion is infinite: no power of ten is a multiple of the denominator."""
    return pow(10, value.denominator.bit_length(), value.denominator) != 0


def measure(text: str) -> Measure | None:
    """The number that the whole `text` denotes, with its unit; None if it is not a number."""
    s = bare(text)
    if wrapped := re.fullmatch(answer_text.TEXT_COMMAND + r"\s*\{\s*(-?\d[^{}]*?)\s*\}", s):  # \text{7 apples}
        s = wrapped[1]
    variable = re.match(r"([a-zA-Z])\s*=\s*", s)  # x = 5
    match = _NUMBER.fullmatch(s, variable.end() if variable else 0)
    if match is None or len(s) > _LONGEST_NUMBER or (match["sign"] and match["inner"]):
        return None
    factor, rest = _magnitude(match["rest"], money=match["money"] is not None)
    unit = _unit(rest)
    if unit is None:
        return None
    if match["money"]:
        unit = {"\\$": "$"}.get(match["money"], match["money"])
    places = None
    try:
        if match["down"] or match["under"]:
            up, down = match["up"] or match["over"], match["down"] or match["under"]
            value = Fraction(up.rstrip(".")) / Fraction(down.rstrip("."))
            if match["whole"]:  # 1 1/2
                if not 0 < value < 1:
                    return None
                value += int(match["whole"])
        else:
            decimals = (match["decimals"] or match["fraction"] or ".")[1:]
            integer = re.sub(r"[ ,]", "", match["integer"] or "0")
            shift = int(match["tens"] or match["power"] or 0)
            value = Fraction(f"{integer}.{decimals}e{shift}")
            places = max(0, len(decimals) - shift)
    except (ValueError, ZeroDivisionError):
        return None
    if factor != 1:
        value, places = value * factor, None
    return Measure(-value if "-" in (match["sign"], match["inner"]) else value, unit, decimal_places=places,
                   variable=variable[1] if variable else "")  # fmt: skip


def _magnitude(rest: str, *, money: bool) -> tuple[int, str]:
    """(factor of the magnitude words directly after a number, the text after them)."""
    factor = 1
    if money and (match := re.match(r"([kK])(?![a-zA-Z])", rest)):  # elsewhere it is a variable
        return 1000, rest[match.end() :]
    while match := _MAGNITUDE.match(rest):
        factor *= _MAGNITUDES[match[1].casefold().removesuffix("s")]
        rest = rest[match.end() :]
    return factor, rest


def _singular(name: str) -> str:
    if name in _PLURALS:
        return _PLURALS[name]
    if name.endswith("ies") and len(name) > 4:
        return name[:-3] + "y"
    if re.search(r"(?:s|x|z|ch|sh)es$", name):
        return name[:-2]
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else name


def _unit(rest: str) -> str | None:
    """The unit in the text after a number, "" if that is empty; None if it is not a unit."""
    if not rest.strip():
        return ""
    marked = re.match(r"\s*" + answer_text.TEXT_COMMAND + r"\s*\{", rest) is not None
    s = unwrapped(rest).replace("\\%", "%").replace("^\\circ", "° ")
    power = re.search(r"\^\s*\{?\s*([23])\s*\}?\s*$", s)
    s = (s[: power.start()] if power else s).strip()
    if not power and s in ("%", "°"):
        return s
    spaced = rest[0].isspace() or marked
    if not re.fullmatch(r"[A-Za-z°$€£¥¢%][A-Za-z ./°]*", s):
        return None
    single = [name for name in s.split() if len(name) == 1 and name.isalpha() and name.casefold() not in _UNITS]
    if single and s[0] != "°" and not (marked and all(map(str.isupper, single))):  # K and N are units, x is none
        return None
    names = s.casefold().split()
    if len(names) > 3 or any(name.rstrip(".") in _NO_UNITS or name in answer_text.FUNCTIONS for name in names):
        return None
    exponent = power[1] if power else ""
    if len(names) > 1 and names[0] in _POWERS and not power:  # square feet
        exponent, names = _POWERS[names[0]], names[1:]
    while len(names) > 1 and names[-1] in _OF_THE_UNIT:  # 5 cm long
        names.pop()
    name = re.sub(r"^(?:° ?|degrees? )(?:(c)|f)(?:elsius|ahrenheit)?$", lambda m: "°c" if m[1] else "°f",
                  " ".join(names).rstrip("."))  # fmt: skip
    known: str | None = _UNITS.get(name) or _UNITS.get(_singular(name))
    if len(name) == 1 and not marked and name.isalpha() and not spaced:
        return None  # a variable
    if known is None and not spaced:
        return None
    return (known or " ".join(_singular(word.replace(".", "")) for word in name.split())) + exponent


def _without_units(text: str, found: Measure | None) -> str:
    """Input for math-verify: a number as a fraction, anything else without units in text commands."""
    if found is not None:
        return f"\\frac{{{found.value.numerator}}}{{{found.value.denominator}}}"
    s = bare(text)
    s = re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ",", s)
    s = re.sub(r"(?:" + answer_text.TEXT_COMMAND + r"\s*\{\s*[A-Za-z /.]{2,}\s*\}\s*(?:\^\s*\{?[23]\}?)?\s*)$", "", s)
    if re.search(r"(?<![a-zA-Z])(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])", s):
        s = re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\\frac{\1\\pi}{180})", s)
    s = re.sub(r"(?<![\w.])1\s*(?=i(?![a-zA-Z]))", "", s)  # 14 - 1i
    # (4!)^{10}10! is read as (4!)^{10} times 1 times 0!.
    s = re.sub(r"(\\[a-zA-Z]+\s*)?(\^\s*\{[^{}]*\})\s*(?=\d)", lambda m: m[0] if m[1] else f"{m[2]}\\cdot ", s)
    s = re.sub(r"\^\\circ\s*$", "", s)
    s = re.sub(r"\\\$", "", s)
    s = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", s) if re.fullmatch(r"\D*\d{1,3}(?:,\d{3})+\D*", s) else s
    return _NAMES.sub(r"\\\1 ", s)


def _units_apart(text: str) -> tuple[str, str]:
    """Splits a formula from the unit in a text command after it, as in \\sqrt{2}\\text{ cm}; "" without a unit."""
    s = bare(text)
    match = _UNIT_BEHIND.search(s)
    if match is None or not match.start() or not is_mathematics(s[: match.start()]):
        return text, ""
    unit = _unit(f" {s[match.start() :].lstrip()}")
    return (s[: match.start()], unit) if unit else (text, "")


def _as_many(gold: str, reading: str) -> bool:
    """Whether two lists contain each number equally often; a pair in parentheses never equals a set in braces, nor
    numbers joined by "or"."""
    texts = [bare(text) for text in (gold, reading)]
    in_braces = [text.startswith("\\{") and text.endswith("\\}") for text in texts]
    sets = [
        "," in text if braces else _OR.search(text) and not _CONDITION.search(text)
        for text, braces in zip(texts, in_braces, strict=True)
    ]
    if any(sets) and any("," in text and in_parentheses(text) for text in texts):
        return False
    lists = [[measure(item) for item in items(text)] for text in texts]
    if not all(lists) or any(in_braces) or None in (*lists[0], *lists[1]):
        return True
    values = [sorted(found.value for found in each if found is not None) for each in lists]
    repeated = any(len(set(each)) < len(each) for each in values)
    return values[0] == values[1] if repeated else len(values[0]) == len(values[1])


def _same_sets(gold: str, reading: str) -> bool:
    """Whether both are conditions with the same solutions, such as "x < 1 or x > 2" or {x | x > 2}."""
    wanted = _conditions(gold)
    given = _conditions(reading) if wanted else []
    if not given or wanted == given:  # sympy takes long to solve them
        return given != []
    sets = [_union(each) for each in (wanted, given)]
    return None not in sets and (sets[0] == sets[1] or sets[0].symmetric_difference(sets[1]).is_empty is True)


def _conditions(text: str) -> list[Any]:
    """The alternatives (relations and sets) of a condition; empty for any other text."""
    s = bare(text)
    builder = _BUILDER.fullmatch(s)
    if builder is None and not _CONDITION.search(s):
        return []
    found = []
    for part in _OR.split(builder["condition"] if builder else s):
        parsed = _parsed(part)
        one = expressions.set_of(parsed[0]) if parsed and isinstance(parsed[0], Basic) else None
        if not isinstance(one, Relational | And | Set):
            return []
        found.append(one)
    return found


def _union(conditions: list[Any]) -> Any:
    """The union of the conditions' solutions; None if sympy cannot solve them."""
    try:
        sets = [one if isinstance(one, Set) else one.as_set() for one in conditions]
    except expressions.NO_VALUE:  # of several variables, or of a kind that sympy does not solve
        return None
    return Union(*sets) if all(isinstance(one, Set) for one in sets) else None


def _in_bases(text: str) -> set[tuple[str, str]]:
    """(digits, base) of the numbers that are not in base ten; in an equation only those on its right side."""
    found = _BASE.findall(unwrapped(answer_text.plain(text)).rpartition("=")[2])
    pairs = {(digits.lstrip("0"), _BASES.get(one or other, one or other)) for digits, one, other in found}
    return {pair for pair in pairs if pair[1] != "10"}


# ---- Mathematics ---------------------------------------------------------------------------------------------------


def _parsed(text: str, *, prose: bool = False) -> list[Any]:
    """Parses with math-verify. Its own time limits are off, here and below: the worker's limit covers the score."""
    kinds = [_LATEX, ExprExtractionConfig()] if prose else [_LATEX]
    return parse(text if prose else f"\\boxed{{{text}}}", kinds, fallback_mode="no_fallback", parsing_timeout=None)


def _same(wanted: list[Any], given: list[Any]) -> bool:
    """Whether math-verify finds the two equal, unless their numeric values disagree with it (expressions.py)."""
    if not wanted or not given:
        return False
    if verify([wanted[0]], [given[0]], allow_set_relation_comp=True, timeout_seconds=None):
        return not expressions.denied(wanted[0], given[0])
    return expressions.identical(wanted[0], given[0])


def _found_in_prose(reading: str, gold: str, number: Measure | None) -> bool:
    """Whether the (last) mathematics in a sentence is the gold answer; a sentence with "or" gives no single answer."""
    line = unwrapped(answer_text.plain(reading))
    if line.endswith("?") or _OPEN.search(line) or _CHANGED.search(line) or _names_several(line):
        return False
    variable = re.search(r"(?<![a-zA-Z])([a-zA-Z])\s*=\s*[^=a-zA-Z]*[.,;]?$", line)
    if number is not None and number.variable and variable and variable[1] != number.variable:
        return False
    return _same(_parsed(_without_units(gold, number)), _parsed(reading.replace("\\$", ""), prose=True))


def _names_several(line: str) -> bool:
    """Whether `line` contains several separate numbers and the last is not the result of a calculation."""
    parts = re.split(r"[^\W\d_]{2,}|[,;]\s|[.!?]\s", re.sub(r"\\[a-zA-Z]+", " ", line))
    counted = [part for part in parts if re.search(r"\d", part)]
    return len(counted) > 1 and re.search(r"\d.*=.*\d", counted[-1]) is None

"""Compares two expressions by numeric values: corrects math-verify, which errs in both directions.

math-verify treats 2^-99 and 2^-98 as equal, since it chops small parts to zero, and also any two equations without a
solution; and it does not recognize sqrt(1/n) as 1/sqrt(n).

    denied(a, b)       math-verify calls them equal, but a value differs, two equations do (_differ), or only one is a
                       list of numbers (_interval_and_list)
    identical(a, b)    equal to 60 digits wherever both are real

Variables get values that depend only on their names. If an expression has no value, such as a text, or sympy gives up,
both functions are False: the result of math-verify stands.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

DIGITS = 200  # maximal precision of a difference
EQUAL = 1e-60  # tolerance relative to the largest term
ROUNDED = 1e-3  # the tolerance if a decimal number is involved: six decimals of a small number have few digits
POINTS = (1, -1, 2, -2, 3)  # salt of the variables' values; its sign is theirs
# sympy raises these for expressions that it cannot compute, which then have no value.
NO_VALUE = (ValueError, TypeError, AttributeError, NotImplementedError, ArithmeticError)


def denied(gold: Any, given: Any) -> bool:
    """Whether numeric values contradict math-verify, which calls the two equal."""
    try:
        return _denied(gold, given)
    except NO_VALUE:
        return False


def _denied(gold: Any, given: Any) -> bool:
    if (
        gold == given
        or not isinstance(gold, sympy.Basic | sympy.MatrixBase)
        or not isinstance(given, sympy.Basic | sympy.MatrixBase)
    ):
        return False
    if _interval_and_list(gold, given) or _interval_and_list(given, gold):
        return True
    gold, given = set_of(gold), set_of(given)
    relations, others = _relations(gold), _relations(given)
    if relations and others:
        return len(relations) != len(others) or any(map(_differ, relations, others))
    if others and isinstance(others[-1], sympy.Eq):  # as in math-verify, x = 5 equals 5
        return denied(gold, others[-1].rhs)
    if relations and isinstance(relations[-1], sympy.Eq):
        return denied(relations[-1].rhs, given)
    if isinstance(gold, sympy.Interval) and isinstance(given, sympy.Interval):
        return denied(gold.start, given.start) or denied(gold.end, given.end)
    if isinstance(gold, sympy.MatrixBase) and isinstance(given, sympy.MatrixBase):
        return gold.shape != given.shape or any(map(denied, gold, given))
    if isinstance(gold, sympy.Tuple | sympy.FiniteSet) and isinstance(given, sympy.Tuple | sympy.FiniteSet):
        if isinstance(gold, sympy.Tuple) and isinstance(given, sympy.Tuple):
            return len(gold) != len(given) or any(map(denied, gold.args, given.args))
        return not all(any(not denied(one, other) for other in given.args) for one in gold.args)
    if any(isinstance(one, sympy.Symbol) and len(str(one)) > 1 for one in (gold, given)):
        return False  # a word, which may be a product of letters on the other side
    return not (all(_at_points(gold, given, POINTS[:1])) and all(_at_points(gold, given, POINTS[1:2], real=True)))


def _interval_and_list(one: Any, other: Any) -> bool:
    """Whether they are an interval and a list of numbers: math-verify takes 1 < x < 3 for the interval (1, 3), and that
    for a pair of numbers."""
    if not isinstance(other, sympy.FiniteSet | sympy.Tuple) or other.has(sympy.Lt, sympy.Gt):
        return False
    if isinstance(one, sympy.Interval):
        return bool(other.has(sympy.Eq))
    if isinstance(one, sympy.Eq):  # x in (1, 3), but not (x, y) = (1, 3)
        return isinstance(one.lhs, sympy.Symbol) and isinstance(one.rhs, sympy.Interval)
    return isinstance(one, Relational | sympy.And) and one.has(sympy.Lt, sympy.Gt)


def identical(gold: Any, given: Any) -> bool:
    if (
        not isinstance(gold, sympy.Basic)
        or not isinstance(given, sympy.Basic)
        or gold.atoms(sympy.Float) | given.atoms(sympy.Float)
    ):
        return False
    if isinstance(gold, Relational | sympy.And) or isinstance(given, Relational | sympy.And):
        return False
    seen, variables = 0, bool(_variables(gold, given))
    try:
        for equal in _at_points(gold, given, POINTS if variables else POINTS[:1], real=variables):
            if not equal:
                return False
            seen += 1
    except NO_VALUE:
        return False
    return seen >= (2 if variables else 1)


def set_of(expression: Any) -> Any:
    """The right side of an equation between x and a set; any other expression unchanged."""
    return expression.rhs if isinstance(expression, sympy.Eq) and isinstance(expression.rhs, sympy.Set) else expression


def _relations(expression: Any) -> list[Any]:
    """The relations of an expression or of a chain, in order; x = 1 + 1 = 2 becomes x = 2."""
    if isinstance(expression, Relational):
        return [expression]
    parts = getattr(expression, "_unsorted_args", expression.args) if isinstance(expression, sympy.And) else ()
    if parts and all(isinstance(part, sympy.Eq) for part in parts):
        return [sympy.Eq(parts[0].lhs, parts[-1].rhs, evaluate=False)]
    return list(parts) if all(isinstance(part, Relational) for part in parts) else []


def _differ(gold: Any, given: Any) -> bool:
    """Whether two equations differ: neither lhs - rhs, up to a factor, nor their solutions agree.

    False for inequalities: math-verify compares these well.
    """
    if gold == given or not isinstance(gold, sympy.Eq) or not isinstance(given, sympy.Eq):
        return False
    ours, theirs = gold.lhs - gold.rhs, given.lhs - given.rhs
    ratios = []
    for salt in POINTS[:2]:
        values = [_value(side, salt) for side in (ours, theirs)]
        if None in values:
            return False
        ratios.append((values[0], values[1]))
    (a, b), (c, d) = ratios
    cross = sympy.Add(a * d, -b * c, evaluate=False)
    if _small(cross, [a * d, b * c]) and (_variables(gold, given) or _small(sympy.Add(a, -b, evaluate=False), [a, b])):
        return False
    solved = [_solutions(equation) for equation in (gold, given)]
    return (
        not solved[0]
        or [set(one) for one in solved[0]] != [set(one) for one in solved[1]]
        or any(denied(one[name], other[name]) for one, other in zip(*solved) for name in one)
    )


def _solutions(equation: Any) -> list[dict[Any, Any]]:
    """The solutions of an equation, in a fixed order; f(2) and dy/dx are unknowns too."""
    unknown = {atom: sympy.Symbol(str(atom)) for atom in _opaque(equation)}
    plain = equation.xreplace(unknown)
    return list(sympy.ordered(sympy.solve(plain, *sympy.ordered(plain.free_symbols), dict=True)))


def _opaque(expression: Any) -> set[Any]:
    """f(2), dy/dx, the integral of f: each is treated as a separate variable."""
    return {
        atom
        for atom in expression.atoms(AppliedUndef, sympy.Derivative, sympy.Integral)
        if atom.has(AppliedUndef) or (isinstance(atom, sympy.Derivative) and not atom.expr.has(*atom.variables))
    }


def _variables(*expressions: Any) -> set[Any]:
    found = {atom for one in expressions for atom in one.free_symbols | _opaque(one)}
    return set() if {str(atom) for atom in found} == {"i"} else found  # i alone is the imaginary unit


def _at_points(gold: Any, given: Any, salts: tuple[int, ...], *, real: bool = False) -> Iterator[bool]:
    """Yields, for each point where both have a value, whether the values are equal. real: only where both are real."""
    inexact = bool(gold.atoms(sympy.Float) | given.atoms(sympy.Float))
    for salt in salts:
        values = [_value(one, salt) for one in (gold, given)]
        if None in values or (real and not all(value.is_real for value in values)):
            continue
        difference = sympy.Add(values[0], -values[1], evaluate=False)
        if all(value.is_Rational for value in values):
            yield values[0] == values[1]
            continue
        terms = [term for value in values for term in sympy.Add.make_args(value)]
        yield _small(difference, terms, ROUNDED if inexact else EQUAL)


def _value(expression: Any, salt: int) -> Any:
    """The value of an expression, with each variable replaced by its own number; None if that is not a number."""
    try:
        points = {atom: _point(str(atom), salt) for atom in _variables(expression)}
        opaque = {atom: value for atom, value in points.items() if not isinstance(atom, sympy.Symbol)}
        imaginary = {atom: sympy.I for atom in expression.free_symbols if str(atom) == "i" and not points}
        value = expression.xreplace(opaque).xreplace({**points, **imaginary}).doit()
        return value if value.is_number and value.is_finite is not False else None
    except NO_VALUE:
        return None


def _point(name: str, salt: int) -> sympy.Rational:
    return sympy.Rational(503 + zlib.crc32(f"{name} {salt}".encode()) % 997, 499) * (1 if salt > 0 else -1)


def _small(difference: Any, terms: list[Any], limit: float = EQUAL) -> bool:
    """Whether `difference` is negligible against the largest term. Raises ValueError if one cannot be computed."""
    sizes = [sympy.Abs(number.evalf(15, maxn=DIGITS)) for number in (difference, *terms)]
    if not all(size.is_Number and size.is_finite for size in sizes):
        raise ValueError(f"no value: {sizes}")
    return bool(sizes[0] <= limit * max(sizes[1:]))

"""Whether two pieces of mathematics are equal, by values: math-verify's word is not enough in either direction.

It takes 2^-99 for 2^-98, since small parts are chopped to zero, and any two equations without a solution for the same;
and it does not find 1/sqrt(n) in sqrt(1/n).

    denied(a, b)       what math-verify calls equal is not: a value differs, or no side of a relation is the other's
    identical(a, b)    equal wherever both are real, to 60 digits

Values are taken at points that depend on names alone. What has no value there, such as a text, is neither, and so is
what sympy gives up on: math-verify's word holds.
"""

import zlib
from collections.abc import Iterator
from typing import Any

from sympy import (
    Abs,
    Add,
    And,
    Basic,
    Derivative,
    Eq,
    Float,
    I,
    Integral,
    Interval,
    MatrixBase,
    Rational,
    Set,
    Symbol,
    Tuple,
    ordered,
    solve,
)
from sympy import FiniteSet as SympyFiniteSet
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

DIGITS = 200  # that a difference is computed to at most
EQUAL = 1e-60  # of the largest term: above it a difference is one
ROUNDED = 1e-3  # the same where a decimal number is among them, as six decimals of a small number have few digits
POINTS = (1, -1, 2, -2, 3)  # a salt of the values, and their sign
# Raised by sympy amid what it cannot compute: there is no value then, and nothing is said.
NO_VALUE = (ValueError, TypeError, AttributeError, NotImplementedError, ArithmeticError)


def denied(gold: Any, given: Any) -> bool:
    """Of two that math-verify calls equal."""
    try:
        return _denied(gold, given)
    except NO_VALUE:
        return False


def _denied(gold: Any, given: Any) -> bool:
    if gold == given or not isinstance(gold, Basic | MatrixBase) or not isinstance(given, Basic | MatrixBase):
        return False
    gold, given = set_of(gold), set_of(given)
    relations, others = _relations(gold), _relations(given)
    if relations and others:
        return len(relations) != len(others) or any(map(_differ, relations, others))
    if others and isinstance(others[-1], Eq):  # as math-verify has it: x = 5 is 5
        return denied(gold, others[-1].rhs)
    if relations and isinstance(relations[-1], Eq):
        return denied(relations[-1].rhs, given)
    if isinstance(gold, Interval) and isinstance(given, Interval):
        return denied(gold.start, given.start) or denied(gold.end, given.end)
    if isinstance(gold, MatrixBase) and isinstance(given, MatrixBase):
        return gold.shape != given.shape or any(map(denied, gold, given))
    if isinstance(gold, Tuple | SympyFiniteSet) and isinstance(given, Tuple | SympyFiniteSet):
        if isinstance(gold, Tuple) and isinstance(given, Tuple):
            return len(gold) != len(given) or any(map(denied, gold.args, given.args))
        return not all(any(not denied(one, other) for other in given.args) for one in gold.args)
    if any(isinstance(one, Symbol) and len(str(one)) > 1 for one in (gold, given)):
        return False  # a word, which may be a product of letters on the other side
    return not (all(_at_points(gold, given, POINTS[:1])) and all(_at_points(gold, given, POINTS[1:2], real=True)))


def identical(gold: Any, given: Any) -> bool:
    if not isinstance(gold, Basic) or not isinstance(given, Basic) or gold.atoms(Float) | given.atoms(Float):
        return False
    if isinstance(gold, Relational | And) or isinstance(given, Relational | And):
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
    """The set in which x is said to be; anything else as it is."""
    return expression.rhs if isinstance(expression, Eq) and isinstance(expression.rhs, Set) else expression


def _relations(expression: Any) -> list[Any]:
    """A relation, or those of a chain, in their order; of x = 1 + 1 = 2 it is x = 2."""
    if isinstance(expression, Relational):
        return [expression]
    parts = getattr(expression, "_unsorted_args", expression.args) if isinstance(expression, And) else ()
    if parts and all(isinstance(part, Eq) for part in parts):
        return [Eq(parts[0].lhs, parts[-1].rhs, evaluate=False)]
    return list(parts) if all(isinstance(part, Relational) for part in parts) else []


def _differ(gold: Any, given: Any) -> bool:
    """Of two relations: neither sides, nor their difference up to a factor, nor solutions that there are."""
    if gold == given:
        return False
    ours, theirs = gold.lhs - gold.rhs, given.lhs - given.rhs
    if type(gold) is not type(given):
        theirs = -theirs
    ratios = []
    for salt in POINTS[:2]:
        values = [_value(side, salt) for side in (ours, theirs)]
        if None in values:
            return False
        ratios.append((values[0], values[1]))
    (a, b), (c, d) = ratios
    cross = Add(a * d, -b * c, evaluate=False)
    # The factor is positive, but in an equation.
    same = _small(cross, [a * d, b * c]) and (isinstance(gold, Eq) or (a / b).is_positive is not False)
    if same and (_variables(gold, given) or _small(Add(a, -b, evaluate=False), [a, b])):
        return False
    if not isinstance(gold, Eq) or not isinstance(given, Eq):
        return False
    solved = [_solutions(equation) for equation in (gold, given)]
    return (
        not solved[0]
        or [set(one) for one in solved[0]] != [set(one) for one in solved[1]]
        or any(denied(one[name], other[name]) for one, other in zip(*solved) for name in one)
    )


def _solutions(equation: Any) -> list[dict[Any, Any]]:
    """In one order; f(2) and dy/dx are unknowns as well."""
    unknown = {atom: Symbol(str(atom)) for atom in _opaque(equation)}
    plain = equation.xreplace(unknown)
    return list(ordered(solve(plain, *ordered(plain.free_symbols), dict=True)))


def _opaque(expression: Any) -> set[Any]:
    """f(2), dy/dx, the integral of f: as a variable each, and no two are the same."""
    return {
        atom
        for atom in expression.atoms(AppliedUndef, Derivative, Integral)
        if atom.has(AppliedUndef) or (isinstance(atom, Derivative) and not atom.expr.has(*atom.variables))
    }


def _variables(*expressions: Any) -> set[Any]:
    found = {atom for one in expressions for atom in one.free_symbols | _opaque(one)}
    return set() if {str(atom) for atom in found} == {"i"} else found  # alone it is the imaginary unit


def _at_points(gold: Any, given: Any, salts: tuple[int, ...], *, real: bool = False) -> Iterator[bool]:
    """At each point where both have a value: whether it is the same. real: only where both are real."""
    inexact = bool(gold.atoms(Float) | given.atoms(Float))
    for salt in salts:
        values = [_value(one, salt) for one in (gold, given)]
        if None in values or (real and not all(value.is_real for value in values)):
            continue
        difference = Add(values[0], -values[1], evaluate=False)
        if all(value.is_Rational for value in values):
            yield values[0] == values[1]
            continue
        terms = [term for value in values for term in Add.make_args(value)]
        yield _small(difference, terms, ROUNDED if inexact else EQUAL)


def _value(expression: Any, salt: int) -> Any:
    """With a number for each variable, which is its own; None where that is no number."""
    try:
        points = {atom: _point(str(atom), salt) for atom in _variables(expression)}
        opaque = {atom: value for atom, value in points.items() if not isinstance(atom, Symbol)}
        imaginary = {atom: I for atom in expression.free_symbols if str(atom) == "i" and not points}
        value = expression.xreplace(opaque).xreplace({**points, **imaginary}).doit()
        return value if value.is_number and value.is_finite is not False else None
    except NO_VALUE:
        return None


def _point(name: str, salt: int) -> Rational:
    return Rational(503 + zlib.crc32(f"{name} {salt}".encode()) % 997, 499) * (1 if salt > 0 else -1)


def _small(difference: Any, terms: list[Any], limit: float = EQUAL) -> bool:
    """Whether it is nothing beside the largest term. Raises ValueError where one of them cannot be computed."""
    sizes = [Abs(number.evalf(15, maxn=DIGITS)) for number in (difference, *terms)]
    if not all(size.is_Number and size.is_finite for size in sizes):
        raise ValueError(f"no value: {sizes}")
    return bool(sizes[0] <= limit * max(sizes[1:]))

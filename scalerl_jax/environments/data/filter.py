"""config.environment.filter: a Python expression over the columns of a row, restricted to harmless operations.

    difficulty != "8/8" and level >= 3
    len(problem) < 2000 and meta.source in ("aime", "amc") and column("problem-type", "") != "proof"

Names are columns; a.b is b inside a. Allowed are comparisons, and, or, not, if-else, arithmetic without powers, `in`,
indices and slices, lists, tuples and sets, the functions in FUNCTIONS, and the string methods in METHODS; nothing else.
`column(NAME, OTHERWISE)` reads a column whose name is not an identifier, or that rows may lack.
"""

import ast
from collections.abc import Mapping
from typing import Any

from scalerl_jax.environments.data import columns as columns_lib

FUNCTIONS = {
    **{function.__name__: function for function in (len, int, float, str, bool, abs, round)},
    **{function.__name__: function for function in (min, max, sum, any, all, sorted)},
    "lower": lambda text: str(text).lower(),
    "upper": lambda text: str(text).upper(),
}
METHODS = (
    *("lower", "upper", "strip", "lstrip", "rstrip", "startswith", "endswith", "split", "splitlines", "count", "find"),
    *("replace", "removeprefix", "removesuffix", "isdigit", "isalpha", "isnumeric", "isupper", "islower"),
)
_NODES = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.Compare, ast.IfExp),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Subscript, ast.Slice),
    *(ast.List, ast.Tuple, ast.Set, ast.Constant, ast.Load),
)
_COLUMN, _FUNCTION, _COLUMNS = "column", "function ", "columns of the row"  # a user cannot write the names with spaces


class Filter:
    """A filter expression; an empty one keeps every row.

    Raises ValueError if it is not an expression, or uses anything that is not allowed.
    """

    def __init__(self, expression: str):
        self._given = f"config.environment.filter={expression}"
        self._code = None
        if not expression.strip():
            return
        try:
            tree = ast.parse(expression.strip(), mode="eval")
            tree.body = _checked(tree.body)
            self._code = compile(ast.fix_missing_locations(tree), "<filter>", "eval")
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"{self._given}: is not an expression ({getattr(error, 'msg', None) or error})") from error
        except ValueError as error:
            raise ValueError(f"{self._given}: {error}") from error

    def keeps(self, name: str, columns: Mapping[str, Any]) -> bool:
        """Whether the expression is true for a row. Raises ValueError naming the expression and the row `name`."""
        if self._code is None:
            return True

        def column(wanted: str, *otherwise: Any) -> Any:
            found = columns_lib.find(columns, wanted)
            if found is not columns_lib.MISSING:
                return found
            if not otherwise:
                raise NameError(wanted)
            return otherwise[0]

        names = {_COLUMNS: column, "__builtins__": {}}
        try:
            return bool(eval(self._code, names | _CALLED))
        except NameError as error:
            raise ValueError(
                f"{self._given}: {name} has no column {str(error)!r} ({columns_lib.keys(columns)}); "
                f'column("{error}", OTHERWISE) is for columns that rows may lack'
            ) from error
        except Exception as error:  # of the user's expression, on any value
            raise ValueError(f"{self._given}: {name}: {type(error).__name__}: {error}") from error


_CALLED = {_FUNCTION + name: function for name, function in FUNCTIONS.items()}


def _checked(node: ast.expr) -> ast.expr:
    """The expression with names replaced by lookups of columns; raises ValueError for anything that is not allowed."""
    dotted = _dotted(node)
    if dotted is not None:
        return _call(_COLUMNS, [ast.Constant(dotted)])
    if isinstance(node, ast.Call):
        if node.keywords:
            raise ValueError(f"{ast.unparse(node)}: arguments have no names here")
        arguments = [_checked(argument) for argument in node.args]
        if isinstance(node.func, ast.Name) and node.func.id == _COLUMN:
            if not 1 <= len(arguments) <= 2 or not isinstance(node.args[0], ast.Constant):
                raise ValueError(f"{ast.unparse(node)}: is not column(NAME) or column(NAME, OTHERWISE)")
            return _call(_COLUMNS, arguments)
        if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            return _call(_FUNCTION + node.func.id, arguments)
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            method = ast.Attribute(_checked(node.func.value), node.func.attr, ast.Load())
            return ast.Call(method, arguments, [])
        known = ", ".join(sorted((*FUNCTIONS, _COLUMN)))
        raise ValueError(f"{ast.unparse(node.func)}(): is not one of {known}, nor a method {', '.join(METHODS)}")
    if not isinstance(node, _NODES):
        raise ValueError(f"{ast.unparse(node)}: {type(node).__name__} has no place in a filter")
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            setattr(node, field, _checked(value))
        elif isinstance(value, list):
            setattr(node, field, [_checked(item) if isinstance(item, ast.expr) else item for item in value])
        elif isinstance(value, ast.AST) and not isinstance(value, _NODES):
            raise ValueError(f"{ast.unparse(node)}: {type(value).__name__} has no place in a filter")
    return node


def _dotted(node: ast.expr) -> str | None:
    """The dotted column name, if the node is one; else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    return None


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), arguments, [])

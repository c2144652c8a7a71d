"""Converts the unit tests of a code problem from the layouts of known data sets to the format that scores use.

    DeepCoder        tests: JSON (or Python's own notation) of a list of {"input", "output", "type" or "testtype",
                     "fn_name" or "metadata": {"func_name"}}, or of one {"inputs", "outputs", "fn_name"}
    LiveCodeBench    public_test_cases: JSON of a list of {"input", "output", "testtype"}; private_test_cases: the same,
                     or base64 of zlib of a pickled JSON text; metadata: JSON with func_name
    TACO, APPS       input_output: JSON of {"inputs", "outputs", "fn_name"}
    CodeContests     public_tests, private_tests, generated_tests: {"input": [...], "output": [...]} each
    HumanEval        test: `def check(candidate): assert ...`; entry_point, prompt
    MBPP             test_list: asserts, after test_setup_code or test_imports
    KodCode          test: functions test_...() that import from `solution`
    Skywork-OR1      one of {"inputs", "outputs", "fn_name"}, {"assert_case": asserts} and {"import_prefix",
                     "test_code": as HumanEval's, "entry_point"}

    for scores       {"asserts": true, ...}: code_asserts.py
                     {"function": "", "cases": [[input, [output]], ...]}                 a script: texts
                     {"function": name, "cases": [[arguments, [value, ...]], ...]}       a call: JSON values

If a function's tests are texts, an input has one JSON argument per line, and an output is JSON. If they are values, an
output is often the expected value in a list of one: then either is accepted, as by these data sets' own judge. A text
given as a list is its lines.

A pickle may only contain a text: one that names a class or a function is rejected, and none of it is executed.
"""

import ast
import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.environments import code_asserts
from scalerl_jax.environments.data.columns import MISSING, find

MOST_BYTES = 2**28  # of one row's tests, unpacked
PUBLIC, PRIVATE = "public_test_cases", "private_test_cases"
CONTESTS = ("public_tests", "private_tests", "generated_tests")
COLUMNS = ("input_output", PUBLIC, PRIVATE, *CONTESTS, "test", "test_list")  # besides the one that the config names
# Opcodes of pickle, in all its protocols.
_TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_AROUND_TEXTS = ("PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP")
_MOST_OPCODES = 16
_STDIN_TYPES = ("stdin_stdout", "stdin", "")
_CALL_TYPES = ("function_call", "functional")

Tests = dict[str, Any]


def find_tests(columns: Mapping[str, Any], column: str) -> Tests:
    """The tests of a row, from `column` or else from COLUMNS. Raises ValueError, one line without the row's name."""
    if (found := find(columns, column)) not in (MISSING, None):
        return read_tests(found, column, _function_of(columns.get("metadata")))
    if columns.get("input_output") is not None:
        return read_tests(columns["input_output"], "input_output", _function_of(columns.get("metadata")))
    if columns.get("test") is not None or columns.get("test_list") is not None:
        return _asserts(columns)
    if contests := [_parsed(columns[name], name) for name in CONTESTS if columns.get(name) is not None]:
        if not all(isinstance(part, Mapping) and {"input", "output"} <= part.keys() for part in contests):
            raise ValueError(f"{CONTESTS[0]!r} is no object with lists 'input' and 'output'")
        both = {f"{side}s": [text for part in contests for text in part[side]] for side in ("input", "output")}
        return read_tests(both, ", ".join(CONTESTS))
    if columns.get(PUBLIC) is None and columns.get(PRIVATE) is None:
        found = ", ".join(list(columns)[:12]) or "none"
        raise ValueError(f"there are no unit tests (keys: {found}; wanted: {column}, {' or '.join(COLUMNS)})")
    cases: list[Any] = []
    for name in (PUBLIC, PRIVATE):
        if columns.get(name) is not None:
            part = _private(columns[name]) if name == PRIVATE else _parsed(columns[name], name)
            if not isinstance(part, list):
                raise ValueError(f"{name!r} is no list of tests")
            cases += part
    return read_tests(cases, f"{PUBLIC} and {PRIVATE}", _function_of(columns.get("metadata")))


def _asserts(columns: Mapping[str, Any]) -> Tests:
    """The tests of HumanEval, MBPP and KodCode."""
    if columns.get("test_list") is not None:
        tests, setup = _parsed(columns["test_list"], "test_list"), columns.get("test_setup_code") or ""
        if columns.get("test_imports"):
            setup = "\n".join([*_parsed(columns["test_imports"], "test_imports"), setup])
        if not _is_list(tests) or not tests or not all(isinstance(test, str) for test in tests):
            raise ValueError("'test_list' is no list of texts")
        return code_asserts.read(list(tests), setup=setup, where="'test_list'")
    test, called = columns["test"], columns.get("entry_point")
    if not isinstance(test, str):
        return read_tests(test, "test")
    if not called:
        return code_asserts.read([test], where="'test'")
    stub = columns.get("prompt")
    stub = f"{stub.rstrip()}\n    pass" if isinstance(stub, str) and f"def {called}" in stub else ""
    return code_asserts.read(code_asserts.of_check(test, called, "'test'"), stub=stub, where="'test'")


def read_tests(value: Any, name: str, function: str = "") -> Tests:
    """Reads any of the layouts above, or its JSON text. function: the default name if the tests have none.

    Raises ValueError.
    """
    value = _parsed(value, name)
    if isinstance(value, Mapping) and "assert_case" in value:
        value = value["assert_case"]
    if isinstance(value, Mapping) and "test_code" in value:
        code, called = str(value["test_code"]), value.get("entry_point")
        tests = code_asserts.of_check(code, str(called), repr(name)) if called else [code]
        return code_asserts.read(tests, setup=str(value.get("import_prefix") or ""), where=repr(name))
    if _is_list(value) and value and all(isinstance(test, str) for test in value):
        return code_asserts.read(list(value), where=repr(name))
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs", 0), value.get("outputs", 0)
        if not _is_list(inputs) or not _is_list(outputs):
            raise ValueError(f"{name!r} has no lists 'inputs' and 'outputs' (keys: {', '.join(map(str, value))})")
        if len(inputs) != len(outputs):
            raise ValueError(f"{name!r} has {len(inputs)} inputs and {len(outputs)} outputs")
        functions = {value.get("fn_name") or function}
        pairs = list(zip(inputs, outputs))
    elif _is_list(value):
        functions, pairs = set(), []
        for number, test in enumerate(value, 1):
            if not isinstance(test, Mapping) or "input" not in test or "output" not in test:
                raise ValueError(f"test {number} of {name!r} is not an object with 'input' and 'output'")
            functions.add(_function(test, f"test {number} of {name!r}", function))
            pairs.append((test["input"], test["output"]))
    else:
        raise ValueError(f"{name!r} is neither a list of tests nor an object with 'inputs' and 'outputs'")
    if not pairs:
        raise ValueError(f"{name!r} has no tests")
    if len(functions) > 1:
        raise ValueError(f"{name!r} tests several functions: {', '.join(sorted(map(str, functions)))}")
    called = functions.pop()
    if not isinstance(called, str) or (called and not called.isidentifier()):
        raise ValueError(f"{name!r}: {called!r} is no function's name")
    cases = []
    for number, (given, wanted) in enumerate(pairs, 1):
        where = f"test {number} of {name!r}"
        cases.append(_call(given, wanted, where) if called else [_text(given, where), [_text(wanted, where)]])
    return {"function": called, "cases": cases}


def longest(tests: Tests, count: int) -> Tests:
    """The `count` tests with the longest inputs, in their order; 0: all."""
    cases = tests["cases"]
    if not 0 < count < len(cases):
        return tests
    by_length = sorted(range(len(cases)), key=lambda i: (-len(_length_text(cases[i][0])), i))
    return {**tests, "cases": [cases[i] for i in sorted(by_length[:count])]}


def _length_text(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _function(test: Mapping[str, Any], where: str, other: str) -> str:
    """The function that a test calls; "" if it uses standard input and output."""
    kind = test.get("testtype") or test.get("type") or ""
    if kind not in (*_STDIN_TYPES, *_CALL_TYPES):
        raise ValueError(f"{where}: its type is {kind!r}, wanted: {', '.join((*_STDIN_TYPES[:2], *_CALL_TYPES))}")
    named = test.get("fn_name") or _function_of(test.get("metadata")) or other
    if kind in _CALL_TYPES and not named:
        raise ValueError(f"{where} calls a function, and does not say which: no fn_name, no func_name in metadata")
    return named if kind in _CALL_TYPES or (not kind and test.get("fn_name")) else ""


def _function_of(metadata: Any) -> str:
    """The function's name in a metadata column; "" if there is none."""
    if isinstance(metadata, str) and metadata.strip():
        metadata = _parsed(metadata, "metadata")
    if isinstance(metadata, Mapping):
        return metadata.get("func_name") or metadata.get("fn_name") or ""
    return ""


def _parsed(value: Any, name: str) -> Any:
    """The value of a text that is JSON or a Python literal; other values unchanged."""
    if not isinstance(value, str):
        return value
    if len(value) > MOST_BYTES:
        raise ValueError(f"{name!r} has more than {MOST_BYTES} characters")
    try:
        return json.loads(value)
    except RecursionError:
        raise ValueError(f"{name!r} is nested too deeply") from None
    except ValueError as error:
        problem = str(error)
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{name!r} is not JSON ({problem})") from None


def _private(value: Any) -> Any:
    """Unpacks tests, which are packed so that they are not read by accident."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(value, validate=True), MOST_BYTES)
        if not unpacker.eof:
            raise ValueError(f"it is cut, or has more than {MOST_BYTES} bytes")
        text = _unpickled(data)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"{PRIVATE!r} is neither JSON nor base64 of zlib of a pickled text ({error})") from None
    return _parsed(text, PRIVATE)


def _unpickled(data: bytes) -> str:
    """The text in a pickle, from its opcodes: pickle itself may allocate far more than its input. Raises ValueError."""
    texts: list[str] = []
    for number, (opcode, value, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in (*_TEXTS, *_AROUND_TEXTS) or number > _MOST_OPCODES:
            raise ValueError(f"{opcode.name} is no part of a pickled text")
        if opcode.name in _TEXTS:
            texts.append(str(value))
    if len(texts) != 1:
        raise ValueError(f"{len(texts)} texts are pickled")
    return texts[0]


def _text(value: Any, where: str) -> str:
    if _is_list(value) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: its input or output is {type(value).__name__}, wanted: a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: its input or output has half of a surrogate pair") from None
    return value


def _call(given: Any, wanted: Any, where: str) -> list[Any]:
    """[arguments, accepted values]"""
    if isinstance(given, str):
        try:
            arguments = [json.loads(line) for line in given.strip().split("\n")] if given.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: a line of its input is no JSON ({error})") from None
    else:
        arguments = list(given) if _is_list(given) else [given]
    right = [wanted]
    if isinstance(wanted, str) and isinstance(given, str):
        try:
            right = [json.loads(wanted)]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: its output is no JSON ({error})") from None
    elif _is_list(wanted) and len(wanted) == 1:
        right.append(wanted[0])
    try:
        return json.loads(json.dumps([arguments, right]))  # tuples become lists
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: its input or output is no value of JSON ({error})") from None

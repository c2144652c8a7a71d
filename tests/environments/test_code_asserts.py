"""Tests that are Python: what they are read from, and that no program can answer for them. About 5 s of CPU time."""

import dataclasses
import json

import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments import code_asserts
from scalerl_jax.environments.code import make
from scalerl_jax.environments.code_judge import judge
from scalerl_jax.environments.code_tests import find_tests
from scalerl_jax.environments.data.layouts import LAYOUTS
from tests.environments.data.published import PUBLISHED
from tests.environments.sandboxes import SMALL, needs_bubblewrap

TWICE = """
def double(x):
    return 2 * x

if __name__ == "__main__":
    print(double(int(input())))
"""


CHECK = "def check(candidate):\n    assert candidate([1]) == 7 and len('a') == 1\n"


def verdict(program, *snippets, limits=SMALL, **options):
    return judge(program, code_asserts.read(snippets, where="here", **options), limits)


@needs_bubblewrap
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.kind == "code"])
def test_a_published_row_takes_a_right_program_and_no_other(tmp_path, name):
    columns = PUBLISHED[name][0]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(columns))
    config = Config()
    config.environment = dataclasses.replace(
        config.environment, name="code", train=f"{name}:{path}", sandbox=dataclasses.replace(SMALL)
    )
    environment = make(config)
    (row,) = environment.rows("train")
    assert environment.score(row, f"```python{TWICE}```").correct
    wrong = environment.score(row, f"```python{TWICE.replace('2', '3')}```")
    assert not wrong.correct and "wrong" in wrong.why


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): return x[::-1]", "assert f((1, 2)) == (2, 1)\nassert f([1, [2]]) == [[2], 1]"),
        ("def f(x): return {1: x, 'a': {2, 3}}", "assert f(None) == {1: None, 'a': {3, 2}}"),
        ("def f(x): x.sort()", "x = [3, 1]\nassert f(x) is None\nassert x == [1, 3]"),
        ("def f(n): return (i * i for i in range(n))", "assert list(f(3)) == [0, 1, 4]"),
        ("def f(a, *, b=1): return a - b", "assert f(3, b=2) == 1 and f(a=3) == 2"),
        ("def f(): return [1j, b'x', float('inf'), 10**400, True]",
         "assert f() == [1j, b'x', float('inf'), 10**400, 1]"),
        ("def f(x): return 1 / x",
         "try:\n    f(0)\n    assert False\nexcept ZeroDivisionError as e:\n    assert 'zero' in str(e)"),
        ("def f(x):\n    raise Odd\nclass Odd(Exception): pass",
         "import pytest\nwith pytest.raises(Exception):\n    f(1)"),
        ("def f(): return [0.1 + 0.2]", "import pytest\nassert f() == pytest.approx([0.3])"),
        ("import collections\ndef f(x): return collections.Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("class Solution:\n    def f(self, x): return x + g(x)\ndef g(x): return 1", "assert f(2) == 3 and g(0) == 1"),
        ("def f(x): return sorted(x)", "import random\nfor n in range(20):\n"
         "    x = [random.random() for _ in range(n)]\n    assert f(x) == sorted(x)"),
    ],
)  # fmt: skip
def test_what_functions_give_is_what_the_test_sees(program, test):
    assert verdict(program, test).kind == "ok"


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "kind", "why"),
    [
        (
            "class All:\n    def __eq__(self, other): return True\ndef f(x): return All()",
            "wrong",
            "All is no plain value",
        ),
        (
            "class All(int):\n    def __eq__(self, other): return True\ndef f(x): return All(3)",
            "wrong",
            "AssertionError",
        ),
        ("import sys\nsys.exit(0)", "crashed", "it ended without an answer"),
        ("import os\nos._exit(0)", "crashed", "it ended without an answer"),
        ("def f(x):\n    import os\n    os.write(3, b'{\"passed\": true}')\n    os._exit(0)", "wrong", ""),
        ("import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\ndef f(x): return 3", "wrong", ""),
        ("def f(x):\n    raise AssertionError", "wrong", "AssertionError"),
        ("def f(x):\n    raise SystemExit", "crashed", ""),
        ("def f(x):\n    import solution", "wrong", "No module named 'solution'"),
        ("def f(x) return 1", "crashed", "SyntaxError"),
        ("def g(x): return 4", "crashed", "KeyError: 'f'"),
        ("def f(x):\n    while True: pass", "timeout", ""),
        (
            "class exec(Exception): pass\ndef f(x):\n"
            "    raise exec('import os; os.write(3, b\\'{\"passed\": true}\\'); os._exit(0)')",
            "wrong",
            "exec: import os",
        ),
    ],
)
def test_a_program_answers_for_itself_alone(program, kind, why):
    limits = dataclasses.replace(SMALL, seconds=0.5) if kind == "timeout" else SMALL
    found = verdict(program, "def check(candidate):\n    assert candidate(2) == 4\ncheck(f)", limits=limits)
    assert (found.kind, found.passed, found.tests) == (kind, 0, 1) and why in found.why


@needs_bubblewrap
def test_a_test_ends():
    found = verdict("def f(): return 0", "while True:\n    f()", limits=dataclasses.replace(SMALL, all_seconds=1.0))
    assert found.kind in ("timeout", "wrong")
    found = verdict("def f(): return 0", "assert f() == 0", "assert f() == 1", "assert f() == 0")
    assert (found.kind, found.passed, found.tests) == ("wrong", 1, 3)
    assert found.why == "test 2 of 3: wrong: AssertionError at assert f() == 1"


@needs_bubblewrap
def test_tests_of_which_none_calls_the_program_are_passed_by_none():
    def check(body):
        return f"def check(candidate):\n    {body}\ncheck(f)"

    found = verdict("def f(): return 0", check("pass"), check("assert True"))
    assert (found.kind, found.passed) == ("wrong", 0) and found.why == "none of its tests calls the program"
    assert verdict("def f(): return 0", check("assert True"), check("assert candidate() == 0")).kind == "ok"


@needs_bubblewrap
def test_what_the_prompt_gives_need_not_be_said_again():
    stub = "from math import pi\n\ndef area(r):\n    return pi * r * r\n\ndef f(r: float):\n    pass"
    for before in ("", '"""The area."""\nfrom __future__ import annotations\n'):
        program = f"{before}def f(r: Any): return 2 * area(r)"
        assert verdict(program, "assert round(f(1), 2) == 6.28", stub=stub).kind == "ok"


@needs_bubblewrap
def test_a_program_may_name_its_variables_as_it_likes():
    names = "list, str, isinstance, TypeError, hasattr, dict, getattr, exec, globals, type = [1, 2], 'a', *range(8)"
    assert verdict(f"{names}\ndef f(x): return {{1: [x]}}, type", "assert f((1, 2)) == ({1: [(1, 2)]}, 7)").kind == "ok"


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def sum(a, b): return a // b", ["assert sum(10, 15) == 0", "assert sum(15, 10) == 1"]),
        ("def sum(a, b): return [a // b]", ["x = [15, 10]\nassert set(sum(*x)) == set([1])"]),
        ("def max(x): return 7", [f"{CHECK}check(max)"]),
        ("def f(f): return [7]\ndef sum(x): return 0", ["assert sum(f(f=1)) == 7"]),
        ("def f(x): return 7\ndef len(x): return 0", ["from solution import f\nassert f(1) + len('a') == 8"]),
    ],
)  # fmt: skip
def test_a_function_named_like_a_builtin_is_the_programs_if_tests_call_no_other(program, tests):
    assert verdict(program, *tests).kind == "ok"
    assert verdict("def g(x): return x", *tests).kind == "crashed"


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"test": "def check(candidate): assert candidate(1", "entry_point": "f"}, "'test' is no Python: '\\(' was"),
        ({"test": "assert f(1)", "entry_point": "f"}, "'test' defines no function check"),
        ({"test": "import numpy as np\ndef test_a(): assert f(1)"}, "test 1 of 'test' imports numpy: programs and"),
        ({"test": "import pytest\n@pytest.mark.skip\ndef test_a(): pass"}, r"uses pytest\.mark: of pytest there are"),
        ({"test": "from solution import Bank\ndef test_a(): Bank()"}, "is of a class, Bank: only what functions give"),
        ({"test": CHECK}, r"test 1 of 'test' tests nothing: .* \(check\(candidate\) needs the column entry_point\)"),
        ({"tests": {"test_code": CHECK}}, r"test 1 of 'tests' tests nothing: .* needs the column entry_point\)"),
        ({"test": "def test(): assert f(1)"}, "test 1 of 'test' tests nothing: "),
        ({"test": "async def test_a(): assert f(1)"}, "test 1 of 'test' has async def test_a, which nothing awaits"),
        ({"test": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): assert f(1)\n"
                  "if __name__ == '__main__':\n    unittest.main()"}, "test 1 of 'test' tests nothing: "),
        ({"test_list": ["assert f(1)", "x = f(1)"]}, "test 2 of 'test_list' tests nothing: "),
        ({"test_list": []}, "'test_list' is no list of texts"),
        ({"tests": ["assert f(1) ="]}, "test 1 of 'tests' is no Python: invalid syntax"),
        ({"public_tests": {"input": ["1"]}}, "'public_tests' is no object with lists 'input' and 'output'"),
    ],
)  # fmt: skip
def test_tests_that_cannot_run_here_are_one_line(columns, line):
    with pytest.raises(ValueError, match=line):
        find_tests(columns, "tests")


def test_a_check_of_asserts_is_a_test_for_each():
    text = "X = 1\ndef check(candidate):\n    assert candidate(1) == X\n    assert candidate(2) == 2, 'two'"
    tests = code_asserts.of_check(text, "Solution().f", "here")
    assert len(tests) == 2 and all(test.endswith("\ncheck(f)") and "X = 1" in test for test in tests)
    assert code_asserts.of_check("def check(candidate):\n    x = 1\n    assert candidate(x)", "f", "here") == [
        "def check(candidate):\n    x = 1\n    assert candidate(x)\ncheck(f)"
    ]

"""The environment of code problems: which program a completion is, and what it is worth."""

import contextlib
import dataclasses
import itertools
import json
import types

import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments import Completion, Row, code, code_judge, programs, sandbox, sandbox_command
from scalerl_jax.environments.base import ScorerError
from scalerl_jax.environments.code import find_program, make
from scalerl_jax.environments.code_judge import judge, missing_imports
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.scorer_pool import ScorerPool
from tests.environments.sandboxes import SMALL, needs_bubblewrap

TESTS = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}, {"input": "0 0\n", "output": "0\n"}]
RIGHT = "print(sum(map(int, input().split())))"


def block(program, kind="python"):
    return f"So:\n```{kind}\n{program}\n```\nDone."


QUICK = dataclasses.replace(SMALL, seconds=0.5)  # for what does not end
ENDLESS = "while True: pass"


def config_of(**fields):
    config = Config()
    config.environment = dataclasses.replace(config.environment, **{"name": "code", "sandbox": SMALL, **fields})
    return config


def row_of(tests=TESTS):
    return Row("add", extra={"unit_tests": {"function": "", "cases": [[t["input"], [t["output"]]] for t in tests]}})


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (block("x = 1"), "x = 1"),
        (block("x = 1", ""), "x = 1"),
        (block("x = 1", "py"), "x = 1"),
        (block("x = 1", "Python3"), "x = 1"),
        (block("a") + block("b"), "b"),
        (block("a") + block("out", ""), "a"),
        (block("a", "") + block("b", ""), None),
        (block("a", "cpp"), None),
        (block("a", "cpp") + block("b"), "b"),
        ("no fence", None),
        ("", None),
        ("```python\nx = 1", None),
        ("```python\nx = 1\n```", "x = 1"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''"),
        ("  ```python\n  x\n  ```", "x"),
        ("1. it:\n\n   ```python\n   if x:\n       y\n\n  z\n   ```", "if x:\n    y\n\nz"),
        ("\t```python\n\tif x:\n\t\ty\n\t```", "if x:\n\ty"),
        ("```python title='x'\nx\n```", "x"),
        ("text ```python\nx\n```", None),
        ("```python\r\nx\r\n```\r\n", "x\r"),
        ("```python\n```", ""),
        (
            "```python\ndef f():\n    '''\n    ```\n    f()\n    ```\n    '''\n```",
            "def f():\n    '''\n    ```\n    f()\n    ```\n    '''",
        ),
        ("  ```python\n  x\n      ```\n     ```", "x\n    ```"),
        ("```python\nx\n\t```\n   ```", "x\n\t```"),
        ("    ```python\n    x\n```", "x"),
        ("~~~python\nx = 1\n~~~", "x = 1"),
        ("~~~python\n1\n```\n2\n~~~~", "1\n```\n2"),
        ("```python\nx\n~~~\n```", "x\n~~~"),
        ("```x = `1`\n```python\nx\n```", "x"),  # code within a line is no fence
    ],
)
def test_the_program_of_a_completion(completion, program):
    assert find_program(completion) == program


def test_a_long_line_is_read_once():
    """Of 2 MB: what is quadratic in a line would take hours."""
    assert find_program("```" + "a" * 1_000_000 + "`" + " " * 1_000_000 + "\n" + block("x")) == "x"


def test_imports_that_are_left_out():
    assert missing_imports("def f(x: List[int]) -> int:\n    return math.gcd(*x) + inf") == (
        "from typing import List\nfrom math import inf\nimport math"
    )
    assert missing_imports("self.List = a.inf") == ""


@pytest.fixture(scope="module")
def environment():
    return make_environment(config_of())


@needs_bubblewrap
class TestScores:
    @pytest.mark.parametrize(
        ("completion", "passed", "why"),
        [
            (block(RIGHT), 1.0, ""),
            ("print(3)", 0.0, "there is no program"),
            (block("print(3)"), 1 / 3, "test 2 of 3: wrong: printed '3', wanted '9'"),
            (block("a, b = map(int, input().split())\nprint(a + b or 1)"), 2 / 3, "test 3 of 3: wrong: printed '1'"),
            (block("prin(3)"), 0.0, "test 1 of 3: crashed: NameError: name 'prin' is not defined"),
            (block("x = 'x' * 10**10"), 0.0, "test 1 of 3: memory: MemoryError"),
            (block(""), 0.0, "test 1 of 3: wrong: printed '', wanted '3'"),
        ],
    )
    def test_script(self, environment, completion, passed, why):
        score = environment.score(row_of(), completion)
        assert score.correct == (passed == 1.0) == (score.reward == 1.0)
        assert score.metrics == {"tests_passed": pytest.approx(passed)}
        assert score.why.startswith(why) and (why or not score.why)
        assert score.answer is None

    def test_a_script_that_does_not_end(self):
        score = make_environment(config_of(sandbox=QUICK)).score(row_of(), block("import time\ntime.sleep(600)"))
        assert not score.correct and score.metrics == {"tests_passed": 0.0}
        assert score.why == "test 1 of 3: timeout: no end after 0.5 s"

    def test_integers_of_any_length(self, environment):
        row = row_of([{"input": "", "output": "1" + "0" * 5000}])
        assert environment.score(row, block("print(10**5000)")).correct
        assert (
            judge("def f(x): return x", {"function": "f", "cases": [[[int("9" * 4000)], [1]]]}, SMALL).kind == "wrong"
        )

    def test_a_row_with_the_columns_of_its_tests(self, environment):
        """As a file of answers has them."""
        row = Row("add", extra={"tests": json.dumps(TESTS)})
        assert environment.score(row, block(RIGHT)).correct
        assert environment.score(row, block("print(3)")).why.startswith("test 2 of 3: wrong")
        with pytest.raises(ValueError, match=r"there are no unit tests \(keys: none; wanted: tests, "):
            environment.score(Row("add"), block(RIGHT))

    def test_all_tests_together_have_a_limit(self, monkeypatch):
        tests = {"function": "", "cases": [["0", [""]]] * 20}
        sleeps = "import time\ntime.sleep(float(input()))"
        # Between two tests, by a clock that goes on by 80 s before each of them.
        readings = itertools.count(0.0, 80.0)
        with monkeypatch.context() as patched:
            patched.setattr(code_judge, "time", types.SimpleNamespace(monotonic=lambda: next(readings)))
            verdict = judge(sleeps, tests, SMALL)
        assert (verdict.kind, verdict.passed) == ("timeout", 3) and verdict.why.endswith("took more than 300 s")
        # Amid a test that may take longer by itself.
        tests["cases"][0] = ["600", [""]]
        verdict = judge(sleeps, tests, dataclasses.replace(SMALL, all_seconds=0.8))
        assert (verdict.kind, verdict.passed) == ("timeout", 0)

    def test_a_function_whose_annotations_are_not_imported(self):
        tests = {"function": "total", "cases": [[[[1, 2]], [3]], [[[]], [0]]]}
        program = "class Solution:\n    def total(self, x: List[int]) -> Optional[int]:\n        return sum(x)"
        assert judge(program, tests, SMALL).kind == "ok"

    def test_either_of_two_values_is_right(self):
        tests = {"function": "f", "cases": [[[1], [[1], 1]]]}
        assert judge("def f(x): return x", tests, SMALL).kind == "ok"
        assert judge("def f(x): return (x,)", tests, SMALL).kind == "ok"
        assert judge("def f(x): return [[x]]", tests, SMALL).kind == "wrong"

    def test_through_the_pool_of_processes(self):
        """Its workers have limits of their own, which what they start inherits."""
        for limits, whys in (
            (SMALL, {RIGHT: "", "print(3)": ": wrong: ", "x = 'x' * 10**10": ": memory: "}),
            (QUICK, {ENDLESS: ": timeout: "}),
        ):
            config = config_of(verifier_processes=2, sandbox=limits)
            with contextlib.closing(ScorerPool(config, {"": make_environment(config)})) as pool:
                asked = [
                    (why, pool.submit(row_of(), Completion(block(f"{program}\n# {n}"))))
                    for n in range(2)
                    for program, why in whys.items()
                ]
                for why, future in asked:
                    assert future.result().correct == (not why) and why in future.result().why

    def test_no_sandbox_can_be_started_any_more(self, environment, monkeypatch):
        monkeypatch.setattr(sandbox_command, "command", lambda *_, **__: ["false"])
        monkeypatch.setattr(sandbox, "PAUSE_SECONDS", 0.01)
        with pytest.raises(ScorerError, match="bwrap cannot make a sandbox here: it ended without a word"):
            environment.score(row_of(), block(RIGHT))


@needs_bubblewrap
class TestRows:
    def read(self, tmp_path, *rows, layout="", **fields):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        environment = make(config_of(train=f"{layout}{path}", **fields))
        return list(environment.rows("train")), environment

    def test_of_a_file(self, tmp_path):
        row = {"prompt": "add", "tests": json.dumps(TESTS), "solutions": ["x"], "difficulty": "easy"}
        (read,), _ = self.read(tmp_path, row)
        assert read.text == "add" and read.name.endswith("rows.jsonl row 1")
        assert read.extra == {"prompt": "add", "difficulty": "easy", **row_of().extra}

    @pytest.mark.parametrize(
        ("layout", "columns"),
        [
            ("deepcoder", {"problem": "add", "tests": json.dumps(TESTS)}),
            ("taco", {"question": "add", "input_output": json.dumps(
                {"inputs": [t["input"] for t in TESTS], "outputs": [t["output"] for t in TESTS]})}),
            ("livecodebench", {"question_content": "add", "public_test_cases": json.dumps(TESTS[:1]), "metadata": "{}",
                               "private_test_cases": json.dumps(TESTS[1:])}),
        ],
    )  # fmt: skip
    def test_of_a_published_layout(self, tmp_path, layout, columns):
        (row,), _ = self.read(tmp_path, {**columns, "starter_code": "x = 1"}, layout=f"{layout}:")
        assert row.text == "add\n\nGo on from this code:\n\n```python\nx = 1\n```"
        assert row.extra["unit_tests"] == row_of().extra["unit_tests"]

    def test_malformed_tests_are_one_line(self, tmp_path):
        with pytest.raises(ValueError, match=r"rows.jsonl row 1: 'tests' is not JSON \("):
            self.read(tmp_path, {"prompt": "add", "tests": "nonsense"})

    def test_malformed_rows_are_skipped_up_to_the_limit(self, tmp_path):
        rows = [{"prompt": "a", "tests": "nonsense"}, {"prompt": "b", "tests": TESTS}]
        read, environment = self.read(tmp_path, *rows, max_malformed_rows=1)
        assert [row.text for row in read] == ["b"]
        assert environment.notes()[0].startswith("malformed rows left out: 1: ")

    def test_a_test_that_wants_more_than_may_be_printed(self, tmp_path):
        tests = [{"input": "", "output": "x" * 70_000}]
        with pytest.raises(
            ValueError, match=r"test 1 wants 70000 bytes, config\.environment\.sandbox\.output_bytes is"
        ):
            self.read(tmp_path, {"prompt": "a", "tests": tests})

    def test_as_many_tests_as_the_config_says(self, tmp_path):
        tests = [{"input": "x" * n, "output": str(n)} for n in (1, 3, 2)]
        limits = dataclasses.replace(SMALL, tests=2)
        (row,), _ = self.read(tmp_path, {"prompt": "a", "tests": tests}, sandbox=limits)
        assert [case[1] for case in row.extra["unit_tests"]["cases"]] == [["3"], ["2"]]


@pytest.mark.parametrize("module", [code, programs])
def test_more_memory_than_the_process_around_it_has(module):
    """It is said before anything is started, whatever this process may have itself."""
    limits = dataclasses.replace(SMALL, memory_bytes=2**29)
    environment = module.make(config_of(sandbox=limits, verifier_memory_bytes=2**28))
    said = (
        rf"^config\.environment\.sandbox\.memory_bytes={2**29}: must not be above "
        rf"config\.environment\.verifier_memory_bytes, {2**28}, .*: lower the first or raise the second$"
    )
    for start in (environment.prepare, lambda: next(iter(environment.rows("train")))):
        with pytest.raises(ValueError, match=said):
            start()


def test_without_bubblewrap_the_environment_does_not_start(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.check.cache_clear()
    environment = make(config_of(train="no file"))
    for start in (environment.prepare, lambda: next(iter(environment.rows("train")))):
        with pytest.raises(ValueError, match=r"no bwrap on PATH: apt-get install bubblewrap$"):
            start()

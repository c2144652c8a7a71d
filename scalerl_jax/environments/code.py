"""Code problems: a completion is a program, correct if it passes all unit tests of its problem (code_judge.py).

The program is the last fenced block that is marked as Python, or else the only block if it has no language:

    ```python
    print(int(input()) * 2)
    ```

A fence consists of backticks or tildes. If its first line is indented, as in a list, that indentation is removed from
the program. As in CommonMark, a fence that is indented by more than 3 further spaces does not end the block.

Rows come from the config's sources (data/), with tests in the column that config.environment.columns.tests names or in
those of a published layout (code_tests.py).
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from scalerl_jax.config import Config, EnvironmentConfig, SandboxConfig
from scalerl_jax.environments import code_tests, sandbox
from scalerl_jax.environments.base import Environment, Row, Score, ScorerError
from scalerl_jax.environments.code_judge import judge
from scalerl_jax.environments.data.reader import Reader

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([\w+-]*)")
_PYTHON = ("python", "python3", "py")
_NOT_KEPT = (*code_tests.COLUMNS, "solutions", "incorrect_solutions")  # long columns that no score reads


def make(config: Config) -> Environment:
    environment = config.environment
    reader = Reader(config, kind="code", finish=functools.partial(with_tests, environment=environment))

    def rows(split: str) -> Iterator[Row]:
        prepare(environment)  # reports missing requirements before rows are read
        yield from reader.rows(split)

    return Environment(
        rows,
        functools.partial(score, environment=environment),
        prepare=functools.partial(prepare, environment),
        waits_seconds=waits_seconds(environment.sandbox),
        weights=reader.weights,
        notes=reader.notes,
        filters=True,
    )


def with_tests(row: Row, columns: Mapping[str, Any], *, environment: EnvironmentConfig) -> Row:
    """The row with its tests in the format of scores. Raises ValueError if they cannot be used."""
    column, limits = environment.columns.tests, environment.sandbox
    tests = code_tests.longest(code_tests.find_tests(columns, column), limits.tests)
    for number, (_, right) in enumerate(tests["cases"], 1):
        wanted = right[0] if isinstance(right[0], str) else json.dumps(right[0])
        if len(wanted.encode()) > limits.output_bytes:
            raise ValueError(
                f"test {number} wants {len(wanted.encode())} bytes, "
                f"config.environment.sandbox.output_bytes is {limits.output_bytes}"
            )
    kept = {name: value for name, value in row.extra.items() if name not in (column.partition(".")[0], *_NOT_KEPT)}
    return dataclasses.replace(row, extra={**kept, "unit_tests": tests})


def prepare(environment: EnvironmentConfig) -> None:
    """Raises ValueError, one line, if no sandbox can be made on this machine or with this memory."""
    memory, around = environment.sandbox.memory_bytes, environment.verifier_memory_bytes
    if memory > around:
        raise ValueError(
            f"config.environment.sandbox.memory_bytes={memory}: must not be above "
            f"config.environment.verifier_memory_bytes, {around}, which the process that starts programs may have: "
            "lower the first or raise the second"
        )
    sandbox.check(sandbox.Limits.of(environment.sandbox))


def waits_seconds(limits: SandboxConfig) -> float:
    """Wall-clock limit of all tests of one program, including the start of the sandbox."""
    return limits.all_seconds + sandbox.START_SECONDS


def score(row: Row, completion: str, *, environment: EnvironmentConfig) -> Score:
    """Scores a completion. A row from elsewhere has its tests in columns: raises ValueError if they cannot be used."""
    program = find_program(completion)
    if program is None:
        why = "there is no program: no block between ```python and ```"
        return Score(-1.0, False, {"tests_passed": 0.0}, why=why)
    if "unit_tests" not in row.extra:
        row = with_tests(row, row.extra, environment=environment)
    return score_program(row, program, environment.sandbox)


def score_program(row: Row, program: str, limits: SandboxConfig) -> Score:
    """Scores a program. Raises ScorerError if no sandbox can be started any more."""
    try:
        verdict = judge(program, row.extra["unit_tests"], limits)
    except sandbox.SandboxLost as lost:
        raise ScorerError(str(lost)) from lost
    right = verdict.kind == "ok"
    return Score(1.0 if right else -1.0, right, {"tests_passed": verdict.passed / verdict.tests}, why=verdict.why)


def find_program(completion: str) -> str | None:
    """The program in a completion (see the module's docstring), or None."""
    marked: list[str] = []
    others: list[tuple[str, str]] = []  # kind, text
    indent, fence, kind = "", "", ""
    lines: list[str] = []
    for line in completion.split("\n"):
        found = _FENCE.match(line)
        if found and found[2][0] == "`" and "`" in line[found.end() :]:  # code within a line
            found = None
        if not fence:
            if found:
                indent, fence, kind, lines = found[1], found[2], found[3].lower(), []
        elif found and found[2].startswith(fence) and not found[3] and _columns(found[1]) <= _columns(indent) + 3:
            text, fence = "\n".join(lines), ""
            if kind in _PYTHON:
                marked.append(text)
            else:
                others.append((kind, text))
        else:
            lines.append(_less_indented(line, indent))
    if marked:
        return marked[-1]
    return others[0][1] if len(others) == 1 and not others[0][0] else None


def _columns(indent: str) -> int:
    return len(indent.expandtabs(4))


def _less_indented(line: str, indent: str) -> str:
    """`line` without `indent`, or without its leading spaces if there are fewer."""
    if line.startswith(indent):
        return line[len(indent) :]
    return line[min(len(indent), len(line) - len(line.lstrip(" "))) :]

"""The built-in programs: problems, traces, and what a program is worth when it is run."""

import numpy as np
import pytest

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import programs
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.made_problems import is_held_out
from scalerl_jax.environments.programs import NEGATE, OPERATORS, Operation, ProgramProblem
from tests.environments.sandboxes import needs_bubblewrap

PHRASE = "Time is up. </think>"
SMALL = EnvironmentConfig(name="programs", minimum_terms=2, maximum_terms=4, train_prompts=60)


def rng():
    return np.random.default_rng(7)


def some(count=60, **fields):
    return programs.problems(count, EnvironmentConfig(**{**vars(SMALL), **fields}), seed=1, validation=False)


def test_a_problem_reads_like_this():
    operations = (Operation("add", 3), Operation(NEGATE), Operation("mod", 7))
    problem = ProgramProblem(operations, (10, -3))
    assert problem.text == "add 3,neg,mod 7:"
    assert problem.program == "x=int(input());x+=3;x=-x;x%=7;print(x)"
    assert problem.cases == [["10\n", ["1"]], ["-3\n", ["0"]]]
    (piece,) = programs.trace(problem, rng(), error_rate=0.0)
    assert piece.text == "<think>+=3;=-x;%=7</think>x=int(input());x+=3;x=-x;x%=7;print(x)"


def test_outputs_are_those_of_the_program():
    for problem in some():
        for given, (wanted,) in problem.cases:
            assert output_of(problem.program, given) == [wanted], problem


def test_every_operation_counts():
    for problem in some(maximum_terms=6):
        for i in range(len(problem.operations)):
            shorter = ProgramProblem(problem.operations[:i] + problem.operations[i + 1 :], problem.inputs)
            assert shorter.cases != problem.cases, (problem, i)


def test_problems_are_distinct_and_of_the_lengths_asked_for():
    found = some(200)
    assert len({problem.text for problem in found}) == 200
    assert {len(problem.operations) for problem in found} == {2, 3, 4}
    assert {operation.word for problem in found for operation in problem.operations} == {*OPERATORS, NEGATE}


def test_held_out_problems_are_apart_and_the_same_for_every_seed():
    train = {problem.text for problem in some(300)}
    held = [programs.problems(50, SMALL, seed=seed, validation=True) for seed in (0, 5)]
    assert held[0] == held[1]
    assert not train & {problem.text for problem in held[0]}
    assert all(is_held_out(problem.text) for problem in held[0])


@pytest.mark.parametrize(
    ("least", "most", "said"),
    [
        (4, 3, "config.environment.minimum_terms=4, config.environment.maximum_terms=3: must be 1 <= minimum_terms"),
        (1, 1, "config.environment.train_prompts=1000: 1 to 1 operations do not make 1000 different training problems"),
    ],
)
def test_what_cannot_be_made(least, most, said):
    with pytest.raises(ValueError, match=said):
        some(1000, minimum_terms=least, maximum_terms=most)


def test_fewer_held_out_problems_where_there_are_no_more():
    environment = EnvironmentConfig(minimum_terms=1, maximum_terms=1)
    held = programs.problems(256, environment, seed=0, validation=True)
    assert 1 <= len(held) < 20


def test_slips_come_at_their_rate_and_the_program_follows_the_thinking():
    generator, slipped, count = rng(), 0, 0
    for problem in some(200):
        (piece,) = programs.trace(problem, generator, error_rate=0.2)
        thinking, program = piece.text.removeprefix("<think>").split("</think>")
        thought = thinking.split(";")
        assert program == ";".join(["x=int(input())", *(f"x{one}" for one in thought), "print(x)"])
        assert len(thought) == len(problem.operations)
        slipped += sum(one != operation.thought for one, operation in zip(thought, problem.operations))
        count += len(thought)
    assert 0.16 < slipped / count < 0.24


def test_interrupted_traces_write_what_was_whole():
    generator, interrupted = rng(), 0
    for problem in some(200):
        pieces = programs.trace(problem, generator, error_rate=0.0, phrase=PHRASE)
        if len(pieces) == 1:
            continue
        thinking, phrase, program = pieces
        interrupted += 1
        assert (phrase.text, phrase.trained, thinking.trained, program.trained) == (PHRASE, False, True, True)
        whole = "<think>" + ";".join(operation.thought for operation in problem.operations)
        assert whole.startswith(thinking.text) and thinking.text != whole
        statements = program.text.split(";")[1:-1]
        assert statements == [one.statement for one in problem.operations[: len(statements)]]
        assert len(output_of(program.text, "5")) == 1
    assert 2 <= interrupted <= 25


@needs_bubblewrap
class TestScores:
    def test_traces_are_right_unless_they_slip(self):
        config = Config(environment=SMALL)
        environment = make_environment(config)
        assert environment.prepare is not None
        environment.prepare()
        by_text = {problem.text: problem for problem in programs.problems(60, SMALL, seed=0, validation=False)}
        generator = rng()
        for row in list(environment.rows("train"))[:8]:
            right = programs.trace(by_text[row.text], generator, error_rate=0.0)[0].text.rpartition("</think>")[2]
            assert right == row.answer
            assert environment.score(row, right).correct
            assert environment.score(row, f"```python\n{right}\n```").correct
            assert environment.score(row, right.replace("print(x)", "print(x);print(x)")).why.startswith("test 1 of 3")
            wrong = programs.trace(by_text[row.text], generator, error_rate=1.0)[0].text.rpartition("</think>")[2]
            same = all(output_of(wrong, given) == right for given, right in row.extra["unit_tests"]["cases"])
            assert environment.score(row, wrong).correct == same

    def test_any_program_with_these_outputs_is_right(self):
        environment = make_environment(Config(environment=SMALL))
        row = next(iter(environment.rows("validation")))
        cases = {given.strip(): wanted for given, (wanted,) in row.extra["unit_tests"]["cases"]}
        assert environment.score(row, f"print({cases}[input()])").correct
        assert row.task in ("2 operations", "3 operations", "4 operations")
        assert not environment.score(row, "").correct


def output_of(program, given):
    """Lines that a program of ours prints, without a sandbox."""
    lines = []
    exec(program, {"input": lambda: given, "print": lambda x: lines.append(str(x))})
    return lines

"""The second built-in environment: small programs, written from a list of operations and scored by running them.

    prompt       add 3,neg,mod 7:
    completion   <think>+=3;=-x;%=7</think>x=int(input());x+=3;x=-x;x%=7;print(x)

The program reads an integer, applies the operations and prints the result. It is run on INPUTS integers in the sandbox
(code_judge.py), and is correct if all outputs are: any such program is accepted, in a fenced block or bare. A trace
lists the operations first and then writes them out, so that the thinking decides the program.

A slip is an operation with another number, or the opposite operation; the program follows the thinking. A policy
trained on traces with slips makes them at their rate, which RL can then remove. Some traces are interrupted: the phrase
cuts the thinking anywhere, and the program has the operations that were complete.

Every operation matters: problems whose outputs would be the same without one of their operations are not used, and the
inputs are chosen accordingly. Training and held-out problems are disjoint by construction: a hash of a problem's text
selects the side.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from scalerl_jax.config import Config, EnvironmentConfig, SandboxConfig
from scalerl_jax.environments import code
from scalerl_jax.environments.base import Environment, Row, Score
from scalerl_jax.environments.made_problems import INTERRUPTED_SHARE, Piece, distinct, is_held_out

# word -> (operator, its function of x and a number); word -> the opposite word, used by slips
OPERATORS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", operator.add),
    "take": ("-", operator.sub),
    "times": ("*", operator.mul),
    "div": ("//", operator.floordiv),
    "mod": ("%", operator.mod),
}
OPPOSITES = {"add": "take", "take": "add", "times": "div", "div": "times", "mod": "div"}
NEGATE = "neg"  # the one without a number
LEAST, MOST = 2, 9  # numbers
SLIPS = (-2, -1, 1, 2)  # a slip's number minus the correct one
INPUTS = 3
_CANDIDATES = (46, -987, 350, -41, 5, 2718, -8, 13)
_VALIDATION_SEED = 20_261_122  # the held-out problems are the same in every run, whatever its seed


def make(config: Config) -> Environment:
    """A row's task is its number of operations, from minimum_terms to maximum_terms."""
    limits = config.environment.sandbox

    def rows(split: str) -> Iterator[Row]:
        code.prepare(config.environment)
        validation = split == "validation"
        for problem in problems(
            config.evaluation.prompts if validation else config.environment.train_prompts,
            config.environment,
            seed=config.seed,
            validation=validation,
        ):
            count, tests = len(problem.operations), {"function": "", "cases": problem.cases}
            yield Row(
                problem.text,
                problem.program,
                task=f"{count} operation{'s' if count > 1 else ''}",
                name=f"problem {problem.text}",
                extra={"unit_tests": tests},
            )

    return Environment(
        rows,
        functools.partial(score, limits=limits),
        prepare=functools.partial(code.prepare, config.environment),
        waits_seconds=code.waits_seconds(limits),
    )


def score(row: Row, completion: str, *, limits: SandboxConfig) -> Score:
    """The program is the fenced block, or the whole completion if there is none."""
    program = code.find_program(completion)
    return code.score_program(row, completion.strip() if program is None else program, limits)


@dataclasses.dataclass(frozen=True)
class Operation:
    word: str
    number: int = 0  # 0 if the operation has none

    @property
    def text(self) -> str:
        return f"{self.word} {self.number}" if self.number else self.word

    @property
    def thought(self) -> str:
        return f"{OPERATORS[self.word][0]}={self.number}" if self.number else "=-x"

    @property
    def statement(self) -> str:
        return f"x{self.thought}"

    def apply(self, x: int) -> int:
        if self.word == NEGATE:
            return -x
        _, function = OPERATORS[self.word]
        return function(x, self.number)


@dataclasses.dataclass(frozen=True)
class ProgramProblem:
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{','.join(operation.text for operation in self.operations)}:"

    @property
    def program(self) -> str:
        return _program(self.operations)

    @property
    def cases(self) -> list[list]:
        return [[f"{x}\n", [str(_result(self.operations, x))]] for x in self.inputs]


def draw(rng: np.random.Generator, environment: EnvironmentConfig, *, validation: bool) -> ProgramProblem:
    """Draws a problem of one side; its number of operations is uniform in the config's range."""
    words = [*OPERATORS, NEGATE]
    while True:
        length = int(rng.integers(environment.minimum_terms, environment.maximum_terms + 1))
        operations: list[Operation] = []
        while len(operations) < length:
            word = words[int(rng.integers(len(words)))]
            number = 0 if word == NEGATE else int(rng.integers(LEAST, MOST + 1))
            operations.append(Operation(word, number))
        inputs = _distinguishing_inputs(operations)
        if inputs:
            problem = ProgramProblem(tuple(operations), inputs)
            if is_held_out(problem.text) == validation:
                return problem


def problems(count: int, environment: EnvironmentConfig, *, seed: int, validation: bool) -> list[ProgramProblem]:
    """`count` distinct problems. Held-out ones do not depend on `seed`, and may be fewer if no more exist.

    Raises ValueError if the range of operations is empty or has too few training problems.
    """
    least, most = environment.minimum_terms, environment.maximum_terms
    if not 1 <= least <= most:
        raise ValueError(
            f"config.environment.minimum_terms={least}, config.environment.maximum_terms={most}: "
            "must be 1 <= minimum_terms <= maximum_terms"
        )
    rng = np.random.default_rng([_VALIDATION_SEED, 1] if validation else [seed, 0])
    return distinct(
        lambda: draw(rng, environment, validation=validation),
        count,
        validation=validation,
        patience=lambda found: 10 * found + 1_000,
        what=f"{least} to {most} operations",
    )


def trace(
    problem: ProgramProblem, rng: np.random.Generator, *, error_rate: float, phrase: str = ""
) -> tuple[Piece, ...]:
    """A completion: thinking with slips, `</think>`, the program. A `phrase` interrupts a share of them."""
    thought = [_slip(one, rng) if rng.random() < error_rate else one for one in problem.operations]
    steps = [f"{';' if i else ''}{one.thought}" for i, one in enumerate(thought)]
    if not phrase or rng.random() >= INTERRUPTED_SHARE:
        return (Piece(f"<think>{''.join(steps)}</think>{_program(thought)}"),)
    done = int(rng.integers(0, len(steps)))
    cut = steps[done][: int(rng.integers(0, len(steps[done])))]
    return (
        Piece("<think>" + "".join(steps[:done]) + cut),
        Piece(phrase, trained=False),
        Piece(_program(thought[:done])),
    )


def _program(operations: Sequence[Operation]) -> str:
    return ";".join(["x=int(input())", *(operation.statement for operation in operations), "print(x)"])


def _result(operations: Sequence[Operation], x: int) -> int:
    return functools.reduce(lambda value, operation: operation.apply(value), operations, x)


def _distinguishing_inputs(operations: list[Operation]) -> tuple[int, ...]:
    """INPUTS candidates that together reveal the omission of any operation; () if there are none."""
    right = {x: _result(operations, x) for x in _CANDIDATES}
    changed = []  # for each operation, the inputs whose result changes without it
    for i in range(len(operations)):
        rest = operations[:i] + operations[i + 1 :]
        changed.append({x for x in _CANDIDATES if _result(rest, x) != right[x]})
    if not all(changed):
        return ()
    chosen: list[int] = []
    while len(chosen) < INPUTS:
        unseen = [inputs for inputs in changed if not inputs & set(chosen)]
        left = [x for x in _CANDIDATES if x not in chosen]
        chosen.append(max(left, key=lambda x: sum(x in inputs for inputs in unseen)))
    return tuple(chosen) if all(inputs & set(chosen) for inputs in changed) else ()


def _slip(operation: Operation, rng: np.random.Generator) -> Operation:
    """The operation with another number near the correct one, or another operation."""
    if not operation.number:
        return Operation("add", int(rng.integers(LEAST, MOST + 1)))
    if rng.random() < 0.5:
        return Operation(OPPOSITES[operation.word], operation.number)
    numbers = [operation.number + slip for slip in SLIPS if LEAST <= operation.number + slip <= MOST]
    return Operation(operation.word, int(rng.choice(numbers)))

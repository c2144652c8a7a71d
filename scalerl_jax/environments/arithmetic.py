"""The built-in environment: chains of additions and subtractions, with traces that solve them step by step.

    prompt       3+4-5+6=
    completion   <think>3+4=7-5=2+6=8</think>8

Integer arithmetic with one-digit terms and totals. A trace writes the total after every operation, four characters per
step: with steps of equal length, a small decoder learns to find the next term in half the optimizer steps.

A slip is a step with a wrong result near the correct one; the trace continues consistently from the wrong total, and
ends with a wrong answer. A policy trained on traces with slips knows the method and makes mistakes at their rate, which
RL can then remove. Some traces are interrupted: the phrase cuts the thinking anywhere, and the answer is the total so
far.

Training and held-out problems are disjoint by construction: a hash of a problem's text selects the side. Only the exact
integer is correct, optionally with spaces around it.

config.environment.unanswerable = q makes a task with a known ceiling: for a share q of the prompts of each side, those
with the lowest hashes, the answer is a digit unrelated to the problem. Each of the ten digits occurs equally often, so
the best policy's expected accuracy on held-out prompts is 1 - q + q / 10. Traces are unchanged.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments.base import Environment, Row, Score
from scalerl_jax.environments.made_problems import INTERRUPTED_SHARE, Piece, distinct, is_held_out

FIRST_TOTAL, LAST_TOTAL = 2, 7  # running totals of a problem
LEAST, MOST = 0, 9  # totals of a trace, which slips shift: the range allows one slip, and mostly more
SLIPS = (-2, -1, 1, 2)  # a slip's result minus the correct one
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_VALIDATION_SEED = 20_251_013  # the held-out problems are the same in every run, whatever its seed


def make(config: Config) -> Environment:
    """A row's task is its number of terms, or "unanswerable"."""

    def rows(split: str) -> Iterator[Row]:
        held_out = split == "validation"
        found = problems(
            config.evaluation.prompts if held_out else config.environment.train_prompts,
            config.environment,
            seed=config.seed,
            validation=held_out,
        )
        digits = unanswerable(found, config.environment.unanswerable)
        for problem in found:
            task = "unanswerable" if problem in digits else f"{len(problem.terms) + 1} terms"
            yield Row(problem.text, digits.get(problem, problem.answer), task=task, name=f"problem {problem.text}")

    return Environment(rows, score, in_processes=False)


def score(row: Row, completion: str) -> Score:
    """The answer must be an integer: "3+4=" does not count as 7, and gives no answer to vote for."""
    text, wanted = completion.strip(), int(row.answer)
    if _INTEGER.fullmatch(text) is None:
        return Score(-1.0, False, why=f"said no integer, wanted {wanted}")
    if int(text) != wanted:
        return Score(-1.0, False, answer=str(int(text)), why=f"said {int(text)}, wanted {wanted}")
    return Score(1.0, True, answer=str(wanted), why=f"said {wanted}")


@dataclasses.dataclass(frozen=True)
class Problem:
    start: int
    terms: tuple[int, ...]  # signed, none of them 0

    @property
    def text(self) -> str:
        return f"{self.start}{''.join(f'{term:+d}' for term in self.terms)}="

    @property
    def answer(self) -> str:
        return str(self.start + sum(self.terms))


def held_out(problem: Problem) -> bool:
    """Whether the problem belongs to the validation side."""
    return is_held_out(problem.text)


def draw(rng: np.random.Generator, environment: EnvironmentConfig, *, validation: bool) -> Problem:
    """Draws a problem of one side; a chain of n terms has n - 1 operations, n is uniform in the config's range."""
    while True:
        length = int(rng.integers(environment.minimum_terms, environment.maximum_terms + 1)) - 1
        start = total = int(rng.integers(FIRST_TOTAL, LAST_TOTAL + 1))
        terms: list[int] = []
        while len(terms) < length:
            term = int(rng.integers(1, LAST_TOTAL - FIRST_TOTAL + 1)) * (1 if rng.random() < 0.5 else -1)
            if FIRST_TOTAL <= total + term <= LAST_TOTAL:
                total += term
                terms.append(term)
        problem = Problem(start, tuple(terms))
        if held_out(problem) == validation:
            return problem


def problems(count: int, environment: EnvironmentConfig, *, seed: int, validation: bool) -> list[Problem]:
    """`count` distinct problems. Held-out ones do not depend on `seed`, and may be fewer if no more exist.

    Raises ValueError if the range of terms is empty or has too few training problems.
    """
    minimum_terms, maximum_terms = environment.minimum_terms, environment.maximum_terms
    if not 2 <= minimum_terms <= maximum_terms:
        raise ValueError(
            f"config.environment.minimum_terms={minimum_terms}, config.environment.maximum_terms={maximum_terms}: "
            "must be 2 <= minimum_terms <= maximum_terms"
        )
    rng = np.random.default_rng([_VALIDATION_SEED, 1] if validation else [seed, 0])
    return distinct(
        lambda: draw(rng, environment, validation=validation),
        count,
        validation=validation,
        patience=lambda found: 100 * found + 10_000,
        what=f"chains of {minimum_terms} to {maximum_terms} terms",
    )


def unanswerable(found: Sequence[Problem], share: float) -> dict[Problem, str]:
    """The answers of a share of the problems, those with the lowest hashes: each digit occurs equally often."""

    def draw(problem: Problem) -> bytes:
        return hashlib.blake2b(problem.text.encode(), digest_size=8, person=b"unanswerable").digest()

    chosen = sorted(found, key=draw)[: round(share * len(found))]
    return {problem: str(place % 10) for place, problem in enumerate(chosen)}


def trace(problem: Problem, rng: np.random.Generator, *, error_rate: float, phrase: str = "") -> tuple[Piece, ...]:
    """A completion: thinking with slips, `</think>`, the answer. A `phrase` interrupts a share of them."""
    total, steps, totals = problem.start, [f"<think>{problem.start}"], [problem.start]
    for i, term in enumerate(problem.terms):
        total += term
        if rng.random() < error_rate:
            total = _slip(total, problem.terms[i + 1 :], rng)
        steps.append(f"{term:+d}={total}")
        totals.append(total)
    if not phrase or rng.random() >= INTERRUPTED_SHARE:
        return (Piece(f"{''.join(steps)}</think>{total}"),)
    # Cut within step `done`, the first incomplete one; the budget of a real interruption ends anywhere too.
    done = int(rng.integers(1, len(steps)))
    cut = steps[done][: int(rng.integers(0, len(steps[done])))]
    return (Piece("".join(steps[:done]) + cut), Piece(phrase, trained=False), Piece(str(totals[done - 1])))


def _slip(total: int, rest: tuple[int, ...], rng: np.random.Generator) -> int:
    """A result near `total` with which the rest of the chain stays one-digit; `total` if there is none."""
    ahead = np.cumsum((0, *rest))
    fits = [total + s for s in SLIPS if (total + s + ahead).min() >= LEAST and (total + s + ahead).max() <= MOST]
    return int(rng.choice(fits)) if fits else total

"""Shared by the environments that generate problems: the split into sides, deduplication, and a tokenizer corpus.

A hash of a problem's text decides whether it is held out, so training and held-out problems are disjoint by
construction.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from scalerl_jax.config import EnvironmentConfig

INTERRUPTED_SHARE = 0.05  # of the traces
_HELD_OUT_ONE_IN = 8


class HasText(Protocol):
    @property
    def text(self) -> str: ...


Problem = TypeVar("Problem", bound=HasText)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a completion's text; the forced interruption phrase is not trained on."""

    text: str
    trained: bool = True


def is_held_out(text: str) -> bool:
    """Whether the problem with this text belongs to the validation side."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _HELD_OUT_ONE_IN == 0


def distinct(
    draw: Callable[[], Problem], count: int, *, validation: bool, patience: Callable[[int], int], what: str
) -> list[Problem]:
    """`count` problems with different texts; held-out ones may be fewer if no more exist.

    patience: maps the number of problems found to the number of consecutive draws without a new one after which no more
    are assumed to exist. what: describes the problems, for the message. Raises ValueError if there are too few.
    """
    found: dict[str, Problem] = {}
    since = 0  # draws since the last one that was new
    while len(found) < count:
        since += 1
        if since > patience(len(found)):
            if validation and found:
                break
            field, side = (
                ("evaluation.prompts", "held-out") if validation else ("environment.train_prompts", "training")
            )
            raise ValueError(f"config.{field}={count}: {what} do not make {count} different {side} problems")
        problem = draw()
        if problem.text not in found:
            found[problem.text], since = problem, 0
    return list(found.values())


def corpus(
    draw: Callable[..., Problem],
    trace: Callable[..., tuple[Piece, ...]],
    environment: EnvironmentConfig,
    *,
    seed: int,
    phrase: str,
) -> Iterator[str]:
    """Texts to train a tokenizer: training problems with traces, and the phrase, often enough to be whole words."""
    rng = np.random.default_rng([seed, 2])
    for _ in range(200):
        problem = draw(rng, environment, validation=False)
        yield problem.text + "".join(piece.text for piece in trace(problem, rng, error_rate=0.0))
        yield phrase

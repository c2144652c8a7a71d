"""Prompts and answers from files and the hub (data/); a completion is correct if its answer equals the row's
(answers.py).
"""

from scalerl_jax.config import Config
from scalerl_jax.environments.base import Environment, Row, Score
from scalerl_jax.environments.data.reader import Reader


def make(config: Config) -> Environment:
    reader = Reader(config)
    return Environment(
        reader.rows, score, prepare=prepare, deterministic=lambda: True, weights=reader.weights, notes=reader.notes,
        filters=True,
    )  # fmt: skip


# Comparing answers imports sympy, which the scoring processes need and the trainer does not: hence the local imports.


def prepare() -> None:
    from scalerl_jax.environments.answers import right

    right("$x$", "y")  # the first question loads the grammars


def score(row: Row, completion: str) -> Score:
    from scalerl_jax.environments.answer_votes import scored

    return scored(completion, row.answer)

"""Prompts and answers from JSONL files; an answer is right where it says the same as the row's (answers.py).

The files have one {"prompt": str, "answer": str} a line, and may name a "task" there, the part of a mixture that the
prompt is from: evaluations are then also reported part by part.
"""

from collections.abc import Iterator

from scalerl_jax.config import Config
from scalerl_jax.environments.base import RIGHT, WRONG, Environment, Row, Score
from scalerl_jax.environments.text_rows import read_jsonl


def make(config: Config) -> Environment:
    def rows(split: str) -> Iterator[Row]:
        field = f"{split}_file"
        path = getattr(config.environment, field)
        empty = split == "train"
        columns = ("prompt", "answer")
        for text, answer, task, name in read_jsonl(path, f"config.environment.{field}", columns, optional=("task",)):
            yield Row(text, answer, task=task, name=name)
            empty = False
        if empty:
            raise ValueError(f"{path}: no prompts there")

    return Environment(rows, score, prepare=prepare)


# What compares answers brings sympy, which the processes that score need and the trainer does not.


def prepare() -> None:
    from scalerl_jax.environments.answers import right

    right("$x$", "y")  # the first question loads the grammars


def score(row: Row, completion: str) -> Score:
    from scalerl_jax.environments.answers import right

    return RIGHT if right(completion, row.answer) else WRONG

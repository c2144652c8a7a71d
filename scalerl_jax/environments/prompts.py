"""Prompts of a run, training and held out, as token ids.

JSONL files have one {"prompt": str, "answer": str} a line, and may name a "task" there, the part of a mixture that the
prompt is from: evaluations are then also reported part by part (arithmetic: by the number of terms). No prompt may be
in both files, nor twice in one: then the curriculum would not know it as the one prompt it is, and the held-out score
would not be of held-out prompts.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.environments import arithmetic
from scalerl_jax.environments.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    index: int  # in its list
    text: str
    token_ids: np.ndarray  # [tokens] int32
    answer: str
    task: str = ""  # the part of a mixture it is from


def load(config: Config, tokenizer: Tokenizer) -> tuple[list[Prompt], list[Prompt]]:
    """(training prompts, held-out prompts: at most config.evaluation.prompts of them).

    Raises ValueError naming the config field, or the file and row, at fault.
    """
    train: Sequence[tuple[str, ...]]  # prompt, answer, task, name of the row
    validation: Sequence[tuple[str, ...]]
    if config.environment.name == "arithmetic":
        train, validation = (
            [
                (problem.text, problem.answer, f"{len(problem.terms) + 1} terms", f"problem {problem.text}")
                for problem in _problems(config, held_out)
            ]
            for held_out in (False, True)
        )
    else:
        train = list(_read_tasks(config.environment.train_file, "config.environment.train_file"))
        validation = list(_read_tasks(config.environment.validation_file, "config.environment.validation_file"))
        if not train:
            raise ValueError(f"{config.environment.train_file}: no prompts there")
        _refuse_repeated(train, validation)
        validation = validation[: config.evaluation.prompts]
    prompts = _tokenize(train, config, tokenizer), _tokenize(validation, config, tokenizer)
    assert not {p.text for p in prompts[0]} & {p.text for p in prompts[1]}, "a held-out prompt is a training prompt"
    return prompts


def read_jsonl(
    path: str, field: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, ...]]:
    """The texts of each row, and the row's name for messages: "FILE row N". Blank lines are skipped.

    A column of `optional` is "" where a row has none.

    Raises ValueError naming file and row, or `field` of the config where there is no such file.
    """
    if not path:
        raise ValueError(f"{field}: no file is given")
    try:
        file = open(path, encoding="utf-8")  # noqa: SIM115 (closed below; the error here is about opening only)
    except OSError as error:
        raise ValueError(f"{field}={path}: {error.strerror}") from error
    with file:
        try:
            lines = list(file)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 text ({error})") from error
    for number, line in enumerate(lines, 1):
        where = f"{path} row {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: is not a JSON object")
        texts = []
        for column in (*columns, *optional):
            value = row.get(column)
            if value is None and column in optional:
                texts.append("")
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and column == "answer":
                value = str(value)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{where}: {column!r} is not a text, or is empty")
            texts.append(value)
        yield *texts, where


def _problems(config: Config, validation: bool) -> list[arithmetic.Problem]:
    return arithmetic.problems(
        config.evaluation.prompts if validation else config.environment.train_prompts,
        minimum_terms=config.environment.minimum_terms,
        maximum_terms=config.environment.maximum_terms,
        seed=config.seed,
        validation=validation,
    )


def _read_tasks(path: str, field: str) -> Iterator[tuple[str, ...]]:
    return read_jsonl(path, field, ("prompt", "answer"), optional=("task",))


def _refuse_repeated(*files: Iterable[tuple[str, ...]]) -> None:
    first: dict[str, str] = {}
    for rows in files:
        for text, _, _, where in rows:
            if text in first:
                raise ValueError(f"{where}: the prompt is the same as in {first[text]}")
            first[text] = where


def _tokenize(rows: Sequence[tuple[str, ...]], config: Config, tokenizer: Tokenizer) -> list[Prompt]:
    prompts = []
    for index, (text, answer, task, where) in enumerate(rows):
        ids = np.asarray(tokenizer.encode_prompt(text), np.int32)
        if len(ids) > config.rollout.max_prompt_tokens:
            raise ValueError(
                f"{where}: the prompt has {len(ids)} tokens, "
                f"config.rollout.max_prompt_tokens is {config.rollout.max_prompt_tokens}"
            )
        prompts.append(Prompt(index, text, ids, answer, task))
    return prompts

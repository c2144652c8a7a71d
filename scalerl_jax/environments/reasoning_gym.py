"""Tasks that reasoning-gym generates and scores: config.environment.name=reasoning_gym:NAME, any of its data sets.

    training prompts   config.environment.train_prompts, generated with config.seed
    held-out prompts   config.evaluation.prompts, generated with a fixed seed that is the same in every run; none of
                       them is a training prompt
    options            config.environment.options, such as '{"min_terms": 2}': fields of the data set's own config

A prompt is the data set's question as a user message; set instructions on the answer's form with
config.environment.system_prompt or prompt_suffix. The text after the thinking, or the last <answer> in it, is scored by
the data set's own score_answer, s from 0 to 1: the reward is 2 s - 1, and `correct` is
s >= min(1, config.environment.correct_at).

Some data sets draw from Python's sets, whose order differs between processes: they are generated in processes with a
fixed hash seed, by `python -m` this module for the rows, and again, entry by entry, in the scoring processes.
"""

import dataclasses
import difflib
import functools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments.base import Environment, Row, Score, ScorerError, reaches, shortened

NAME = "reasoning_gym:"
_VALIDATION_SEED = 20_251_013
_MOST_TRIED = 16  # if entries repeat, generate at most so many times the requested number
_SECONDS = 1800.0  # by clock, to make all prompts
_FIELD = "config.environment.name"


def make(config: Config) -> Environment:
    name = config.environment.name.removeprefix(NAME)

    made = functools.cache(lambda: _make_rows(name, config))

    def rows(split: str) -> Iterator[Row]:
        train, held_out = made()
        if split == "train" and len(train) < config.environment.train_prompts:
            raise ValueError(
                f"{_FIELD}={NAME}{name}: makes {len(train)} different training prompts beside the held-out ones, "
                f"config.environment.train_prompts is {config.environment.train_prompts}: other "
                "config.environment.options may make more"
            )
        return iter(train if split == "train" else held_out)

    def prepare() -> None:
        _data_set(name, seed=0, size=1, options=json.dumps(config.environment.options))

    return Environment(rows, functools.partial(_score, config=config), prepare=prepare, deterministic=lambda: True)


def _score(row: Row, completion: str, *, config: Config) -> Score:
    if missing := [column for column in ("question", "seed", "size", "index") if column not in row.extra]:
        raise ScorerError(
            f"{_FIELD}={config.environment.name}: a row has no {', '.join(missing)}, by which it was made"
        )
    options = json.dumps(config.environment.options)
    name = config.environment.name.removeprefix(NAME)
    seed, size = row.extra["seed"], row.extra["size"]
    entry = _entry(name, seed=seed, size=size, options=options, index=row.extra["index"])
    if entry["question"] != row.extra["question"]:
        raise ScorerError(
            f"{_FIELD}={config.environment.name}: {shortened(row.extra['question'])} is another question when made "
            "again"
        )
    answer = answer_in(completion)
    data = _data_set(name, seed=seed, size=size, options=options)
    share = float(data.score_answer(answer=answer, entry=entry))
    correct = reaches(share, min(1.0, config.environment.correct_at))
    wanted = f", wanted {shortened(row.answer)}" if row.answer else ""
    return Score(
        2 * share - 1, correct, answer=row.answer if correct and row.answer else " ".join(answer.split()),
        why=f"said {shortened(answer)}{wanted}: {share:g} of 1",
    )  # fmt: skip


def answer_in(completion: str) -> str:
    """The content of the last <answer> in a completion, or the whole completion if there is none."""
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    return (tagged[-1] if tagged else completion).strip()


def _make_rows(name: str, config: Config) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows), fewer than configured if no more exist. Raises ValueError."""
    asked = {
        "name": name,
        "options": config.environment.options,
        "splits": [[config.evaluation.prompts, _VALIDATION_SEED], [config.environment.train_prompts, config.seed]],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __name__],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=fixed(dict(os.environ)),
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{_FIELD}={NAME}{name}: made no prompts within {_SECONDS:g} s") from None
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
    if not found:
        stderr_lines = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ValueError(f"{_FIELD}={NAME}{name}: making prompts ended with code {done.returncode}: {stderr_lines[0]}")
    if "error" in found:
        raise ValueError(found["error"])
    held_out, train = (
        [
            Row(
                question, answer, task=name, name=f"{name} seed {split['seed']} entry {index}", chat=True,
                extra={"question": question, "seed": split["seed"], "size": split["size"], "index": index},
            )
            for index, question, answer in split["entries"]
        ]
        for split in found["splits"]
    )  # fmt: skip
    return train, held_out


def fixed(environment: dict[str, str]) -> dict[str, str]:
    """Variables of a process in which the order of sets is fixed, and which can import this package."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(p for p in (root, environment.get("PYTHONPATH")) if p)
    return {**environment, "PYTHONHASHSEED": "0", "PYTHONPATH": path}


@functools.lru_cache(maxsize=4)
def _data_set(name: str, *, seed: int, size: int, options: str) -> Any:
    """The data set. Raises ValueError, one line, for an unknown name or invalid options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import reasoning_gym
            from reasoning_gym.composite import DatasetSpec
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise ValueError(
                f"{_FIELD}={NAME}{name}: needs the package reasoning-gym: pip install 'scalerl-jax[environments]'"
            ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ValueError(
            f"{_FIELD}={NAME}{name}: reasoning-gym has no data set of that name; near it are {', '.join(near)}"
        )
    given = json.loads(options)
    fields = sorted(field.name for field in dataclasses.fields(DATASETS[name][1]))
    if wrong := [option for option in given if option not in fields or option in ("seed", "size")]:
        has = ", ".join(field for field in fields if field not in ("seed", "size"))
        raise ValueError(f"config.environment.options: {NAME}{name} has no option {wrong[0]!r} to give (it has: {has})")
    try:
        if name == "composite":
            given["datasets"] = [DatasetSpec(**{"config": {}, **part}) for part in given.get("datasets", ())]
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **given)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{_FIELD}={NAME}{name}: {message} (config.environment.options={options}, size {size})"
        ) from error


@functools.lru_cache(maxsize=256)
def _entry(name: str, *, seed: int, size: int, options: str, index: int) -> Any:
    """An entry, cached: every completion of a group needs the same entry, and some are slow to generate."""
    return _data_set(name, seed=seed, size=size, options=options)[index]


def main() -> None:
    """Reads {"name", "options", "splits": [[count, seed], ...]}; writes {"splits": [{"seed", "size", "entries":
    [[index, question, answer], ...]}, ...]} without duplicate questions, or {"error"}."""
    asked = json.load(sys.stdin)
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keeps the output of a data set's code out of the reply
    options, seen, splits = json.dumps(asked["options"]), set[str](), list[dict[str, Any]]()
    try:
        for count, seed in asked["splits"]:
            size, entries = _entries(asked["name"], count=count, seed=seed, options=options, other=frozenset(seen))
            seen.update(question for _, question, _ in entries)
            splits.append({"seed": seed, "size": size, "entries": entries})
    except ValueError as error:
        print(json.dumps({"error": str(error)}), file=reply, flush=True)
        return
    print(json.dumps({"splits": splits}), file=reply, flush=True)


def _entries(
    name: str, *, count: int, seed: int, options: str, other: frozenset[str]
) -> tuple[int, list[tuple[int, str, str]]]:
    """(size of the data set, up to `count` entries as (index, question, answer)), without the questions in `other`."""
    size = count
    while True:
        data, entries, seen = _data_set(name, seed=seed, size=size, options=options), [], set(other)
        for index in range(size):
            entry = data[index]
            question, answer = str(entry["question"]), entry["answer"]
            if question in seen or not question.strip():
                continue
            seen.add(question)
            entries.append((index, question, "" if answer is None else str(answer)))
            if len(entries) == count:
                return size, entries
        if size >= _MOST_TRIED * count:
            return size, entries
        size *= 2


if __name__ == "__main__":
    main()

"""Turns the rows of one environment into prompts: filter, deduplicate, hold out, decontaminate; counts dropped rows.

Held out are the `count` rows with the lowest keys of their questions (base.prompt_key). So the selection does not
depend on the order of rows, a seed or a template; when data are added, only new rows with lower keys enter it. The same
key identifies duplicates: prompts that differ only in white space are the same.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments.base import Environment, Row, prompt_key, question
from scalerl_jax.environments.data import decontamination
from scalerl_jax.environments.data.filter import Filter
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.tokenizer import Tokenizer

_LONGEST = 80  # characters of an answer in messages


@dataclasses.dataclass(frozen=True)
class Known:
    """The prompts of a run so far: the first row with each, by the key of its question and by that of its rendered
    prompt. A template may drop the difference between two questions."""

    held_out: dict[bytes, Row] = dataclasses.field(default_factory=dict)
    train: dict[bytes, Row] = dataclasses.field(default_factory=dict)
    held_out_asked: dict[bytes, Row] = dataclasses.field(default_factory=dict)
    train_asked: dict[bytes, Row] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Counted:
    """Count of affected rows, and the first one."""

    count: int = 0
    first: str = ""

    def add(self, what: str) -> None:
        self.count, self.first = self.count + 1, self.first or what

    def line(self, what: str) -> list[str]:
        return [f"{what}: {self.count:,}, as {self.first}"] if self.count else []


class Problems:
    """The problems of one environment (config.environment). Call the public methods in the order defined here."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._config, self._prompts = config, Prompts(config, tokenizer)
        self._filter = Filter(config.environment.filter)
        self._held_out: dict[bytes, Row] = {}
        self._train: dict[bytes, Row] = {}
        self._filtered, self._repeated, self._differing = Counted(), Counted(), Counted()
        self._shared, self._long = Counted(), Counted()
        self._contaminated: list[str] = []
        self._asked: list[Row] = []
        self._counts = ""

    def read_held_out(self, environment: Environment, known: Known) -> None:
        """Reads the validation rows, if there are any. Raises ValueError naming the field, or the file and row."""
        for row in self._rows(environment, "validation"):
            key = self._key(row)
            if not self._repeats(row, known.held_out.get(key)):
                self._held_out[key] = known.held_out[key] = row

    def read_train(self, environment: Environment, known: Known) -> None:
        """Reads the training rows, except those whose prompts are held out. Raises ValueError as `read_held_out`."""
        for row in self._rows(environment, "train"):
            key = self._key(row)
            if not self._is_held_out(row, known.held_out.get(key)) and not self._repeats(row, known.train.get(key)):
                self._train[key] = known.train[key] = row

    @property
    def takes_out(self) -> bool:
        """Whether held-out rows are taken from the training rows: there are no validation rows."""
        return not self._held_out

    def held_out(self, known: Known) -> list[Row]:
        """The held-out rows as token ids, those with the lowest keys first.

        Raises ValueError if a prompt is too long (and long_prompts is "refuse"), or none is left.
        """
        if self._config.environment.validation and not self._held_out:
            raise ValueError("config.environment.validation: no prompt is left")
        candidates = self._train if self.takes_out else self._held_out
        for key in sorted(candidates):
            if len(self._asked) == self._config.evaluation.prompts:
                break
            # A prompt that is too long is not trained on either; the next one is held out instead.
            for row in self._render([candidates[key]]):
                asked = prompt_key(row.text, row.key)
                if not self._repeats(row, known.held_out_asked.get(asked)):
                    known.held_out_asked[asked] = row
                    self._asked.append(row)
            if self.takes_out:
                del candidates[key]
        self._counts = f"{len(self._asked):,} prompts held out"
        return self._asked

    def train(self, known: Known) -> list[Row]:
        """The training rows as token ids, in order. Call it after `held_out` of all environments. Raises ValueError."""
        if self.takes_out and self._asked and not self._train:
            raise ValueError(
                f"config.evaluation.prompts={self._config.evaluation.prompts}: there are {len(self._asked)} prompts in "
                "all, and none is left to train on; config.environment.validation names prompts of its own"
            )
        clean: Iterable[Row] = self._train.values()
        if self._config.environment.decontaminate:
            evaluations = decontamination.read(self._config)
            environment = self._config.environment
            clean = [row for row in clean if not evaluations.has(question(row, environment), row.name)]
            self._contaminated = evaluations.notes()
        kept = []
        for row in self._render(clean):
            asked = prompt_key(row.text, row.key)
            if self._is_held_out(row, known.held_out_asked.get(asked)):
                continue
            if not self._repeats(row, known.train_asked.get(asked)):
                known.train_asked[asked] = row
                kept.append(row)
        self._counts = f"{len(kept):,} training prompts, {len(self._asked):,} held out"
        if self.takes_out:
            self._counts += " of the same rows"
        return kept

    def notes(self) -> list[str]:
        """Messages on the rows that were left out, and the number of prompts."""
        limit = self._config.rollout.max_prompt_tokens
        return [
            *self._filtered.line("rows left out by config.environment.filter"),
            *self._repeated.line("rows left out since they repeat a prompt"),
            *self._differing.line("of them with another answer than the row that is kept"),
            *self._shared.line("training rows left out since their prompt is held out"),
            *self._contaminated,
            *self._long.line(f"prompts left out since they are longer than config.rollout.max_prompt_tokens={limit}"),
            *self._prompts.notes,
            self._counts,
        ]

    def _rows(self, environment: Environment, split: str) -> Iterator[Row]:
        for number, row in enumerate(environment.rows(split), 1):
            if not row.name:
                row = dataclasses.replace(row, name=f"{self._config.environment.name} {split} row {number}")
            # The filter does not apply to validation rows.
            if environment.filters or split != "train" or self._filter.keeps(row.name, _columns(row)):
                yield row
            else:
                self._filtered.add(row.name)

    def _key(self, row: Row) -> bytes:
        return prompt_key(question(row, self._config.environment), row.key)

    def _is_held_out(self, row: Row, asked: Row | None) -> bool:
        if asked is not None:
            self._shared.add(f"{row.name} that of {asked.name}")
        return asked is not None

    def _repeats(self, row: Row, first: Row | None) -> bool:
        if first is None:
            return False
        self._repeated.add(f"{row.name} that of {first.name}")
        if row.answer.strip() != first.answer.strip():
            self._differing.add(f"{row.name} ({_short(row.answer)}) and {first.name} ({_short(first.answer)})")
        return True

    def _render(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Renders the rows; drops those that are too long, or raises ValueError if long_prompts is "refuse"."""
        limit = self._config.rollout.max_prompt_tokens
        for row in self._prompts.render_all(rows):
            if len(row.token_ids) <= limit:
                yield row
                continue
            message = f"{row.name}: the prompt has {len(row.token_ids)} tokens"
            if self._config.environment.long_prompts == "refuse":
                raise ValueError(
                    f"{message}, config.rollout.max_prompt_tokens is {limit} "
                    "(config.environment.long_prompts=drop leaves such prompts out)"
                )
            self._long.add(message)


def _short(text: str) -> str:
    """The text cut to one short line, for messages."""
    line = " ".join(text[: 4 * _LONGEST].split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def _columns(row: Row) -> dict[str, Any]:
    return {**row.extra, "prompt": row.text, "answer": row.answer, "task": row.task}

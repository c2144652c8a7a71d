"""Reads the rows of an environment from the sources in the config."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scalerl_jax.config import ColumnsConfig, Config
from scalerl_jax.environments.base import Row, scores_itself
from scalerl_jax.environments.data import columns as columns_lib
from scalerl_jax.environments.data import layouts, sources
from scalerl_jax.environments.data.columns import MalformedRows
from scalerl_jax.environments.data.filter import Filter
from scalerl_jax.environments.data.layouts import LAYOUTS
from scalerl_jax.environments.data.sources import Source

Finish = Callable[[Row, Mapping[str, Any]], Row]  # of a row and its columns; raises ValueError: the row is malformed


class Reader:
    """Provides rows, weights and notes of an Environment that reads config.environment.train and validation.

    kind: the DatasetLayout.kind of layouts that it accepts; rows of "math" must have an answer. finish: makes the row
    that the environment scores, from a row and its columns.
    """

    def __init__(self, config: Config, *, kind: str = "math", finish: Finish | None = None):
        self._environment, self._kind, self._finish = config.environment, kind, finish
        self._malformed = MalformedRows.of(config.environment)
        self._filter = Filter(config.environment.filter)
        self._filtered = 0
        self._others: Counter[str] = Counter()  # rows that are not a layout's own, by its name
        self._suspected: list[str] = []
        self.weights = sources.weights(self._sources("train"))

    def rows(self, split: str) -> Iterator[Row]:
        """The rows of "train" or "validation"; no validation rows if the config names no source for them.

        Raises ValueError naming the config's field, or the file and row, at fault.
        """
        given, task = self._sources(split), self._environment.columns.task
        if not given and split == "train":
            raise ValueError(f"config.environment.{split}: no file is given")
        unanswered = [source for source in given if not source.layout] if not self._environment.columns.answer else []
        if unanswered and self._kind == "math" and scores_itself(self._environment):
            raise ValueError(
                f"config.environment.columns.answer is empty, so rows of {unanswered[0].given} have no right answers: "
                "config.environment.reward=judge, or FILE.py:FUNCTION, scores without them"
            )
        for source in given:
            empty, tasks, keys = True, False, ""
            for name, columns in source.read(held_out=split != "train", malformed=self._malformed):
                empty = False
                if source.layout and not layouts.has(columns, LAYOUTS[source.layout]):
                    self._others[source.layout] += 1
                    continue
                row = self._row(name, columns, source, split)
                if row is None:
                    continue
                tasks = tasks or columns_lib.find(columns, task) is not columns_lib.MISSING
                keys = keys or columns_lib.keys(columns)
                if split == "train":
                    if not self._keeps(row, name, columns):
                        continue
                    yield dataclasses.replace(row, name=name, source=source.text if self.weights else "")
                else:
                    yield dataclasses.replace(row, name=name, task=_task(row, source, len(given)))
            if not (empty or tasks or source.layout or task in ("", ColumnsConfig.task)) and (
                split != "train" or not self._environment.validation
            ):
                raise ValueError(
                    f"config.environment.columns.task={task}: no row of {source.given} has it"
                    f"{f' ({keys})' if keys else ''}"
                )
            if empty:
                raise ValueError("; ".join((f"{source.given}: no prompts there", *self._malformed.notes())))

    def notes(self) -> list[str]:
        """Messages on the rows that were left out so far."""
        notes = self._malformed.notes()
        for name, count in self._others.items():
            column, values = LAYOUTS[name].only
            notes.append(f"rows left out since their {column!r} is not {' or '.join(values)}: {count:,} ({name})")
        if self._filtered:
            notes.append(f"rows left out by config.environment.filter: {self._filtered:,}")
        return notes + self._suspected

    def _sources(self, split: str) -> list[Source]:
        found = sources.parse(getattr(self._environment, split), f"config.environment.{split}")
        for source in found:
            if source.weight is not None and split != "train":
                raise ValueError(f"{source.given}: has a weight, and nothing is drawn from it")
            if source.layout and LAYOUTS[source.layout].kind != self._kind:
                raise ValueError(
                    f"{source.given}: {source.layout} is a layout for config.environment.name="
                    f"{LAYOUTS[source.layout].kind}, not {self._environment.name}"
                )
        return found

    def _row(self, name: str, columns: Mapping[str, Any], source: Source, split: str) -> Row | None:
        """The row made from the columns; None if it is malformed."""
        finished = columns
        try:
            if source.layout:
                layout = LAYOUTS[source.layout]
                row = layouts.make_row(columns, layout)
                finished = layouts.with_tests(columns, layout, self._environment.columns.tests)
            else:
                row = columns_lib.make_row(columns, self._environment.columns, needs_answer=self._kind == "math")
                self._suspect(row, name, source)
            if self._finish is not None:
                row = self._finish(row, finished)
        except ValueError as error:
            if split == "train" and self._left_out(name, columns):
                self._filtered += 1
            else:
                self._malformed.skip(name, f"{error}{self._hint(columns, source)}")
            return None
        return row

    def _left_out(self, name: str, columns: Mapping[str, Any]) -> bool:
        """Whether the filter leaves out a malformed row, if its columns alone say so."""
        try:
            return not self._filter.keeps(name, columns)
        except ValueError:
            return False

    def _keeps(self, row: Row, name: str, columns: Mapping[str, Any]) -> bool:
        made = {"prompt": row.text, "answer": row.answer, "task": row.task}
        if self._filter.keeps(name, {**made, **columns}):
            return True
        self._filtered += 1
        return False

    def _suspect(self, row: Row, name: str, source: Source) -> None:
        """Notes once that answers look like whole GSM8K solutions, which need the layout gsm8k."""
        if not self._suspected and self._kind == "math" and "####" in row.answer:
            self._suspected.append(
                f"the whole answer of {name} is taken for the right one, which reads like a solution: "
                f"gsm8k:{source.text} takes what is behind its ####"
            )

    def _hint(self, columns: Mapping[str, Any], source: Source) -> str:
        """A hint for the message on a malformed row: the layout's note, a similar layout, or a likely prompt column."""
        if source.layout:
            note = LAYOUTS[source.layout].note
            return f" ({note})" if note else ""
        looks = layouts.looks_like(columns, self._kind)
        if looks:
            return f"; that looks like {looks}: {looks}:{source.text}"
        names = self._environment.columns
        if columns_lib.find(columns, names.prompt) is columns_lib.MISSING:
            likely = [name for name in ("problem", "question", "messages", "input", "instruction") if name in columns]
            return f"; perhaps config.environment.columns.prompt={likely[0]}" if likely else ""
        return ""


def _task(row: Row, source: Source, count: int) -> str:
    """The row's task; with several sources it starts with the source's text, so each is reported separately."""
    return row.task if count == 1 else f"{source.text} {row.task}".strip()

"""Rows without a layout: the config names the columns of the prompt, the answer and the task.

A prompt is a text or a list of messages. All columns are kept in Row.extra, for a user's reward function. Rows that
cannot be used are counted, named, and skipped up to a limit.
"""

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

from scalerl_jax.config import ColumnsConfig, EnvironmentConfig
from scalerl_jax.environments.base import Row, joined_content

MISSING = object()
_NAMED = 3  # number of malformed rows named in messages


class Malformed(ValueError):
    """A row is malformed; the message states what was found and what is required."""


class MalformedRows:
    """The malformed rows of one environment; up to `most` are skipped. `field`: the config field, for messages."""

    def __init__(self, *, field: str, most: int):
        self._field, self._most = field, most
        self._first: list[str] = []
        self.count = 0

    @classmethod
    def of(cls, environment: EnvironmentConfig) -> "MalformedRows":
        """Skips up to config.environment.max_malformed_rows."""
        return cls(field="config.environment.max_malformed_rows", most=environment.max_malformed_rows)

    def skip(self, name: str, why: str) -> None:
        """Counts a malformed row. Raises ValueError, one line naming the first ones, if there are more than `most`."""
        self.count += 1
        if len(self._first) < _NAMED:
            self._first.append(f"{name}: {why}")
        if self.count <= self._most:
            return
        if not self._most:
            raise ValueError(f"{self._first[0]} ({self._field} lets such rows be left out)")
        raise ValueError(f"{self._field}={self._most}: there are more malformed rows: {self._named()}")

    def notes(self) -> list[str]:
        """A message on the skipped rows, if there are any."""
        if not self.count:
            return []
        return [f"malformed rows left out: {self.count:,}: {self._named()}"]

    def _named(self) -> str:
        return "; ".join(self._first) + ("; ..." if self.count > len(self._first) else "")


def find(columns: Mapping[str, Any], name: str) -> Any:
    """The value under a dotted name ("a.b" is b inside a, "a.0" the first of the list a), or MISSING.

    A text on the path is parsed as JSON or as a Python literal.
    """
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        value = written_out(value) if isinstance(value, str) else value
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def written_out(text: str) -> Any:
    """The list or object that a text encodes as JSON or as a Python literal; else the text."""
    if text.lstrip()[:1] not in ("{", "["):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list | dict):
            return found
    return text


def make_row(columns: Mapping[str, Any], names: ColumnsConfig, *, needs_answer: bool = True) -> Row:
    """The row made from the config's columns. Raises Malformed.

    needs_answer: a row must have the column of the answer, if the config names one.
    """
    needs_answer = needs_answer and bool(names.answer)
    wanted = {"prompt": names.prompt, "answer": names.answer if needs_answer else ""}
    for field, name in wanted.items():
        if name and find(columns, name) is MISSING:
            none = "; config.environment.columns.answer= says that rows have none, for a judge or a reward of your own"
            raise Malformed(
                f"has no {name!r} ({keys(columns)}; wanted: {', '.join(filter(None, wanted.values()))}"
                f"{none if field == 'answer' else ''})"
            )
    text, messages = read_prompt(find(columns, names.prompt), names.prompt)
    answer = find(columns, names.answer) if names.answer else MISSING
    task = find(columns, names.task) if names.task else MISSING
    return Row(
        text,
        read_answer(answer, names.answer) if needs_answer else loose_answer(answer),
        task="" if task in (MISSING, None, "") else read_text(number_text(task), names.task),
        extra=dict(columns),
        messages=messages,
        chat=bool(messages),
    )


def keys(columns: Mapping[str, Any]) -> str:
    """The names of the columns, for messages."""
    found = list(columns)
    return f"keys: {', '.join(found[:12])}{', ...' if len(found) > 12 else ''}" if found else "it has no keys"


def read_prompt(value: Any, name: str) -> tuple[str, tuple[Mapping[str, str], ...]]:
    """(text, messages) of a prompt that is a text, without messages, or a list of messages. Raises Malformed."""
    if isinstance(value, list):
        messages = read_messages(value, name)
        return joined_content(messages), messages
    return read_text(value, name), ()


def read_text(value: Any, name: str) -> str:
    """Checks that `value` is a non-empty text that can be encoded as UTF-8. Raises Malformed."""
    if not isinstance(value, str) or not value.strip():
        raise Malformed(f"{name!r} is not a text, or is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Malformed(f"{name!r} is no text: half of a surrogate pair at character {error.start}") from error
    return value


def read_answer(value: Any, name: str) -> str:
    """A text or a number, as text. Raises Malformed for an object or a list, or a text of one ("[1, 2]" is valid)."""
    inside = written_out(value) if isinstance(value, str) else value
    if isinstance(inside, Mapping):
        raise Malformed(f"{name!r} is an object ({keys(inside)}); {name}.KEY is what is in it")
    if isinstance(inside, list) and (inside is value or '"' in value or "'" in value):
        raise Malformed(f"{name!r} is a list of {len(inside)}; {name}.0 is the first of it")
    return read_text(number_text(value), name).strip()


def loose_answer(value: Any) -> str:
    """An optional answer: "" if there is none."""
    value = number_text(value)
    return value if isinstance(value, str) else ""


def number_text(value: Any) -> Any:
    """A finite number as text; other values unchanged."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return value


def read_messages(value: list[Any], name: str) -> tuple[Mapping[str, str], ...]:
    """({"role", "content"}, ...); a content that is a list of parts becomes their joined texts. Raises Malformed."""
    messages = []
    for number, message in enumerate(value, 1):
        where = f"message {number} of {name!r}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Malformed(f"{where} is not an object with 'role' and 'content'")
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            if not all(isinstance(text, str) for text in texts):
                raise Malformed(f"{where} has a part that is not text")
            content = "".join(map(str, texts))
        messages.append({"role": message["role"], "content": read_text(content, f"content of {where}")})
    if not messages:
        raise Malformed(f"{name!r} has no messages")
    if messages[-1]["role"] == "assistant":
        raise Malformed(f"the last message of {name!r} is the assistant's: there is nothing left to answer")
    return tuple(messages)

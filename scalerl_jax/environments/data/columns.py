"""Rows without a layout: which column is the prompt, the answer and the task is said in the config.

A prompt is a text or a list of messages. What no part of a row was made from is kept beside it, for a reward function
of the user's.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from scalerl_jax.config import ColumnsConfig
from scalerl_jax.environments.base import Row, said_by
from scalerl_jax.environments.data.malformed import Malformed

MISSING = object()


def find(columns: Mapping[str, Any], name: str) -> Any:
    """The value under a dotted name ("a.b" is b inside a, "a.0" the first of the list a), or MISSING."""
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def make_row(columns: Mapping[str, Any], names: ColumnsConfig, *, needs: Iterable[str] = ("answer",)) -> Row:
    """The row that the config's columns make.

    needs: fields of ColumnsConfig, beside the prompt, that a row must have. Raises Malformed.
    """
    for field in ("prompt", *needs):
        name = getattr(names, field)
        if name and find(columns, name) is MISSING:
            wanted = [getattr(names, field) for field in ("prompt", *needs) if getattr(names, field)]
            raise Malformed(f"has no {name!r} ({keys(columns)}; wanted: {', '.join(wanted)})")
    prompt = find(columns, names.prompt)
    messages: tuple[Mapping[str, str], ...] = ()
    if isinstance(prompt, list):
        messages = read_messages(prompt, names.prompt)
        text = said_by(messages)
    else:
        text = read_text(prompt, names.prompt)
    answer = find(columns, names.answer) if names.answer else MISSING
    task = find(columns, names.task) if names.task else MISSING
    return Row(
        text,
        read_answer(answer, names.answer) if "answer" in needs and names.answer else loose_answer(answer),
        task="" if task in (MISSING, None, "") else read_text(task, names.task),
        extra=without(columns, (names.prompt, names.answer, names.task)),
        messages=messages,
        chat=bool(messages),
    )


def keys(columns: Mapping[str, Any]) -> str:
    """Those found, for messages."""
    found = list(columns)
    return f"keys: {', '.join(found[:12])}{', ...' if len(found) > 12 else ''}" if found else "it has no keys"


def without(columns: Mapping[str, Any], used: Iterable[str]) -> dict[str, Any]:
    """The columns of a row that are not used up; a column of which a part is used stays."""
    gone = set(used)
    return {name: value for name, value in columns.items() if name not in gone}


def read_text(value: Any, name: str) -> str:
    """A text with something in it, that can be written as UTF-8."""
    if not isinstance(value, str) or not value.strip():
        raise Malformed(f"{name!r} is not a text, or is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Malformed(f"{name!r} is no text: half of a surrogate pair at character {error.start}") from error
    return value


def read_answer(value: Any, name: str) -> str:
    """A text or a number."""
    return read_text(number_text(value), name)


def loose_answer(value: Any) -> str:
    """An answer that nobody needs: "" where there is none."""
    value = number_text(value)
    return value if isinstance(value, str) else ""


def number_text(value: Any) -> Any:
    """A finite number as text; other values as they are."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return value


def read_messages(value: list[Any], name: str) -> tuple[Mapping[str, str], ...]:
    """({"role", "content"}, ...); a content of parts is the texts of its parts."""
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

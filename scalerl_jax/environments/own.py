"""A user-defined environment: config.environment.name=FILE.py:CLASS.

    class Riddles:
        def __init__(self, config): ...                # EnvironmentConfig; or no arguments at all
        def rows(self, split): ...                     # "train" or "validation": Row or {"prompt", "answer", ...}
        def score(self, row, completion): ...          # sync or async: float, bool, Score or dict (user_functions.py)
        def episode(self, row): ...                    # instead of score: an object with step(turn), see episode.py
        tools = [...]                                  # with score: tools that turns may call before it, see tools.py
        def run(self, row, client): ...                # instead of score: a program that requests turns, see episode.py
        def prepare(self): ...                         # optional: called once per process, before its first row
        weights = {}                                   # the rest is optional too, as in base.py
        waits_seconds = 0.0
        deterministic = False                          # True: scores of equal completions are cached

A row that is a dict has a prompt, text or messages, and any other inputs of the scorer: "answer" and "task" become
fields of the Row, other keys go to row.extra. If there are weights, "source" of each training row must be one of them.
A function that returns such an object may replace the class. The object is made once in the process of the run, for its
rows, and once in each scoring process; scores are computed only there, where reward_seconds and verifier_seconds apply.
"""

import asyncio
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments import tools as tool_calls
from scalerl_jax.environments import user_code
from scalerl_jax.environments.base import WRONG, Completion, Environment, Row, Score, joined_content
from scalerl_jax.environments.episode import Client
from scalerl_jax.environments.user_functions import UserFunction, awaited, to_score

_FIELD = "config.environment.name"
_ANY = (Exception, SystemExit)  # what the user's own code may raise
_FIELDS: dict[str, tuple[Any, str]] = {  # of a Row
    **dict.fromkeys(("text", "answer", "task", "name", "source", "key"), (str, "a text")),
    "extra": (Mapping, "a dict"),
    "messages": (list | tuple, "messages"),
}


def make(config: Config) -> Environment:
    """The user's environment. Raises ValueError, one line, if the class cannot be loaded or is not as above."""
    name = config.environment.name
    made = user_code.load(_FIELD, name)
    if not callable(made):
        raise ValueError(f"{_FIELD}={name}: is {type(made).__name__}, not a class")
    file = user_code.file_of(made)
    try:
        environment = made(config.environment) if _takes_one(made) else made()
    except _ANY as error:
        raise ValueError(f"{_FIELD}={name}: cannot be made: {user_code.error_line(error, file=file)}") from error
    episode, tools = getattr(environment, "episode", None), getattr(environment, "tools", None)
    run = getattr(environment, "run", None)
    for needed in ("rows", "run") if run is not None else ("rows", "score") if episode is None else ("rows",):
        if not callable(getattr(environment, needed, None)):
            raise ValueError(f"{_FIELD}={name}: has no function {needed}")
    if run is not None:
        for other in ("score", "episode", "tools"):
            if hasattr(environment, other):
                raise ValueError(f"{_FIELD}={name}: has {other} and run; what a run is worth it says itself")
    if episode is not None and (hasattr(environment, "score") or tools is not None):
        other = "tools" if tools is not None else "score"
        raise ValueError(f"{_FIELD}={name}: has {other} and episode; what an episode is worth its steps say")
    if tools is not None and (
        not isinstance(tools, list | tuple)
        or not tools
        or not all(callable(tool) or isinstance(tool, tool_calls.Toolset) for tool in tools)
    ):
        raise ValueError(f"{_FIELD}={name}: tools is {tools!r}, not a list of functions and toolsets")
    toolbox = tool_calls.Tools(tools, config.environment) if tools is not None else None
    function = UserFunction(
        getattr(environment, "score", _not_scored), setting=f"{_FIELD}={name}", name="environment",
        seconds=config.environment.reward_seconds, correct_at=config.environment.correct_at,
    )  # fmt: skip

    def given(split: str) -> Iterator[Any]:
        try:
            found = environment.rows(split)
            if isinstance(found, Iterable):
                yield from found
                return
        except _ANY as error:
            raise ValueError(f"{_FIELD}={name}: rows({split!r}): {user_code.error_line(error, file=file)}") from error
        raise ValueError(f"{_FIELD}={name}: rows({split!r}) is {type(found).__name__}, not a list of rows")

    def prepare() -> None:
        try:
            if hasattr(environment, "prepare"):
                environment.prepare()
            if toolbox is not None:
                _ = toolbox.owners  # once, and not in every episode's process
        except _ANY as error:
            raise ValueError(f"{_FIELD}={name}: cannot be made: {user_code.error_line(error, file=file)}") from error

    def rows(split: str) -> Iterator[Row]:
        try:
            described = toolbox.schemas() if toolbox is not None else ()
        except ValueError as error:
            raise ValueError(f"{_FIELD}={name}: {error}") from error
        for number, found in enumerate(given(split), 1):
            row = _row(found, f"{name} {split} row {number}")
            if toolbox is not None:
                row = dataclasses.replace(row, tools=described)
            if run is not None:
                row = dataclasses.replace(row, agent=True)
            if split == "train" and weights and row.source not in weights:
                raise ValueError(f"{row.name}: 'source' is {row.source!r}, and weights has {', '.join(weights)}")
            yield row

    def played(row: Row, client: Client) -> Score:
        assert run is not None
        value = run(row, client)
        if inspect.isawaitable(value):
            value = asyncio.run(awaited(value))
        return to_score(value, correct_at=config.environment.correct_at)

    def with_tools(row: Row) -> tool_calls.ToolEpisode:
        assert toolbox is not None

        def score(row: Row, answer: Completion) -> Score:
            return function.score(row, answer) if answer else WRONG  # nothing follows its thinking

        return tool_calls.ToolEpisode(row, toolbox, score=score, characters=config.environment.tool_characters)

    weights: Mapping[str, float] = getattr(environment, "weights", {})
    waits_seconds = getattr(environment, "waits_seconds", config.environment.reward_seconds)
    deterministic = getattr(environment, "deterministic", False)
    if not isinstance(weights, Mapping):
        raise ValueError(f"{_FIELD}={name}: weights is {weights!r}")
    if not isinstance(deterministic, bool):
        raise ValueError(f"{_FIELD}={name}: deterministic is {deterministic!r}")
    for source, weight in weights.items():
        if not isinstance(source, str) or not _finite(weight) or weight <= 0:
            raise ValueError(f"{_FIELD}={name}: weights: {source!r} has {weight!r}, not a number above 0")
    if not _finite(waits_seconds) or waits_seconds < 0:
        raise ValueError(f"{_FIELD}={name}: waits_seconds is {waits_seconds!r}")
    if not getattr(environment, "in_processes", True):
        raise ValueError(
            f"{_FIELD}={name}: in_processes is {environment.in_processes!r}: an environment of one's own is scored in "
            "processes, where its limits of time hold; leave it out"
        )
    to_prepare = toolbox is not None or hasattr(environment, "prepare")
    return Environment(
        rows, function.score, prepare=prepare if to_prepare else None, reads_thinking=True,
        deterministic=lambda: deterministic, episode=with_tools if toolbox is not None else episode,
        run=played if run is not None else None, scores_answers=episode is None and run is None,
        weights=weights, waits_seconds=waits_seconds,
    )  # fmt: skip


def _not_scored(row: Row, completion: Completion) -> float:
    raise AssertionError("an environment with episodes is not asked for scores")


def _takes_one(made: Callable) -> bool:
    """Whether it accepts a positional argument."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _row(row: Any, where: str) -> Row:
    """Converts a user's row to a Row. Raises ValueError naming the row."""
    if isinstance(row, Row):
        row = dataclasses.replace(row, name=row.name or where)
        for field, (kind, called) in _FIELDS.items():
            if not isinstance(getattr(row, field), kind):
                raise ValueError(f"{where}: {field} is {getattr(row, field)!r}, not {called}")
        if row.messages or not row.text.strip():
            text, messages = _prompt(row.messages or row.text, where)
            row = dataclasses.replace(row, text=row.text or text, messages=messages)
        return row
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: is {type(row).__name__}, not a Row or a dict")
    if "prompt" not in row:
        raise ValueError(f"{where}: has no 'prompt' (it has: {', '.join(map(str, row)) or 'nothing'})")
    # "source" stays in extra: a filter or a reward may read it.
    extra = {str(key): value for key, value in row.items() if key not in ("prompt", "answer", "task")}
    answer, task, source = row.get("answer"), row.get("task"), row.get("source")
    if not isinstance(task, str | None):
        raise ValueError(f"{where}: 'task' is {task!r}, not a text")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise ValueError(f"{where}: 'answer' is {answer!r}, not a text or a number")
    text, messages = _prompt(row["prompt"], where)
    return Row(
        text,
        "" if answer is None else str(answer),
        task=task or "",
        name=where,
        extra=extra,
        messages=messages,
        source=source if isinstance(source, str) else "",
    )


def _prompt(prompt: Any, where: str) -> tuple[str, tuple[Mapping[str, str], ...]]:
    """(text, messages) of a prompt that is a text or messages. Raises ValueError."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{where}: 'prompt' is empty")
        return prompt, ()
    messages = tuple(prompt) if isinstance(prompt, list | tuple) else ()
    if not messages or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    ):
        raise ValueError(f"{where}: 'prompt' is neither a text nor messages, [{{'role': 'user', 'content': '...'}}]")
    return joined_content(messages), messages

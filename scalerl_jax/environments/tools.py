"""Tools that a chat model may call in its turns; the first turn without a call is its answer.

A tool is a function, or part of a toolset: tools that share a resource for an episode, such as a folder or a server.

    the prompt    the chat template renders the tools' JSON schemas, made from signature and docstring (Google style)
    a call        <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>, or another format in which the
                  model's chat template writes calls (tool_calls.py)
    the result    a message of the role "tool" for each call, in order: the function's result as text, cut at
                  environment.tool_characters, and where those of a turn exceed LONGEST_REPLY together; or the error, if
                  the call is invalid or the function raises

The policy receives errors as results; they do not end the episode. Metrics of an episode: tool_calls, tool_errors, and
tool_errors/NAME for each tool.
"""

import asyncio
import collections
import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from scalerl_jax.config import EnvironmentConfig
from scalerl_jax.environments import user_code
from scalerl_jax.environments.base import Completion, Row, Score, ScoreFailed, ScorerError, ToolCall
from scalerl_jax.environments.episode import LONGEST_REPLY, Step

_CUT = "... (cut)"


class OpenTools(Protocol):
    """A toolset of one episode, in the episode's process."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result, or a coroutine of it: a text or a JSON value. The policy receives any exception as an error."""

    def close(self) -> None:
        """Called when the episode has ended."""


@runtime_checkable
class Toolset(Protocol):
    """Tools that share a resource for an episode.

    If it has prepare(config: EnvironmentConfig), that is called once per process too, before schemas().
    """

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """{"type": "function", "function": {"name", "description", "parameters"}} of each.

        Called once per process. Raises ValueError, one line, if they are not available.
        """

    def open(self, row: Row) -> OpenTools:
        """Called before an episode's first call of a tool, or by its score. An exception fails the episode."""


class Tools:
    """The tools of an environment: functions and toolsets."""

    def __init__(self, tools: Sequence[Callable | Toolset], config: EnvironmentConfig | None = None):
        """config: passed to prepare() of toolsets; None: prepare() is not called."""
        self._tools, self._config = tools, config

    @functools.cached_property
    def owners(self) -> Mapping[str, Callable | Toolset]:
        """The function or toolset of each tool, by the tool's name. Raises ValueError for a duplicate name."""
        found: dict[str, Callable | Toolset] = {}
        for number, owner in enumerate(self._tools):
            names = [getattr(owner, "__name__", repr(owner))]
            if isinstance(owner, Toolset):
                names = [schema["function"]["name"] for schema in self._of_toolsets[number]]
            for name in names:
                if name in found:
                    raise ValueError(f"tool {name}: there are two of this name")
                found[name] = owner
        return found

    @functools.cached_property
    def _of_toolsets(self) -> Mapping[int, Sequence[Mapping[str, Any]]]:
        """The schemas of each toolset, by its index."""
        found = {}
        for number, owner in enumerate(self._tools):
            if isinstance(owner, Toolset):
                if self._config is not None and hasattr(owner, "prepare"):
                    owner.prepare(self._config)
                found[number] = owner.schemas()
        return found

    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The JSON schema of each tool, for the chat template. Not used in episode processes: it imports a lot.

        Raises ValueError as `owners`, or naming a tool that has no schema.
        """
        _ = self.owners
        found = list[Mapping[str, Any]]()
        for number, owner in enumerate(self._tools):
            found += self._of_toolsets[number] if isinstance(owner, Toolset) else [schema_of(owner)]
        return tuple(found)


def schema_of(tool: Callable) -> Mapping[str, Any]:
    """The JSON schema of a function, from its signature and docstring. Raises ValueError naming the tool."""
    # Imported here: a run without tools does not need it.
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # of any kind, with the library's own names
        name = getattr(tool, "__name__", repr(tool))
        raise ValueError(f"tool {name}: {' '.join(str(error).split())}") from error


class ToolEpisode:
    """An episode of a row whose turns may call tools; score: scores the turn without a call.

    If it raises ScoreFailed, so does the step, with the metrics of the episode.
    """

    def __init__(self, row: Row, tools: Tools, *, score: Callable[[Row, Completion], Score], characters: int):
        self._row, self._score, self._characters = row, score, characters
        self._owners = tools.owners
        self._open: dict[int, OpenTools] = {}  # by the toolset's id
        self._messages: list[Mapping[str, Any]] = []  # of the turns so far
        self._calls = 0
        self._errors = collections.Counter[str]()  # by tool; "": invalid calls, and calls of unknown tools

    def step(self, turn: Completion) -> Step:
        results = [*self._results(turn)]
        if results:
            messages = tuple({"role": "tool", "content": result} for result in results)
            self._messages += [{"role": "assistant", "content": str(turn), "tool_calls": turn.tool_calls}, *messages]
            return Step(messages, metrics=self._metrics())
        turn.messages, turn.opened = tuple(self._messages), self._opened
        try:
            score = self._score(self._row, turn)
        except ScoreFailed as failed:
            failed.metrics |= self._metrics()
            raise
        metrics = {**score.metrics, **self._metrics()}
        return Step(done=True, reward=score.reward, correct=score.correct, metrics=metrics)

    def close(self) -> None:
        for tools in self._open.values():
            with contextlib.suppress(Exception, SystemExit):
                tools.close()

    def _metrics(self) -> dict[str, float]:
        errors = {f"tool_errors/{name}": self._errors[name] for name in self._owners}
        return {"tool_calls": self._calls, "tool_errors": self._errors.total(), **errors}

    def _results(self, turn: Completion) -> Iterator[str]:
        cut = _CUT[: LONGEST_REPLY // max(1, len(turn.tool_calls))]
        left = LONGEST_REPLY - len(cut) * len(turn.tool_calls)
        for call in turn.tool_calls:
            self._calls += 1
            name = ""
            try:
                name = self._named(call)
                result = self._result(name, call.arguments)
            except ScorerError:  # a toolset cannot be opened
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code raises anything)
                self._errors[name] += 1
                result = f"error: {user_code.error_line(error)}"
            result, most = _text(result), min(self._characters, left)
            left -= min(len(result), most)
            yield result if len(result) <= most else result[:most] + cut

    def _named(self, call: ToolCall) -> str:
        """The name of the called tool. Raises ValueError if the call is invalid or there is no such tool."""
        if call.error:
            raise ValueError(call.error)
        if call.name not in self._owners:
            raise ValueError(f"there is no tool {call.name!r} (there is: {', '.join(self._owners)})")
        return call.name

    def _result(self, name: str, arguments: Mapping[str, Any]) -> str:
        owner = self._owners[name]
        if isinstance(owner, Toolset):
            found = self._opened(owner).call(name, arguments)
        else:
            found = owner(**arguments)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    def _opened(self, toolset: Toolset) -> OpenTools:
        if id(toolset) not in self._open:
            try:
                self._open[id(toolset)] = toolset.open(self._row)
            except (Exception, SystemExit) as error:
                line = f"{type(toolset).__name__} cannot be opened: {user_code.error_line(error)}"
                raise ScorerError(line) from error
        return self._open[id(toolset)]


def _text(result: str) -> str:
    """`result` with U+FFFD for each half of a surrogate pair, which no tokenizer accepts."""
    return result.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


async def _awaited(value: Any) -> Any:
    return await value

"""Tools: functions that a chat model may call in its turns, until a turn without a call is its answer.

    the prompt    the chat template renders the tools' JSON schemas, made from signature and docstring (Google's style)
    a call        <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>, as Qwen and Hermes models write
    the result    a message of the role "tool" for each call, in their order: what the function returned as text, cut at
                  environment.tool_characters; of a call that cannot be made, or whose function raises, the error

An error is the policy's to read, and ends nothing. Metrics of an episode: tool_calls, tool_errors.
"""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scalerl_jax.environments import user_code
from scalerl_jax.environments.base import Completion, Row, Score
from scalerl_jax.environments.episode import Step

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def schemas(tools: Sequence[Callable]) -> tuple[Mapping[str, Any], ...]:
    """What the chat template is given of each. Raises ValueError naming the function that has no schema."""
    # Here and not above: a run without tools does not need it.
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for tool in tools:
        try:
            found.append(get_json_schema(tool))
        except Exception as error:  # of any kind, with the library's own names
            name = getattr(tool, "__name__", repr(tool))
            raise ValueError(f"tool {name}: {' '.join(str(error).split())}") from error
    return tuple(found)


class ToolEpisode:
    """An episode of a row whose turns may call tools; score: of the turn without a call."""

    def __init__(
        self, row: Row, tools: Sequence[Callable], *, score: Callable[[Row, Completion], Score], characters: int
    ):
        self._row, self._score, self._characters = row, score, characters
        self._tools = {tool.__name__: tool for tool in tools}
        self._calls = self._errors = 0

    def step(self, turn: Completion) -> Step:
        results = [*self._results(turn)]
        if results:
            return Step(tuple({"role": "tool", "content": result} for result in results))
        score = self._score(self._row, turn)
        metrics = {**score.metrics, "tool_calls": self._calls, "tool_errors": self._errors}
        return Step(done=True, reward=score.reward, correct=score.correct, metrics=metrics)

    def _results(self, turn: str) -> Iterator[str]:
        for call in _CALL.finditer(turn):
            self._calls += 1
            try:
                result = self._result(call[1])
            except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code raises anything)
                self._errors += 1
                result = f"error: {user_code.error_line(error)}"
            yield result if len(result) <= self._characters else f"{result[: self._characters]}... (cut)"

    def _result(self, text: str) -> str:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
            raise ValueError('a call is {"name": ..., "arguments": {...}}')
        name, arguments = str(call.get("name")), call.get("arguments", {})
        if name not in self._tools:
            raise ValueError(f"there is no tool {name!r} (there is: {', '.join(self._tools)})")
        found = self._tools[name](**arguments)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)


async def _awaited(value: Any) -> Any:
    return await value

"""Calls of tools in what a turn says, in the form that the model's own chat template writes them.

    hermes     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                        Qwen2, Qwen3, Hermes
    xml        <tool_call><function=add><parameter=a>1</parameter></function></tool_call>           Qwen3-Coder
    json       {"name": "add", "parameters": {"a": 1}}, behind <|python_tag|> or not                Llama 3, Llama 4
    pythonic   [add(a=1), add(a=2)] and nothing else                                                Llama 3.2, Llama 4

A folder's name tells nothing of a fine-tune, and its model_type little: the template is given a call to write, and the
form is the one that reads the same call from it. Text that the policy wrote is never evaluated, only parsed.

`renderers` has parsers for 28 families of models, by their names. Of the families that this project trains they read
Hermes' form and the bare JSON of Llama 3.2, for which it would bring thirteen packages.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scalerl_jax.environments.base import ToolCall
from scalerl_jax.environments.chat_template import ChatTemplate

HERMES = "hermes"
Schemas = Sequence[Mapping[str, Any]]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_OBJECT = re.compile(r'\{\s*"(?:name|type)"\s*:')
_LIST = re.compile(r"\[\s*[^\W\d][\w.]*\(")
_PYTHON = re.compile(r"<\|python_(?:tag|start|end)\|>")
_DECODER = json.JSONDecoder()
# What deep nesting raises is among them.
_UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
_PROBE = ToolCall("probe", {"value": 7})


def read_calls(text: str, form: str, *, tools: Schemas = ()) -> tuple[ToolCall, ...]:
    """The calls of a turn, in their order. tools: the JSON schemas, for forms that write every value as text."""
    return tuple(_FORMS[form](text, tools))


def makes_calls(text: str) -> int:
    """How many calls a text makes, in whichever form has the most."""
    return max(len(read_calls(text, form)) for form in _FORMS)


def form_of(template: ChatTemplate) -> str | None:
    """The form in which a chat template writes calls; None where it writes none, or in another form."""
    parameters = {"type": "object", "properties": {"value": {"type": "integer", "description": "?"}}}
    schema = {"name": _PROBE.name, "description": "?", "parameters": parameters}
    function = {"name": _PROBE.name, "arguments": dict(_PROBE.arguments)}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    asked, tools = [{"role": "user", "content": "?"}], [{"type": "function", "function": schema}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        whole = template.render([*asked, said], generation_prompt=False, tools=tools)
        begins = [template.render(asked, generation_prompt=prompt, tools=tools) for prompt in (True, False)]
        turn = whole.removesuffix(template.behind_answer())
    except ValueError:
        return None
    begin = next((begin for begin in begins if turn.startswith(begin)), "")
    return next((form for form in _FORMS if read_calls(turn[len(begin) :], form) == (_PROBE,)), None)


def _hermes(text: str, tools: Schemas) -> Iterator[ToolCall]:
    for found in _TAGGED.finditer(text):
        try:
            call = json.loads(found[1])
        except _UNREADABLE as error:
            yield _unreadable(error)
            continue
        if isinstance(call, dict) and isinstance(call.get("arguments", {}), dict):
            yield ToolCall(str(call.get("name")), call.get("arguments", {}))
        else:
            yield ToolCall(error='a call is {"name": ..., "arguments": {...}}')


def _xml(text: str, tools: Schemas) -> Iterator[ToolCall]:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    for found in _FUNCTION.finditer(text):
        described = schemas.get(found[1], {}).get("properties") or {}
        values = dict(_PARAMETER.findall(found[2]))
        texts = {name for name in values if described.get(name, {}).get("type") == "string"}
        yield ToolCall(found[1], {name: v if name in texts else _value(v) for name, v in values.items()})


def _json(text: str, tools: Schemas) -> Iterator[ToolCall]:
    found = _OBJECT.search(text)
    while found is not None:
        try:
            call, end = _DECODER.raw_decode(text, found.start())
        except _UNREADABLE as error:
            yield _unreadable(error)
            return
        arguments = call.get("parameters", call.get("arguments"))
        if "name" in call and isinstance(arguments, dict):  # an answer may be an object, too
            yield ToolCall(str(call["name"]), arguments)
        found = _OBJECT.search(text, end)


def _pythonic(text: str, tools: Schemas) -> Iterator[ToolCall]:
    text = _PYTHON.sub("", text).strip()
    if not _LIST.match(text):
        return
    try:
        calls = ast.parse(text, mode="eval").body
        if not isinstance(calls, ast.List):
            raise ValueError("is no list of calls")
        read = [_called(call) for call in calls.elts]
    except _UNREADABLE as error:
        yield _unreadable(error)
        return
    yield from read


def _called(call: ast.expr) -> ToolCall:
    """Raises ValueError where it is no call with values by name."""
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("a call is name(argument=value, ...)")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return ToolCall(ast.unparse(call.func), arguments)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except _UNREADABLE:
        return text


def _unreadable(error: BaseException) -> ToolCall:
    return ToolCall(error=f"the call cannot be read: {' '.join(str(error).split()) or type(error).__name__}")


_FORMS: Mapping[str, Callable[[str, Schemas], Iterator[ToolCall]]] = {
    HERMES: _hermes, "xml": _xml, "json": _json, "pythonic": _pythonic,
}  # fmt: skip

"""Parses tool calls in the text of a turn, in the format in which the model's own chat template writes them.

    hermes     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                        Qwen2, Qwen3, Hermes
    xml        <tool_call><function=add><parameter=a>1</parameter></function></tool_call>           Qwen3-Coder
    json       {"name": "add", "parameters": {"a": 1}}, with or without <|python_tag|> before it    Llama 3, Llama 4
    pythonic   [add(a=1), add(a=2)] and nothing else                                                Llama 3.2, Llama 4

A fine-tune's folder name does not identify the format, and its model_type hardly does: so the template renders a sample
call, and the format is the one whose parser reads that call back. The policy's text is never evaluated, only parsed.

`renderers` has parsers for 28 model families, by name. Of the families that this project trains they read the Hermes
format and the bare JSON of Llama 3.2, at the cost of thirteen packages.
"""

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scalerl_jax.environments.base import ToolCall
from scalerl_jax.environments.chat_template import ChatTemplate

HERMES = "hermes"
Schemas = Sequence[Mapping[str, Any]]
Found = tuple[ToolCall, tuple[int, int]]  # a call and its span in the text

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_OBJECT = re.compile(r'\{\s*"(?:name|type)"\s*:')
_LIST = re.compile(r"\[\s*[^\W\d][\w.]*\(")
_PYTHON = re.compile(r"<\|python_(?:tag|start|end)\|>")
_MARKS = re.compile(rf"<tool_call>\s*</tool_call>|{_PYTHON.pattern}")  # remain after a call is removed
_DECODER = json.JSONDecoder()
# Includes the exceptions raised by deep nesting.
_UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
_TYPES: Mapping[type, tuple[str, ...]] = {  # of JSON schemas, that take a value
    type(None): ("null",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",),
    list: ("array",), dict: ("object",),
}  # fmt: skip
_PROBE = ToolCall("probe", {"value": 7})


def read_calls(text: str, form: str, *, tools: Schemas = ()) -> tuple[ToolCall, ...]:
    """The calls of a turn, in order. tools: the JSON schemas, for formats that write every value as text."""
    return tuple(call for call, _ in _FORMS[form](text, tools))


def split_calls(text: str, form: str, *, tools: Schemas = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """(the text without its calls, the calls). Invalid calls, and those that JSON cannot express, stay in the text."""
    found = []
    for call, span in _FORMS[form](text, tools):
        with contextlib.suppress(*_UNREADABLE):
            check_json(call.arguments)
            found += [(call, span)] * (not call.error)
    rest = text
    for start, end in dict.fromkeys(span for _, span in reversed(found)):
        rest = rest[:start] + rest[end:]
    return (_MARKS.sub("", rest).strip() if found else text), tuple(call for call, _ in found)


def check_json(value: object) -> None:
    """Raises ValueError, TypeError or RecursionError if JSON in UTF-8 cannot express a parsed value: NaN, infinities,
    half of a surrogate pair, a set, an object whose keys are numbers and texts."""
    json.dumps(value, allow_nan=False, ensure_ascii=False, sort_keys=True).encode()


def makes_calls(text: str) -> int:
    """The number of calls in a text, in the format that finds the most."""
    return max(len(read_calls(text, form)) for form in _FORMS)


def form_of(template: ChatTemplate) -> str | None:
    """The format in which a chat template writes calls; None if it writes none, or in an unknown format."""
    parameters = {"type": "object", "properties": {"value": {"type": "integer", "description": "?"}}}
    schema = {"name": _PROBE.name, "description": "?", "parameters": parameters}
    function = {"name": _PROBE.name, "arguments": dict(_PROBE.arguments)}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    asked, tools = [{"role": "user", "content": "?"}], [{"type": "function", "function": schema}]
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        whole = template.render([*asked, calling], generation_prompt=False, tools=tools)
        begins = [template.render(asked, generation_prompt=prompt, tools=tools) for prompt in (True, False)]
        turn = whole.removesuffix(template.behind_answer())
    except ValueError:
        return None
    begin = next((begin for begin in begins if turn.startswith(begin)), "")
    return next((form for form in _FORMS if read_calls(turn[len(begin) :], form) == (_PROBE,)), None)


def _hermes(text: str, tools: Schemas) -> Iterator[Found]:
    for found in _TAGGED.finditer(text):
        try:
            call = json.loads(found[1])
        except _UNREADABLE as error:
            yield _unreadable(error), found.span()
            continue
        named = isinstance(call, dict) and isinstance(call.get("name"), str)
        if named and isinstance(call.get("arguments", {}), dict):
            yield ToolCall(call["name"], call.get("arguments", {})), found.span()
        else:
            yield ToolCall(error='a call is {"name": ..., "arguments": {...}}'), found.span()


def _xml(text: str, tools: Schemas) -> Iterator[Found]:
    schemas = {tool["function"]["name"]: _object(tool["function"].get("parameters")) for tool in tools}
    for found in _FUNCTION.finditer(text):
        described = _object(schemas.get(found[1], {}).get("properties"))
        values = dict(_PARAMETER.findall(found[2]))
        arguments = {name: _value(text, described.get(name)) for name, text in values.items()}
        yield ToolCall(found[1], arguments), found.span()


def _json(text: str, tools: Schemas) -> Iterator[Found]:
    found = _OBJECT.search(text)
    while found is not None:
        try:
            call, end = _DECODER.raw_decode(text, found.start())
        except _UNREADABLE as error:
            yield _unreadable(error), found.span()
            return
        arguments = call.get("parameters", call.get("arguments"))
        if "name" in call and isinstance(arguments, dict):  # an answer may be an object, too
            yield ToolCall(str(call["name"]), arguments), (found.start(), end)
        found = _OBJECT.search(text, end)


def _pythonic(text: str, tools: Schemas) -> Iterator[Found]:
    whole = 0, len(text)
    text = _PYTHON.sub("", text).strip()
    if not _LIST.match(text):
        return
    try:
        calls = ast.parse(text, mode="eval").body
        if not isinstance(calls, ast.List):
            raise ValueError("is no list of calls")
        read = [_called(call) for call in calls.elts]
    except _UNREADABLE as error:
        yield _unreadable(error), whole
        return
    yield from ((call, whole) for call in read)


def _called(call: ast.expr) -> ToolCall:
    """A call from its syntax tree. Raises ValueError if it is not a call with only keyword arguments."""
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("a call is name(argument=value, ...)")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return ToolCall(ast.unparse(call.func), arguments)


def _object(schema: Any) -> Mapping[str, Any]:
    """A schema, which may also be true: any value."""
    return schema if isinstance(schema, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _types(schema: Any) -> list[Any]:
    """The types that a schema names; none: any."""
    schema = _object(schema)
    if "type" in schema:
        return _list(schema["type"]) or [schema["type"]]
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    members = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    return [
        *(kind for value in values for kind in _TYPES.get(type(value), ())),
        *(kind for member in members for kind in _types(member)),
    ]


def _value(text: str, schema: Any) -> Any:
    """The text as JSON; itself where the schema takes texts, and has no other type that takes the JSON."""
    try:
        value = json.loads(text)
    except _UNREADABLE:
        return text
    types = _types(schema)
    other = not isinstance(value, str) and any(one in types for one in _TYPES[type(value)])
    return text if "string" in types and not other else value


def _unreadable(error: BaseException) -> ToolCall:
    return ToolCall(error=f"the call cannot be read: {' '.join(str(error).split()) or type(error).__name__}")


_FORMS: Mapping[str, Callable[[str, Schemas], Iterator[Found]]] = {
    HERMES: _hermes, "xml": _xml, "json": _json, "pythonic": _pythonic,
}  # fmt: skip

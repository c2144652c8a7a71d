"""Calls of tools: the form is the template's own, and nothing that a policy writes is evaluated."""

import json
import threading

import pytest

from scalerl_jax.environments.base import ToolCall
from scalerl_jax.environments.chat_template import ChatTemplate, read_chat_template
from scalerl_jax.environments.tool_calls import form_of, read_calls, split_calls
from tests.support.chat_folders import chat_folder

pytest.importorskip("transformers")
ADD = ToolCall("add", {"a": 1, "b": "é"})
# Of one call, as the templates of these models write it behind the generation prompt.
CODER = (
    "{{ '<tool_call>\n<function=' + call.name + '>\n' }}{% for name, value in call.arguments|items %}"
    "{{ '<parameter=' + name + '>\n' + (value if value is string else value|tojson) + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}"
)
LLAMA_4 = (
    "{{ '<|python_start|>' + message.content + '<|python_end|>{\"name\": \"' + call.name + '\", \"parameters\": ' "
    "+ call.arguments|tojson + '}' }}"
)
PYTHONIC = (
    "{{ '<|python_start|>[' + call.name + '(' }}{% for name, value in call.arguments|items %}"
    "{{ name + '=' + value|tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ')]<|python_end|>' }}"
)
DEEPSEEK = "{{ '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' + call.arguments|tojson }}"


def template_of(call: str) -> ChatTemplate:
    written = (
        "{{ tools|tojson if tools }}{% for message in messages %}{{ '<|' + message.role + '|>\n' }}"
        "{% if message.tool_calls %}{% for one in message.tool_calls %}{% set call = one.function %}"
        + call
        + "{% endfor"
        " %}{% else %}{{ message.content }}{% endif %}{{ '<|eot|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt }}"
    )
    return ChatTemplate(file="a.jinja", template=written, tokens={}, arguments={})


@pytest.mark.parametrize(
    ("call", "form"),
    [(CODER, "xml"), (LLAMA_4, "json"), (PYTHONIC, "pythonic"), (DEEPSEEK, None), ("nothing", None)],
)
def test_a_template_tells_its_form(call, form):
    assert form_of(template_of(call)) == form


@pytest.mark.parametrize(
    ("style", "form"), [("qwen2_5", "hermes"), ("qwen3", "hermes"), ("llama3", "json"), ("deepseek_r1", None)]
)
def test_the_forms_of_known_models(tmp_path, style, form):
    template = read_chat_template(chat_folder(tmp_path, style).path)
    assert template is not None and form_of(template) == form


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'),
        ("json", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "é"}}'),
        ("json", 'Let me see.\n{"type": "function", "name": "add", "parameters": {"a": 1, "b": "é"}}'),
        ("json", '<|python_start|>{"name": "add", "arguments": {"a": 1, "b": "é"}}<|python_end|>'),
        ("pythonic", '[add(a=1, b="é")]'),
        ("pythonic", "<|python_start|>[add(a=1, b='é')]<|python_end|>"),
        (
            "xml",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\né\n</parameter>\n</function>",
        ),
    ],
)
def test_each_form(form, text):
    assert read_calls(text, form) == (ADD,)


def test_several_calls_in_their_order():
    first, second = '{"name": "a", "parameters": {}}', '{"name": "b", "parameters": {"x": [{"name": 1}]}}'
    expected = (ToolCall("a", {}), ToolCall("b", {"x": [{"name": 1}]}))
    for between in ("", "; ", "\n"):
        assert read_calls(first + between + second, "json") == expected
    assert read_calls("[a(), b(x=[{'name': 1}])]", "pythonic") == expected


@pytest.mark.parametrize("form", ["hermes", "json", "pythonic", "xml"])
@pytest.mark.parametrize("text", ["", "It is 5.", "[1, 2]", '{"name": "Ann", "age": 5}', "add(a=1)", "{}"])
def test_an_answer_is_no_call(form, text):
    assert read_calls(text, form) == ()


def test_a_value_of_xml_is_text_where_the_schema_has_text():
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}]
    text = "<function=add><parameter=a>007</parameter><parameter=b>7</parameter><parameter=c>x y</parameter></function>"
    assert read_calls(text, "xml", tools=tools) == (ToolCall("add", {"a": "007", "b": 7, "c": "x y"}),)


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
LISTED = {"oneOf": [{"type": ["string"]}, {"type": "array", "items": {"type": "string"}}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (OPTIONAL, "123", "123"),
        (OPTIONAL, '"a"', '"a"'),
        (OPTIONAL, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"enum": ["1", "2", None]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"type": ["string", "number"]}, "7", 7),
        ({"type": ["string", "number"]}, "007", "007"),
        (LISTED, '["a"]', ["a"]),
        (LISTED, '{"a": 1}', '{"a": 1}'),
        ({"type": {}}, "1", 1),
        ({"anyOf": 1, "enum": "1"}, "1", 1),
    ],
)
def test_a_value_of_xml_is_text_where_nothing_else_in_the_schema_takes_it(schema, text, value):
    parameters = {"properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    call = f"<function=add><parameter=a>{text}</parameter></function>"
    assert read_calls(call, "xml", tools=tools) == (ToolCall("add", {"a": value}),)


@pytest.mark.parametrize(
    "parameters", [True, [1], {"properties": []}, {"properties": {"a": True}}, {"properties": {"a": ["string"]}}]
)
def test_a_schema_that_describes_nothing_takes_any_value(parameters):
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    assert read_calls("<function=add><parameter=a>7</parameter>", "xml", tools=tools) == (ToolCall("add", {"a": 7}),)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "a"}</tool_call>'),
        ("hermes", "<tool_call>" + '{"a":' * 100_000),
        ("json", '{"name": "add", "parameters": {'),
        ("json", '{"name":' + "[" * 100_000),
        ("pythonic", "[add(1)]"),
        ("pythonic", "[add(**{'a': 1})]"),
        ("pythonic", "[add(a=b)]"),
        ("pythonic", "[add(a=__import__('os').getcwd())]"),
        ("pythonic", "[add(a=1), 2]"),
        ("pythonic", "[add(a=1) for a in b]"),
        ("pythonic", "[add(a=1)][0]"),
        ("pythonic", "[add(a=" + "-" * 100_000 + "1)]"),
        ("pythonic", "[add(a=" + "1+" * 50_000 + "1)]"),
        ("pythonic", "[add(a='\0')]"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_nothing_runs(form, text):
    """Also on the small stack of a thread, however deep it is."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(read_calls(text, form)))
    thread.start()
    thread.join()
    (call,) = found
    assert call.error and "\n" not in call.error and len(call.error) < 300 and not call.name and not call.arguments


def test_many_beginnings_cost_no_more_than_their_text():
    for form, text in (("hermes", "<tool_call>"), ("xml", "<function=a>"), ("json", '{"name":1}'), ("pythonic", "[a(")):
        assert len(read_calls(text * 20_000, form)) <= 1
    text = "<function=a>" + "<parameter=b>" * 20_000
    assert read_calls(text, "xml") == (ToolCall("a", {"b": ""}),)


def test_calls_of_tools_are_read_and_what_is_none_stays() -> None:
    good = json.dumps({"name": "add", "arguments": {"a": 1}})
    text = f"So: <tool_call>\n{good}\n</tool_call> <tool_call>{{no}}</tool_call>"
    assert split_calls(text, "hermes") == ("So:  <tool_call>{no}</tool_call>", (ToolCall("add", {"a": 1}),))
    no_number = '{"name": "a", "arguments": {"b": NaN}}'
    half = '{"name": "a", "arguments": {"b": "\\ud83d"}}'
    no_object = '{"name": "a", "arguments": "x"}'
    for broken in ("[1]", '{"name": 1}', no_object, no_number, half, "[" * 100_000):
        assert split_calls(f"<tool_call>{broken}</tool_call>", "hermes") == (f"<tool_call>{broken}</tool_call>", ())
    xml = "Ja <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert split_calls(xml, "xml") == ("Ja", (ToolCall("add", {"a": 1}),))
    llama = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'
    assert split_calls(llama, "json") == ("", (ToolCall("add", {"a": 1}),))
    assert split_calls("[add(a=1), add(a=2)]", "pythonic")[0] == ""
    assert split_calls("[add(a={1})]", "pythonic") == ("[add(a={1})]", ())
    assert split_calls("[add(a={1: 2, 'b': 3})]", "pythonic") == ("[add(a={1: 2, 'b': 3})]", ())

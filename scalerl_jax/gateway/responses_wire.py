"""OpenAI's Responses protocol: /v1/responses, and its stream of events. `input` is the whole conversation."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from scalerl_jax.gateway import wire
from scalerl_jax.gateway.anthropic_wire import event
from scalerl_jax.gateway.openai_wire import message_of
from scalerl_jax.gateway.wire import Sampled, SampleRequest, bad, field, number

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def responses(body: Mapping[str, Any]) -> SampleRequest:
    """Raises ApiError naming the field at fault."""
    wire.refuse(body, previous_response_id=None, conversation=None, prompt=None, background=False, top_logprobs=0)
    if (field(field(body, "text", dict, {}), "format", dict, {}).get("type") or "text") != "text":
        raise bad("text: only the format text is offered", "text")
    calls_tools = wire.may_call_tools(field(body, "tool_choice", (str, dict), "auto"))
    given = field(body, "input", (str, list), [])
    if not given:
        raise bad("input: must be a text, or items, one at least", "input")
    instructions = field(body, "instructions", str)
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for at, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        found = _message(item, f"input[{at}]")
        if found["role"] == "assistant" == (messages[-1]["role"] if messages else ""):
            _join(messages[-1], found)
        else:
            messages.append(found)
    tools = tuple(_tool(tool, f"tools[{at}]") for at, tool in enumerate(field(body, "tools", list, [])))
    return SampleRequest(
        messages=tuple(messages),
        tools=tools if calls_tools else (),
        max_tokens=number(body, "max_output_tokens", None, 1, 2**31 - 1, whole=True),
        **wire.sampling_fields(body),
    )


def _message(item: Any, where: str) -> dict[str, Any]:
    """An assistant's message arrives as one item for each of its parts."""
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    if kind == "message":
        message = {"role": item.get("role"), "content": wire.content_text(item.get("content"), where, _TEXTS)}
    elif kind == "reasoning":
        thinking = item.get("content") or item.get("summary")
        message = {"role": "assistant", "reasoning_content": wire.content_text(thinking, where, _TEXTS)}
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "function": {name: item.get(name) for name in ("name", "arguments")}}
        message = {"role": "assistant", "tool_calls": [call]}
    elif kind == "function_call_output":
        output = wire.content_text(item.get("output"), where, _TEXTS)
        message = {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
    else:
        raise bad(f"{where}: must be a message, reasoning, function_call or function_call_output", where)
    return dict(message_of(message, where))


def _join(first: dict[str, Any], then: Mapping[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if then.get(name):
            first[name] = first.get(name, "") + then[name]
    if calls := then.get("tool_calls"):
        first["tool_calls"] = [*first.get("tool_calls", []), *calls]


def _tool(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "function" or not isinstance(given.get("name"), str):
        raise bad(f"{where}: only tools of the type function are offered, with a name", where)
    return wire.tool(given, "parameters")


def answer(found: Sampled) -> dict[str, Any]:
    turn, body, name = found.turn, found.body, found.name
    message, cut = turn.message, turn.finish_reason == "length"
    status, tokens = "incomplete" if cut else "completed", len(turn.token_ids)
    output: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thinking}]
        output.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content})
    if message["content"] or not message.get("tool_calls"):
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        output.append(item)
    for number_, call in enumerate(message.get("tool_calls", ())):
        called = {"id": f"fc_{name}-{number_}", "type": "function_call", "status": "completed", "call_id": call["id"]}
        function = call["function"]
        output.append({**called, "name": function["name"], "arguments": json.dumps(function["arguments"])})
    usage = {
        "input_tokens": turn.prompt, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.prompt + tokens, "scalerl": wire.usage_of([turn]),
    }  # fmt: skip
    asked = {key: body.get(key) for key in ("instructions", "metadata", "temperature", "top_p")}
    return {
        "id": f"resp_{name}", "object": "response", "created_at": int(time.time()), "model": found.model, **asked,
        "status": status, "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "error": None,
        "output": output, "usage": usage, "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tools": body.get("tools") or [], "tool_choice": body.get("tool_choice") or "auto",
        "previous_response_id": None,
    }  # fmt: skip


def events(found: Sampled) -> Iterator[str]:
    """The events that stream an answer."""
    for at, (kind, fields) in enumerate(_events(answer(found))):
        yield event(f"response.{kind}", sequence_number=at, **fields)


def _events(found: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**found, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "created", {"response": begun}
    for index, item in enumerate(found["output"]):
        at: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        empty = {**item, "status": "in_progress", **({"content": []} if "content" in item else {"arguments": ""})}
        yield "output_item.added", {"output_index": index, "item": empty}
        if item["type"] == "function_call":
            yield "function_call_arguments.delta", {**at, "delta": item["arguments"]}
            yield "function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
        for number_, part in enumerate(item.get("content", ())):
            where = {**at, "content_index": number_}
            yield "content_part.added", {**where, "part": {**part, "text": ""}}
            extra: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield f"{part['type']}.delta", {**where, **extra, "delta": part["text"]}
            yield f"{part['type']}.done", {**where, **extra, "text": part["text"]}
            yield "content_part.done", {**where, "part": part}
        yield "output_item.done", {"output_index": index, "item": item}
    yield found["status"], {"response": found}

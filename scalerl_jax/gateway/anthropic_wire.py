"""Anthropic's protocol: /v1/messages, and its stream of events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scalerl_jax.gateway import wire
from scalerl_jax.gateway.chat import Message
from scalerl_jax.gateway.wire import Sampled, SampleRequest, bad, field, number


def messages(body: Mapping[str, Any], *, counted: bool = False) -> SampleRequest:
    """Raises ApiError naming the field at fault. counted: tokens are only counted, so max_tokens may be missing."""
    calls_tools = wire.may_call_tools(field(body, "tool_choice", dict, {"type": "auto"}).get("type"))
    most = number(body, "max_tokens", None, 1, 2**31 - 1, whole=True)
    if most is None and not counted:
        raise bad("max_tokens: is required", "max_tokens")
    given = field(body, "messages", list, [])
    if not given:
        raise bad("messages: one at least", "messages")
    system = wire.content_text(body.get("system"), "system")
    found = [{"role": "system", "content": system}] if system else []
    for at, message in enumerate(given):
        found += _messages(message, f"messages[{at}]")
    if found[-1]["role"] == "assistant":
        raise bad("messages: the last is the assistant's, and beginning its answer is not offered", "messages")
    tools = tuple(_tool(tool, f"tools[{at}]") for at, tool in enumerate(field(body, "tools", list, [])))
    return SampleRequest(
        messages=tuple(found),
        tools=tools if calls_tools else (),
        max_tokens=most,
        **wire.sampling_fields(body, stop="stop_sequences"),
    )


def _messages(given: Any, where: str) -> list[dict[str, Any]]:
    """A user's message with tool results becomes one message for each result and one for the user's text."""
    if not isinstance(given, dict) or given.get("role") not in ("user", "assistant", "system"):
        raise bad(f"{where}: must have the role user or assistant", where)
    content = given.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise bad(f"{where}.content: must be a text or a list of blocks", where)
    if given["role"] == "assistant":
        return [_assistant(blocks, where)]
    found, texts = list[dict[str, Any]](), list[str]()
    for block in blocks:
        if block.get("type") == "tool_result":
            text = wire.content_text(block.get("content"), f"{where}.content")
            found.append({"role": "tool", "content": text, "tool_call_id": field(block, "tool_use_id", str, "")})
        else:
            texts.append(wire.content_text([block], f"{where}.content"))
    return [*found, *([{"role": given["role"], "content": "".join(texts)}] if texts or not found else [])]


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts, thinking, calls = list[str](), list[str](), []
    for block in blocks:
        if block.get("type") == "thinking":
            thinking.append(field(block, "thinking", str, ""))
        elif block.get("type") == "tool_use":
            function = {"name": field(block, "name", str, ""), "arguments": field(block, "input", dict, {})}
            calls.append({"id": field(block, "id", str, ""), "type": "function", "function": function})
        elif block.get("type") != "redacted_thinking":
            texts.append(wire.content_text([block], f"{where}.content"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thinking):
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise bad(f"{where}: must have a name and an input_schema", where)
    if given.get("type") not in (None, "custom"):
        raise bad(f"{where}: only tools of the type custom are offered, which the client runs", where)
    return wire.tool(given, "input_schema")


def answer(found: Sampled) -> dict[str, Any]:
    turn = found.turn
    if turn.stop is not None:
        reason = "stop_sequence"
    elif turn.finish_reason == "length":
        reason = "max_tokens"
    else:
        reason = "tool_use" if turn.message.get("tool_calls") else "end_turn"
    usage = {"input_tokens": turn.prompt, "output_tokens": len(turn.token_ids), "scalerl": wire.usage_of([turn])}
    return {
        "id": f"msg_{found.name}", "type": "message", "role": "assistant", "model": found.model,
        "content": _blocks(turn.message),
        "stop_reason": reason, "stop_sequence": turn.stop, "usage": usage,
    }  # fmt: skip


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if message["content"] or not message.get("tool_calls"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def events(found: Sampled) -> Iterator[str]:
    """The events that stream an answer."""
    whole = answer(found)
    usage = {**whole["usage"], "output_tokens": 0}
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield event("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        if block["type"] == "tool_use":
            empty = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        elif block["type"] == "thinking":
            empty = {**block, "thinking": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": ""},
            ]
        else:
            empty, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        yield event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=ended, usage=whole["usage"])
    yield event("message_stop")


def event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, allow_nan=False)}\n\n"

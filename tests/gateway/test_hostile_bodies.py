"""Bodies that no client should send: each is answered with a status that the documentation lists, and in its shape."""

import contextlib
import json
import pathlib
import random
from typing import Any

import httpx
import pytest

from tests.gateway.chat_model import QUESTION, TOOL, gateway, generator, model_folder

pytestmark = pytest.mark.slow

COUNT = 3000
TEXT = {"type": "text", "text": "2+2?"}
USE = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 2}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
ARGUMENTS = ["{", "[]", '{"a": "\\ud83d"}', '{"a": NaN}', '{"a": ' + "[" * 5000]
SAID = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Two."}
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny", "messages": [QUESTION, SAID, {"role": "tool", "content": "4", "tool_call_id": "c"}],
        "tools": [TOOL], "tool_choice": "auto", "n": 2, "stop": ["a", "b"], "logprobs": True, "top_logprobs": 1,
        "stream": False, "stream_options": {"include_usage": True}, "return_token_ids": True, "user": "u", **SAMPLING,
    },
    "/v1/completions": {
        "model": "tiny", "prompt": [[1, 2], "2+2"], "logprobs": 1, "stop": "x", "stream": True, "n": 1, **SAMPLING,
    },
    "/v1/messages": {
        "model": "tiny", "system": [TEXT], "stop_sequences": ["x"], "tool_choice": {"type": "auto"}, "stream": True,
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}, TEXT, USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}]},
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}], "top_k": 4, **SAMPLING,
    },
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [QUESTION]},
    "/inference/v1/generate": {
        "model": "tiny", "token_ids": [1, 2, 3], "sampling_params": {**SAMPLING, "stop_token_ids": [4], "logprobs": 1},
    },
    "/tokenize": {"model": "tiny", "prompt": "2+2", "add_special_tokens": True},
    "/detokenize": {"model": "tiny", "tokens": [1, 2, 3]},
    "/sessions": {"session": "a", "group": 3, "deadline": 4e9},
}  # fmt: skip
VALUES: list[Any] = [
    *ARGUMENTS,
    None, True, False, 0, -1, 1, 3.5, -0.0, 1e308, 10**400, 2**31, 2**63, 2**64, "", "x", "auto", "tiny", "\x00", "é",
    "\ud83d", "a" * 3000, [], {}, [[]], [None], [1, "a"], {"type": "text"}, {"role": "user"}, {"": None}, [TEXT], "..x",
]  # fmt: skip


def changed(value: Any, rng: random.Random) -> Any:
    """One place of it is another."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {other: inside for other, inside in value.items() if other != name}
        return {**value, name: changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], changed(value[at], rng), *value[at + rng.choice([0, 1, 1]) :]]
    return rng.choice(VALUES)


def body_of(rng: random.Random, route: str) -> bytes:
    value: Any = BODIES[route]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        value = changed(value, rng)
    data = json.dumps(value).encode()
    kind = rng.random()
    if kind < 0.03:
        return data[: rng.randrange(len(data))]
    if kind < 0.06:
        return bytes(rng.randbytes(40))
    if kind < 0.07:
        return b'{"messages":' + b"[" * 20_000
    return data.replace(b"0.7", rng.choice([b"NaN", b"1e999", b"-Infinity"])) if kind < 0.1 else data


def test_every_body_has_an_answer_in_its_shape(tmp_path: pathlib.Path) -> None:
    model, rng, seen = tmp_path / "model", random.Random(0), set[int]()
    model_folder(model)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(generator(tmp_path, model).wait()))
        process = stack.enter_context(gateway(tmp_path, model, f"--servers={server.address}", "--turns=20"))
        client = stack.enter_context(httpx.Client(base_url=f"http://{process.address}", timeout=60))
        for number in range(COUNT):
            route = rng.choice(sorted(BODIES))
            prefix = rng.choice(["", "", "/s/a", "/s/b", "/s/..x"]) if route != "/sessions" else ""
            body = body_of(rng, route)
            answer = client.post(prefix + route, content=body, headers={"x-stainless-retry-count": str(number % 2)})
            said = f"{number}: {route} {body[:2000]!r}: {answer.status_code} {answer.text[:500]}"
            assert answer.status_code in (200, 400, 404, 409), said
            seen.add(answer.status_code)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"] and error["type"], said
                assert (answer.json().get("type") == "error") == ("/v1/messages" in route), said
            elif answer.headers["content-type"].startswith("text/event-stream"):
                assert "error" not in [line.removeprefix("event: ") for line in answer.text.splitlines()], said
        assert seen == {200, 400, 404, 409}
        assert client.get("/health").status_code == 200
        assert "a request failed" not in process.log.read_text()

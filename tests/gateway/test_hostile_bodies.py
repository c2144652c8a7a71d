"""Bodies that no client should send: each is answered with a status that the documentation lists, and in its shape."""

import asyncio
import contextlib
import json
import pathlib
import random
from typing import Any

import pytest

from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.contract.security import Credentials
from scalerl_jax.gateway.app import Gateway, Options
from scalerl_jax.gateway.chat import Chat
from scalerl_jax.gateway.generators import Generators
from scalerl_jax.gateway.sessions import Sessions
from tests.gateway.chat_model import QUESTION, TOOL, VOCABULARY, generator, model_folder

pytestmark = pytest.mark.slow

COUNT = 10_000
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
    "/v1/responses": {
        "model": "tiny", "instructions": "You", "tool_choice": "auto", "stream": True, "max_output_tokens": 3,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Two."}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}], "temperature": 0.7,
        "text": {"format": {"type": "text"}}, "previous_response_id": None, "metadata": {},
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


async def post(app: Any, path: str, body: bytes, headers: dict[bytes, bytes]) -> tuple[int, str, bytes]:
    """(status, content type, body) of the application's answer; no connection in between, which would cost the most."""
    sent: list[Any] = []
    given = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.get_running_loop().create_future()

    async def receive() -> Any:
        return given.pop() if given else await asyncio.shield(left)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("gateway", 80),
        "headers": [(b"host", b"gateway"), *headers.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    kind = dict(sent[0]["headers"]).get(b"content-type", b"").decode()
    return sent[0]["status"], kind, b"".join(part["body"] for part in sent[1:])


async def send_all(chat: Chat, model: pathlib.Path, address: str) -> None:
    rng, seen = random.Random(0), set[int]()
    generators = Generators(
        [address], credentials=Credentials(), fingerprint=tokenizer_fingerprint(str(model)), vocabulary=VOCABULARY
    )
    sessions = Sessions(folder="", seed=0, most=1024, most_turns=20, most_bytes=2**30)
    app = Gateway(chat, generators, sessions, Options(("tiny",))).app()
    watching = asyncio.create_task(generators.run())
    await generators.ready(60)
    for number in range(COUNT):
        route = rng.choice(sorted(BODIES))
        prefix = rng.choice(["", "", "/s/a", "/s/b", "/s/..x"]) if route != "/sessions" else ""
        body = body_of(rng, route)
        retries = {b"x-stainless-retry-count": str(number % 2).encode()}
        status, kind, answer = await post(app, prefix + route, body, retries)
        said = f"{number}: {route} {body[:2000]!r}: {status} {answer[:500]!r}"
        assert status in (200, 400, 404, 409), said
        seen.add(status)
        if status != 200:
            error = json.loads(answer)["error"]
            assert error["message"] and error["type"], said
            assert (json.loads(answer).get("type") == "error") == ("/v1/messages" in route), said
        elif kind.startswith("text/event-stream"):
            assert "error" not in [line.removeprefix("event: ") for line in answer.decode().splitlines()], said
    assert seen == {200, 400, 404, 409}
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def test_every_body_has_an_answer_in_its_shape(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "model"
    chat = model_folder(model)
    with contextlib.closing(generator(tmp_path, model).wait()) as server:
        asyncio.run(send_all(chat, model, server.address))
    assert "a request failed" not in caplog.text

"""The HTTP server at its end, streams that wait, and bodies that are refused. 3 s of CPU."""

import asyncio
import contextlib
import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, Sampling
from scalerl_jax.contract.security import Credentials
from scalerl_jax.gateway import app
from scalerl_jax.gateway.agents import _FleetSampler
from scalerl_jax.gateway.chat import Chat
from scalerl_jax.gateway.generators import Busy, Full, Generators, NoServer
from scalerl_jax.gateway.server import listen, serve
from scalerl_jax.gateway.sessions import Sessions
from tests.gateway.chat_model import QUESTION, model_folder


@pytest.mark.parametrize("count", [1, 20])
def test_full_servers_are_busy_however_many(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(server: Any, request: GroupRequest) -> Completion:
        raise Full("full")

    async def generate() -> None:
        addresses = [f"127.0.0.1:{i + 1}" for i in range(count)]
        generators = Generators(addresses, credentials=Credentials(), fingerprint="", vocabulary=0)
        for server in generators.servers:
            server.status = pb.StatusReply(slots=1, server_id="s", maximum_tokens=64)
        monkeypatch.setattr(generators, "ask", ask)
        request = GroupRequest(0, "g", np.array([1], np.int32), (CompletionRequest(0, 0),), Sampling())
        with pytest.raises(Busy, match="the queue of every server is full"):
            await generators.generate(request, seconds=60)

    asyncio.run(generate())


def test_requests_that_are_cut_off_at_its_end_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    """With 503 and no traceback, or, where an answer has begun, with what there is of it."""
    waiting = asyncio.Event()

    async def poll(request: Request) -> Response:
        waiting.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def stream(request: Request) -> Response:
        async def parts():
            yield b"first"
            await asyncio.Event().wait()

        return StreamingResponse(parts())

    async def talk() -> None:
        over, app = False, Starlette(routes=[Route("/poll", poll), Route("/stream", stream)])
        listening = listen("127.0.0.1", 0)
        listening.listen()
        serving = asyncio.create_task(serve(app, listening, over=lambda: over, grace_seconds=1))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            polled = asyncio.create_task(http.get("/poll"))
            async with http.stream("GET", "/stream") as streamed:
                parts = streamed.aiter_raw()
                assert await anext(parts) == b"first"
                await waiting.wait()
                over = True
                await serving
                with contextlib.suppress(httpx.RemoteProtocolError):
                    assert [part async for part in parts] == []
            answer = await polled
        assert answer.status_code == 503 and answer.json()["detail"] == "the server is stopping"
        assert answer.json()["error"]["type"] == "server_error"

    with caplog.at_level(logging.WARNING):
        asyncio.run(talk())
    assert "Traceback" not in caplog.text and not any(record.exc_info for record in caplog.records)


class Sampler:
    """Answers, or fails, once the client has had a ping."""

    maximum_tokens, longest_prompt, there = 500, 499, ("one",)

    def __init__(self, said: Sequence[int]):
        self.pinged, self._said = asyncio.Event(), np.array(said, np.int32)
        self.fails = False

    def capacity(self, prompt: int) -> int:
        return self.maximum_tokens - prompt

    async def ready(self, seconds: float) -> None:
        pass

    async def generate(self, request: GroupRequest, *, seconds: float) -> tuple[Completion, str]:
        await self.pinged.wait()
        if self.fails:
            raise NoServer("no server is there")
        count = len(self._said)
        zeros, whole = np.zeros(count, np.float32), ((1, 0, count),)
        return Completion(0, request.group_id, 0, self._said, zeros, whole, (), "stop"), "a:1 x"


@pytest.mark.parametrize(
    ("route", "ping", "failed"),
    [
        ("/v1/chat/completions", ": ping", {"type": "server_error"}),
        ("/v1/messages", "event: ping", {"type": "overloaded_error"}),
    ],
)
def test_a_stream_that_waits_is_not_silent(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, route: str, ping: str, failed: dict[str, str]
) -> None:
    """Clients give up a connection without data. What goes wrong behind a ping is an event of the stream."""
    monkeypatch.setattr(app, "PING_SECONDS", 0.01)
    chat = model_folder(tmp_path / "model")

    async def talk() -> None:
        sampler = Sampler([*chat.tokenizer.encode("It is 4."), chat.tokenizer.eos_id])
        sessions = Sessions(folder="", seed=0, most=10, most_turns=10, most_bytes=2**20)
        gateway = app.Gateway(chat, sampler, sessions, app.Options(("tiny",))).app()

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            async def sending(message: Any) -> None:
                await send(message)
                if b"ping" in message.get("body", b""):
                    sampler.pinged.set()

            await gateway(scope, receive, sending)

        body = {"model": "tiny", "messages": [QUESTION], "max_tokens": 50, "stream": True}
        http = httpx.AsyncClient(transport=httpx.ASGITransport(watched), base_url="http://gateway", timeout=None)
        async with http:
            lines = (await http.post(route, json=body)).raise_for_status().text.splitlines()
            assert lines[0] == ping and "4." in "".join(lines) and "error" not in "".join(lines)
            sampler.pinged.clear()
            sampler.fails = True
            lines = (await http.post(route, json=body)).raise_for_status().text.splitlines()
            assert lines[0] == ping
            (data,) = [line.removeprefix("data: ") for line in lines if "no server is there" in line]
            assert json.loads(data)["error"].items() >= failed.items()

    asyncio.run(talk())


def exchange(
    chat: Chat, *asked: tuple[str, bytes | dict[str, Any] | None], folder: str = "",
    sampler: _FleetSampler | None = None,
) -> list[httpx.Response]:  # fmt: skip
    """The answers of a gateway to each (path, body), one after the other; None: GET. folder: of the journals."""

    async def talk() -> list[httpx.Response]:
        saying = Sampler([*chat.tokenizer.encode("It is 4."), chat.tokenizer.eos_id])
        saying.pinged.set()
        sessions = Sessions(folder=folder, seed=0, most=10, most_turns=10, most_bytes=2**20)
        transport = httpx.ASGITransport(app.Gateway(chat, sampler or saying, sessions, app.Options(("tiny",))).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=None) as http:
            found = []
            for path, body in asked:
                content = json.dumps(body).encode() if isinstance(body, dict) else body
                found.append(await http.request("GET" if body is None else "POST", path, content=content))
        sessions.close()
        return found

    return asyncio.run(talk())


@pytest.mark.parametrize("value", [b"1e999", b"-1e999", b"NaN", b'"\xed\xa0\x80"', b'"\xff"'])
def test_what_json_cannot_express_is_refused(chat: Chat, tmp_path: pathlib.Path, value: bytes) -> None:
    body = b'{"session":"a","prompt":"hi","x":' + value + b"}"
    answers = exchange(
        chat, ("/sessions", body), ("/sessions", None), ("/v1/completions", body), ("/sessions", {"session": "a"}),
        folder=str(tmp_path),
    )  # fmt: skip
    assert [answer.status_code for answer in answers] == [400, 200, 400, 200]
    message = answers[0].json()["error"]["message"]
    assert message.startswith("the body is not JSON: ") and "\n" not in message


OF_SAMPLING: dict[str, Any] = {
    "guided_choice": ["a"], "guided_regex": "a+", "guided_grammar": "x", "guided_decoding": {"regex": "a+"},
    "allowed_token_ids": [1], "bad_words": ["a"], "length_penalty": 2.0, "logits_processors": ["x"],
    "truncate_prompt_tokens": 3,
}  # fmt: skip
OF_TEXTS: dict[str, Any] = {"web_search_options": {}, "response_format": {"type": "json_object"}}
NEUTRAL = {"length_penalty": 1.0, "response_format": {"type": "text"}, "guided_regex": ""}


def test_sampling_that_is_not_offered_is_refused(chat: Chat) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [QUESTION]}, "/v1/completions": {"prompt": "2+2"},
    }  # fmt: skip
    fields = {**OF_SAMPLING, **OF_TEXTS}
    for route, body in bodies.items():
        answers = exchange(chat, *((route, {**body, name: value}) for name, value in fields.items()))
        refused = [(answer.status_code, answer.json()["error"]["param"]) for answer in answers]
        assert refused == [(400, name) for name in fields]
        neutral = [*({**body, name: None} for name in fields), {**body, **NEUTRAL}]
        assert all(answer.is_success for answer in exchange(chat, *((route, one) for one in neutral)))
    tokens = [{"token_ids": [5], "sampling_params": {name: value}} for name, value in OF_SAMPLING.items()]
    answers = exchange(chat, *(("/inference/v1/generate", body) for body in tokens))
    assert [answer.json()["error"]["param"] for answer in answers] == list(OF_SAMPLING)


@pytest.mark.parametrize("given", [True, False, None])
def test_an_answer_has_the_parallel_tool_calls_of_its_request(chat: Chat, given: bool | None) -> None:
    (answer,) = exchange(chat, ("/v1/responses", {"input": "2+2?", "parallel_tool_calls": given}))
    assert answer.json()["parallel_tool_calls"] is (given is not False)


def test_a_session_keeps_the_fields_that_it_has(chat: Chat, tmp_path: pathlib.Path) -> None:
    fields = {"session": "a", "deadline": 4e9, "group": 3}
    asked = [fields, fields, {"session": "a"}, {"session": "a", "deadline": 1}, {**fields, "group": 4}]
    for before in (0, 1):  # then it is restored from its journal
        answers = exchange(chat, *(("/sessions", body) for body in asked[before * 2 :]), folder=str(tmp_path))
        assert [answer.status_code for answer in answers] == [200, 200, 200, 409, 409][before * 2 :]
        assert answers[0].json()["about"] == {"deadline": 4e9, "group": 3}
        error, headers = answers[-1].json()["error"], answers[-1].headers
        assert error["message"] == "session a has other fields" and error["code"] == "session_differs"
        assert headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("sampler", "longest", "length"), [(None, 499, 500), (_FleetSampler(600, turn_tokens=550), 50, 600)]
)
def test_a_prompt_that_is_too_long_is_told_how_long_it_may_be(
    chat: Chat, sampler: Any, longest: int, length: int
) -> None:
    prompts = [{"prompt": [5] * count} for count in (longest, longest + 1)]
    fits, refused = exchange(chat, *(("/v1/completions", body) for body in prompts), sampler=sampler)
    assert fits.is_success or "only an agent of this run" in fits.text
    assert refused.json()["error"]["message"] == (
        f"prompt is too long: {longest + 1} tokens > {longest} maximum; this model's context length is {length} tokens"
    )

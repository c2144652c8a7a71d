"""The HTTP routes of the gateway, as a Starlette application.

A call names its session by the path, /s/{session}/v1/..., by the header X-Session-ID, or by the key
sk-scalerl-{session}. A call without a session is sampled and not recorded, and ends with its connection; a call of a
session continues and waits for a retry.
"""

import asyncio
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest
from scalerl_jax.gateway import anthropic_wire, openai_wire, responses_wire, wire
from scalerl_jax.gateway.chat import Chat, NotRendered
from scalerl_jax.gateway.generators import Busy, Late, NoServer, Refused, Sampler
from scalerl_jax.gateway.sessions import KEY, Session, SessionOver, Sessions, SessionsFull, Turn, all_of, branches
from scalerl_jax.gateway.wire import ApiError, Sampled, SampleRequest, bad
from scalerl_jax.system import metrics_endpoint

_log = logging.getLogger(__name__)

PING_SECONDS = 15.0  # of a stream that has no data yet: clients give up a silent connection
RETRY_SECONDS = 1  # for a client that found the queues full
METRICS_PREFIX = "scalerl_gateway_"
MOST_ABOUT_BYTES = 2**16  # of the fields sent to POST /sessions
_NO_RETRY = {"x-should-retry": "false"}  # of a 409, after which the OpenAI client would try again
_SESSION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclasses.dataclass(frozen=True)
class Options:
    """names: the model names that clients may use, the first is its own; "*": any. token: "": none is required.

    sampling: whose temperature and other sampling parameters apply, the client's or a run's.
    """

    names: tuple[str, ...]
    token: str = dataclasses.field(default="", repr=False)
    request_seconds: float = 600.0
    sampling: Literal["client", "run"] = "client"


class Gateway:
    """See the module. Its sessions, its generators and all of its requests live on one event loop."""

    def __init__(self, chat: Chat, generators: Sampler, sessions: Sessions, options: Options):
        self._chat, self._generators, self._sessions, self._options = chat, generators, sessions, options
        self._made = int(time.time())
        self._answers: Counter[tuple[str, ...]] = Counter()  # by status
        self._turns = self._tokens = 0  # sampled

    def app(self) -> Starlette:
        tokenizer, vocabulary = self._chat.tokenizer, self._chat.vocabulary
        recorded: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/chat/completions": self._route(
                lambda body: [openai_wire.chat(body)], openai_wire.chat_answer, openai_wire.chat_chunks
            ),
            "/v1/completions": self._route(
                lambda body: openai_wire.completions(body, tokenizer, vocabulary),
                openai_wire.completion_answer,
                openai_wire.completion_chunks,
            ),
            "/v1/responses": self._route(
                lambda body: [responses_wire.responses(body)], responses_wire.answer, responses_wire.events
            ),
            "/v1/messages": self._route(
                lambda body: [anthropic_wire.messages(body)], anthropic_wire.answer, anthropic_wire.events
            ),
            "/v1/messages/count_tokens": self._count_tokens,
            "/inference/v1/generate": self._route(
                lambda body: [openai_wire.generate(body, vocabulary)], openai_wire.generate_answer
            ),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        read = {
            "/v1/models": self._models,
            "/v1/models/{model:path}": self._one_model,
            "/health": self._health,
            "/metrics": self._metrics,
            "/version": self._version,
        }
        routes = [
            *(Route(prefix + path, self._guarded(serve), methods=["POST"])
              for prefix in ("", "/s/{session}") for path, serve in recorded.items()),
            *(Route(prefix + path, self._guarded(serve, open_to_all=path == "/health"), methods=["GET"])
              for prefix in ("", "/s/{session}") for path, serve in read.items()),
            Route("/sessions", self._guarded(self._open_session), methods=["POST"]),
            Route("/sessions", self._guarded(self._list_sessions), methods=["GET"]),
            Route("/sessions/{name}", self._guarded(self._get_session), methods=["GET"]),
            Route("/sessions/{name}", self._guarded(self._end_session), methods=["DELETE"]),
            Route("/sessions/{name}/trace", self._guarded(self._trace), methods=["GET"]),
        ]  # fmt: skip
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})

    # ---- around every route

    def _guarded(
        self, serve: Callable[[Request], Awaitable[Response]], *, open_to_all: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                if not open_to_all:
                    self._check_token(request)
                response = await serve(request)
            except ClientDisconnect:
                response = Response(status_code=400)  # no client reads it
            except Exception as error:  # noqa: BLE001 (every fault has an answer)
                response = _failed(request, _as_api_error(error))
            self._answers[str(response.status_code),] += 1
            return _identified(response)

        return answer

    def _check_token(self, request: Request) -> None:
        key = _key(request)
        secret = key.partition(":")[2] if key.startswith(KEY) else key
        wire.check_key(secret, self._options.token, whose="gateway")

    def _session(self, request: Request) -> Session | None:
        """The request's session; None if it names none."""
        key, name = _key(request), request.path_params.get("session") or request.headers.get("x-session-id")
        if name is None and key.startswith(KEY):
            name = key.removeprefix(KEY).partition(":")[0]
        return None if name is None else self._sessions.find(_session_name(name))

    def _chat_of(self, request: Request) -> Chat:
        session = self._sessions.open.get(request.path_params.get("session", ""))
        return self._chat if session is None else session.chat or self._chat

    # ---- routes that sample

    def _route(
        self,
        parse: Callable[[Mapping[str, Any]], Sequence[SampleRequest]],
        answer: Callable[[Sampled], dict[str, Any]],
        events: Callable[[Sampled], Iterator[str]] | None = None,
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that samples what `parse` reads in a body. events: the answer's, for bodies that ask for a stream."""

        async def serve(request: Request) -> Response:
            body = await wire.body_of(request)
            asked = parse(body if self._options.sampling == "client" else wire.without_sampling(body))
            sampling = self._ask(request, body, asked)
            return await _answered(request, sampling, answer, events if body.get("stream") is True else None)

        return serve

    def _ask(self, request: Request, body: Mapping[str, Any], asked: Sequence[SampleRequest]) -> "_StartedSampling":
        """Starts sampling for a request."""
        self._check_model(body)
        named = self._session(request)
        session = named or Session(uuid.uuid4().hex)
        route = request.url.path.removeprefix(f"/s/{request.path_params.get('session')}")
        what = json.dumps([route, body], sort_keys=True)
        digest = hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
        headers = request.headers
        retry, key = headers.get("x-stainless-retry-count", "0"), headers.get("idempotency-key", "")
        calls = [
            dataclasses.replace(one, digest=f"{digest}/{number}", key=key, retry=retry != "0")
            for number, one in enumerate(asked)
        ]
        seconds = min(self._options.request_seconds, session.deadline - time.time())

        async def sampled() -> Sampled:
            turns = await all_of([self._sample(session, call, seconds) for call in calls])
            return Sampled(turns, body, self._model(body), session, self._chat.tokenizer)

        task = asyncio.create_task(sampled())
        return _StartedSampling(session, task, alone=named is None, by=self._options.sampling)

    async def _sample(self, session: Session, asked: SampleRequest, seconds: float) -> tuple[Turn, ...]:
        chat = session.chat or self._chat

        async def generate(prompt: np.ndarray, name: str, index: int, seed: int) -> tuple[Completion, str]:
            if not self._generators.maximum_tokens:
                await self._generators.ready(seconds=min(seconds, 10.0))
            capacity = self._generators.capacity(len(prompt))
            if capacity < 1:
                session.full = True
                raise _too_long(len(prompt), self._generators)
            sampling = asked.sampling(chat.tokenizer.stop_ids, capacity=capacity)
            if len(sampling.stop_token_ids) > wire.MOST_STOPS:
                raise bad(f"stop_token_ids: {wire.MOST_STOPS} with the model's own are possible", "stop_token_ids")
            of_session = f"gateway/{session.name}" if session.name in self._sessions.open else ""
            wanted = (CompletionRequest(index, seed),)
            request = GroupRequest(0, f"gateway/{name}", prompt, wanted, sampling, session=of_session)
            made, server = await self._generators.generate(request, seconds=seconds)
            self._turns, self._tokens = self._turns + 1, self._tokens + len(made.token_ids)
            return made, server

        def read(prompt: np.ndarray, completion: Completion) -> tuple[Completion, Mapping[str, Any], str | None]:
            cut, text, stop = chat.text(completion, asked.stops)
            if asked.messages:
                return cut, chat.message(prompt, cut, text, tools=asked.tools), stop
            return cut, {"role": "assistant", "content": text}, stop

        return await session.ask(asked, chat=chat, generate=generate, read=read)

    # ---- routes that do not

    async def _count_tokens(self, request: Request) -> Response:
        body = await wire.body_of(request)
        self._check_model(body)
        asked = anthropic_wire.messages(body, counted=True)
        return JSONResponse({"input_tokens": len(self._chat_of(request).render(asked.messages, asked.tools))})

    async def _tokenize(self, request: Request) -> Response:
        body = await wire.body_of(request)
        wire.refuse(body, return_token_strs=False)
        tokenizer = self._chat.tokenizer
        if "messages" in body:
            asked = openai_wire.chat(body)
            ids = self._chat_of(request).render(asked.messages, asked.tools, asked.template_arguments)
        else:
            text = wire.field(body, "prompt", str, "")
            ids = tokenizer.encode_prompt(text) if body.get("add_special_tokens", True) else tokenizer.encode(text)
        length = self._generators.maximum_tokens
        return JSONResponse({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": None})

    async def _detokenize(self, request: Request) -> Response:
        body = await wire.body_of(request)
        ids = wire.token_ids(body.get("tokens"), "tokens", self._chat.vocabulary)
        return JSONResponse({"prompt": self._chat.tokenizer.decode(ids.tolist())})

    async def _models(self, _: Request) -> Response:
        found = [self._card(name) for name in self._options.names if name != "*"]
        return JSONResponse({"object": "list", "data": found})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params)
        return JSONResponse(self._card(request.path_params["model"]))

    def _card(self, name: str) -> dict[str, Any]:
        common = {"object": "model", "created": self._made, "owned_by": "scalerl"}
        return {"id": name, **common, "max_model_len": self._generators.maximum_tokens}

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self._generators.there else 503)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": importlib.metadata.version("scalerl-jax")})

    async def _metrics(self, _: Request) -> Response:
        text, kind = metrics_endpoint.page(self._families)
        return Response(text, headers={"content-type": kind})

    def _families(self) -> Iterator[metrics_endpoint.Family]:
        held = self._sessions.open.values()
        gauges = {
            "servers": ("Servers that are there.", len(self._generators.there)),
            "sessions": ("Sessions in memory.", len(held)),
            "session_bytes": ("What they hold, about.", sum(session.size for session in held)),
            "running_calls": ("Calls of sessions that are running.", sum(session.busy for session in held)),
        }
        counters = {
            "turns": ("Completions sampled.", self._turns),
            "sampled_tokens": ("Tokens sampled.", self._tokens),
        }
        for kind, families in (("gauge", gauges), ("counter", counters)):
            for name, (description, value) in families.items():
                yield METRICS_PREFIX + name, description, kind, (), {(): float(value)}
        yield METRICS_PREFIX + "answers", "Answers by their status.", "counter", ("status",), dict(self._answers)

    def _model(self, body: Mapping[str, Any]) -> str:
        return wire.field(body, "model", str) or self._options.names[0]

    def _check_model(self, body: Mapping[str, Any]) -> None:
        model, names = self._model(body), self._options.names
        if model not in names and "*" not in names:
            why = f"model {model[:100]!r} is not here: {', '.join(names)}"
            raise ApiError(404, why, param="model", code="model_not_found")

    # ---- sessions

    async def _open_session(self, request: Request) -> Response:
        body = await wire.body_of(request, empty=True)
        name = _session_name(wire.field(body, "session", str) or uuid.uuid4().hex)
        about = {key: value for key, value in body.items() if key != "session" and value is not None}
        wire.number(body, "deadline", None, 0, 1e12)
        if len(json.dumps(about)) > MOST_ABOUT_BYTES:
            raise bad(f"what is kept of a session is {MOST_ABOUT_BYTES} bytes of JSON at most")
        session = self._sessions.find(name, about)
        if about and session.about != about:
            raise ApiError(409, f"session {name} has other fields", code="session_differs", headers=_NO_RETRY)
        base = f"{str(request.base_url).rstrip('/')}/s/{name}"
        return JSONResponse({**self._summary(name), "openai_base_url": f"{base}/v1", "anthropic_base_url": base})

    async def _list_sessions(self, _: Request) -> Response:
        return JSONResponse({"sessions": [self._summary(name) for name in self._sessions.open]})

    async def _get_session(self, request: Request) -> Response:
        return JSONResponse(self._summary(self._open_name(request)))

    async def _end_session(self, request: Request) -> Response:
        name = self._open_name(request)
        found = self._summary(name)
        self._sessions.end(name)
        return JSONResponse({**found, "over": True, "running": 0})

    async def _trace(self, request: Request) -> Response:
        name = self._open_name(request)
        session, form = self._sessions.open[name], request.query_params.get("form", "turns")
        if form == "openenv":
            return JSONResponse(
                {"schema_version": 1, "turns": [_openenv_turn(session, turn) for turn in session.turns]}
            )
        if form != "turns":
            raise bad(f"form: turns and openenv are offered, not {form!r}", "form")
        turns = session.turns
        paths = [branch.turns for branch in branches(turns)]
        found = {**self._summary(name), "branches": paths, "trace": [turn.to_json() for turn in turns]}
        return JSONResponse(found)

    def _open_name(self, request: Request) -> str:
        """The name of an existing session; after a restart it is restored from its journal."""
        name = request.path_params["name"]
        if not _SESSION.fullmatch(name) or not self._sessions.known(name):
            raise ApiError(404, f"there is no session {name!r}", code="session_not_found")
        return self._sessions.find(name).name

    def _summary(self, name: str) -> dict[str, Any]:
        session = self._sessions.open[name]
        return {
            "session": name, "about": session.about, "turns": len(session.turns), "running": session.busy,
            "bytes": session.size, "over": session.over,
        }  # fmt: skip


class _StartedSampling:
    """The sampling started for one request. alone: without a session. by: whose sampling parameters apply."""

    def __init__(self, session: Session, task: "asyncio.Task[Sampled]", *, alone: bool, by: str):
        self.task, self._session, self._alone, self.by = task, session, alone, by

    def leave(self) -> None:
        """Called when the connection is gone or the request is answered."""
        self.task.cancel()
        if self._alone:
            self._session.close()


async def _answered(
    request: Request, sampling: _StartedSampling, answer: Callable[[Sampled], dict[str, Any]],
    events: Callable[[Sampled], Iterator[str]] | None,
) -> Response:  # fmt: skip
    """The response, or the stream of `events`. Raises an error before anything is sent."""
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait(
            {sampling.task, gone}, timeout=PING_SECONDS if events is not None else None,
            return_when=asyncio.FIRST_COMPLETED,
        )  # fmt: skip
    except BaseException:
        sampling.leave()
        raise
    finally:
        gone.cancel()
    if not sampling.task.done() and (events is None or gone.done()):
        sampling.leave()
        raise ClientDisconnect
    headers = {"x-scalerl-sampling": sampling.by}
    if sampling.task.done():
        try:
            found = sampling.task.result()
        finally:
            sampling.leave()
        steps = [step for turns in found.calls for turn in turns for step, _, _ in turn.versions]
        headers["x-scalerl-versions"] = f"{min(steps)}-{max(steps)}"
        if events is None:
            return JSONResponse(answer(found), headers=headers)
    assert events is not None

    async def stream() -> AsyncIterator[str]:
        try:
            while not sampling.task.done():
                yield anthropic_wire.event("ping") if _anthropic(request) else ": ping\n\n"
                await asyncio.wait({sampling.task}, timeout=PING_SECONDS)
            for event in events(sampling.task.result()):
                yield event
        except Exception as error:  # noqa: BLE001 (as in _guarded; the status has been sent)
            body = _as_api_error(error).body(anthropic=_anthropic(request))
            yield anthropic_wire.event("error", **body) if _anthropic(request) else f"data: {json.dumps(body)}\n\n"
        finally:
            sampling.leave()

    headers["cache-control"] = "no-cache"
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


def _openenv_turn(session: Session, turn: Turn) -> dict[str, Any]:
    """A TrainingTurn of OpenEnv."""
    prompt = session.prompt(turn).tolist()
    mask = np.r_[np.zeros(len(prompt), int), np.ones(len(turn.token_ids), int)]
    for start, end in turn.forced:
        mask[len(prompt) + start : len(prompt) + end] = 0
    return {
        "node_id": str(turn.turn_id), "prompt_token_ids": prompt, "completion_token_ids": turn.token_ids.tolist(),
        "per_token_logps": turn.logprobs.tolist(), "loss_mask": mask.tolist(),
        "response": {"message": turn.message, "finish_reason": turn.finish_reason},
        "metadata": {"parent": turn.parent, "versions": turn.versions},
    }  # fmt: skip


def _too_long(prompt: int, sampler: Sampler) -> ApiError:
    longest, length = sampler.longest_prompt, sampler.maximum_tokens
    why = f"prompt is too long: {prompt} tokens > {longest} maximum; this model's context length is {length} tokens"
    return ApiError(400, why, param="messages", code="context_length_exceeded")


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _session_name(name: str) -> str:
    if not _SESSION.fullmatch(name):
        raise bad("a session's name is 1 to 128 letters, digits and ._-, and begins with none of .-")
    return name


def _anthropic(request: Request) -> bool:
    return "/v1/messages" in request.url.path


def _as_api_error(error: Exception) -> ApiError:
    known: dict[type[Exception], tuple[int, str]] = {
        SessionOver: (409, "session_over"), SessionsFull: (429, "sessions_full"), Busy: (429, "queues_full"),
        NoServer: (503, "no_server"), Late: (504, "deadline"), Refused: (400, "refused"),
        NotRendered: (400, "not_rendered"), RecursionError: (400, "nested_too_deep"),
    }  # fmt: skip
    if isinstance(error, ApiError):
        return error
    status, code = known.get(type(error), (500, "fault"))
    if status == 500:
        _log.error("a request failed", exc_info=error)
        return ApiError(500, "the gateway failed; its log has the reason", code=code)
    headers = {409: _NO_RETRY, 429: {"retry-after": str(RETRY_SECONDS)}}.get(status, {})
    return ApiError(status, " ".join(str(error).split())[:1000], code=code, headers=headers)


def _failed(request: Request, error: ApiError) -> Response:
    return JSONResponse(
        error.body(anthropic=_anthropic(request)), status_code=error.status, headers=dict(error.headers)
    )


async def _no_route(request: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (404, None)
    why = f"{request.method} {request.url.path}: there is no such route"
    return _identified(_failed(request, ApiError(status, why, headers=headers)))


def _identified(response: Response) -> Response:
    """Adds a request id, under the header names of OpenAI's and of Anthropic's clients."""
    response.headers["x-request-id"] = response.headers["request-id"] = uuid.uuid4().hex
    return response

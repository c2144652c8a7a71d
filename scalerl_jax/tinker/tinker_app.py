"""The HTTP routes of Tinker's public client, as a Starlette application.

    at once       sessions, samplers, information about models and checkpoints
    later         create_model, load_weights, forward_backward, optim_step, save_weights, save_weights_for_sampler and
                  asample are answered with a request id, and retrieve_future waits for the answer

A call is in the store before its id is returned. A repeated call, under the same number and with the same body, is the
same call; with another body it is a 409. An unknown id is a 410: the client asks again. A request that cannot be done
is answered with {"error", "category"}, whose text the client raises.
"""

import asyncio
import datetime
import functools
import json
import re
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from scalerl_jax.gateway.wire import ApiError, bad, check_key, field, number, object_of, read_body
from scalerl_jax.tinker import tinker_wire
from scalerl_jax.tinker.sampling_calls import MOST_SAMPLES, SamplingCalls
from scalerl_jax.tinker.store import Conflict, Future, Store
from scalerl_jax.tinker.tinker_wire import RefusedCall
from scalerl_jax.tinker.training import TRAINED, Training

POLL_SECONDS = 30.0  # that retrieve_future waits, at most; the client gives up after 45
_PROTOBUF = "application/x-protobuf"
_ADAM = "adamw"
_API = "/api/v1"

Body = Mapping[str, Any]
Answer = dict[str, Any]  # JSON
Serve = Callable[[Request], Coroutine[Any, Any, Response]]


class Tinker:
    """See the module. It and all of its requests live on one event loop."""

    def __init__(
        self, store: Store, training: Training, sampling: SamplingCalls, *, family: str, capacity: Callable[[], int],
        folder: str, names: tuple[str, ...], token: str, longest: int,
    ):  # fmt: skip
        """family, folder: of the base model. longest: tokens of a datum. names: by which clients may call it, the first
        is its own; "*": any. token: of the key; "": any. capacity: tokens of prompt and completion."""
        self._store, self._training, self._sampling = store, training, sampling
        self._family, self._folder, self._names, self._capacity = family, folder, names, capacity
        self._token, self._most_bytes = token, tinker_wire.most_bytes(longest)
        self._answered: dict[str, asyncio.Event] = {}  # of the calls that a client waits for
        self._asked: dict[str, float] = {}  # run -> when its last call came

    def begin(self) -> None:
        """Resumes the calls that are not answered."""
        for future in self._store.unanswered("asample"):
            self._sampling.begin(future)
        self._training.wake()

    def app(self) -> Starlette:
        of_a_run = ("optim_step", "save_weights", "save_weights_external")
        routes = (
            *(("POST", f"/{kind}", _of_call(functools.partial(self._training_call, kind))) for kind in of_a_run),
            ("GET", "/healthz", _of_path(lambda: {"status": "ok"})),
            ("POST", "/client/config", _of_path(dict)),
            ("POST", "/create_session", _of_body(self._create_session)),
            ("POST", "/session_heartbeat", _of_body(self._heartbeat)),
            ("POST", "/sessions/{name}/finish", _of_path(self._finish)),
            ("POST", "/telemetry", self._telemetry),
            ("POST", "/get_info", _of_body(self._get_info)),
            ("POST", "/create_sampling_session", _of_body(self._create_sampling_session)),
            ("POST", "/weights_info", _of_body(self._weights_info)),
            ("GET", "/get_server_capabilities", _of_path(self._capabilities)),
            ("GET", "/samplers/{name}", _of_path(self._sampler)),
            ("GET", "/sessions", _of_page("sessions", self._sessions)),
            ("GET", "/sessions/{name}", _of_path(self._session)),
            ("GET", "/training_runs", _of_page("training_runs", self._runs)),
            ("GET", "/training_runs/{name}", _of_path(self._run)),
            ("GET", "/training_runs/{name}/checkpoints", _of_page("checkpoints", self._checkpoints)),
            ("DELETE", "/training_runs/{name}/checkpoints/{checkpoint:path}", self._delete_checkpoint),
            ("PUT", "/training_runs/{name}/checkpoints/{checkpoint:path}/ttl", self._set_expiry),
            ("GET", "/checkpoints", _of_page("checkpoints", self._checkpoints)),
            ("GET", "/futures/{name}/versions", _of_path(self._versions)),
            ("POST", "/create_model", _of_call(self._create_model)),
            ("POST", "/load_weights", _of_call(self._load_weights)),
            ("POST", "/forward_backward", self._forward_backward),
            ("POST", "/save_weights_for_sampler", _of_call(self._save_for_sampler)),
            ("POST", "/asample", _of_call(self._sample)),
            ("POST", "/retrieve_future", self._retrieve),
        )
        return Starlette(
            routes=[Route(_API + path, self._guarded(serve), methods=[method]) for method, path, serve in routes],
            exception_handlers={HTTPException: _no_route, Exception: _failed},
        )

    def answered(self, future: Future) -> None:
        if (event := self._answered.pop(future.id, None)) is not None:
            event.set()

    def _guarded(self, serve: Serve) -> Serve:
        async def answer(request: Request) -> Response:
            try:
                check_key(request.headers.get("x-api-key", ""), self._token, whose="server")
                if request.headers.get("content-encoding", "identity") != "identity":
                    raise bad("content-encoding: only bodies as they are, are offered")
                for checkpoint in self._store.expired():
                    self._forget(checkpoint)
                return await serve(request)
            except ClientDisconnect:
                return Response(status_code=400)  # no client reads it
            except Conflict as error:
                return JSONResponse({"detail": str(error)}, 409)
            except RefusedCall as error:
                return JSONResponse({"detail": str(error)}, 400)
            except ApiError as error:
                return JSONResponse({"detail": error.message}, error.status)

        return answer

    # ---- at once

    async def _telemetry(self, request: Request) -> Response:
        await read_body(request)
        return JSONResponse({"status": "accepted"})

    def _capabilities(self) -> Answer:
        longest = self._capacity()
        models = [
            {"model_name": name, "max_context_length": longest, "trainable": True, "sampleable": True}
            for name in self._names
            if name != "*"
        ]
        return {"supported_models": models}

    def _create_session(self, body: Body) -> Answer:
        return {"session_id": self._store.new_session(body), "type": "create_session"}

    def _heartbeat(self, body: Body) -> Answer:
        session = self._row("sessions", field(body, "session_id", str))
        if session["ended"]:
            raise ApiError(410, f"{session['id']} has ended")
        return {"type": "session_heartbeat"}

    def _finish(self, name: str) -> Answer:
        session = self._row("sessions", name)
        self._store.set("sessions", session["id"], ended=1)
        return {"session_id": session["id"], "type": "finish_session"}

    def _get_info(self, body: Body) -> Answer:
        model = self._row("models", field(body, "model_id", str))
        data = {"arch": self._family, "model_name": self._names[0], "tokenizer_id": self._folder}
        found = {"model_data": data, "model_id": model["id"], "model_name": data["model_name"], "type": "get_info"}
        found["optimizer_config"] = {"type": _ADAM}
        return {**found, "is_lora": model["rank"] > 0, "lora_rank": model["rank"]}

    def _create_sampling_session(self, body: Body) -> Answer:
        session = self._row("sessions", field(body, "session_id", str))["id"]
        seq = _sequence_number(body, "sampling_session_seq_id", "is missing")
        path, base = field(body, "model_path", str), field(body, "base_model", str)
        if path is not None:
            row = self._store.row("checkpoints", path)
            if row is None or row["kind"] != "sampler":
                raise ApiError(404, f"model_path: {path} is no checkpoint to sample with")
            model, folder = row["model"], row["folder"]
        else:
            self._check_base(base)
            model, folder = "", self._folder
        name = f"{session}:sample:{seq}"
        there = self._store.row("samplers", name)
        if there is not None and (there["folder"], there["path"]) != (folder, path):
            raise Conflict(f"{name} is another sampling session")
        self._store.put("samplers", id=name, session=session, model=model, folder=folder, path=path)
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    def _sampler(self, name: str) -> Answer:
        row = self._row("samplers", name)
        return {"sampler_id": row["id"], "base_model": self._names[0], "model_path": row["path"]}

    def _weights_info(self, body: Body) -> Answer:
        row = self._row("checkpoints", field(body, "tinker_path", str))
        model = self._row("models", row["model"])
        lora = json.loads(model["body"]).get("lora_config") or {}
        trained = {name: lora.get(name) is not False for name in TRAINED}
        found = {"base_model": self._names[0], "is_lora": model["rank"] > 0, "lora_rank": model["rank"]}
        return {**found, **trained, "optimizer_config": {"type": _ADAM}}

    def _sessions(self) -> list[str]:
        return [row["id"] for row in self._store.rows("sessions")]

    def _session(self, name: str) -> Answer:
        session = self._row("sessions", name)["id"]
        runs, samplers = (self._store.rows(table, session=session) for table in ("models", "samplers"))
        return {"training_run_ids": [row["id"] for row in runs], "sampler_ids": [row["id"] for row in samplers]}

    def _runs(self) -> list[Answer]:
        return [self._run_fields(row) for row in self._store.rows("models")]

    def _run(self, name: str) -> Answer:
        return self._run_fields(self._row("models", name))

    def _run_fields(self, row: Mapping[str, Any]) -> Answer:
        return {
            "training_run_id": row["id"],
            "base_model": self._names[0],
            "model_owner": "local",
            "is_lora": row["rank"] > 0,
            "lora_rank": row["rank"] or None,
            "corrupted": False,
            "last_request_time": _date(self._asked.get(row["id"], row["created"])),
            "last_checkpoint": self._newest_checkpoint(row["id"], "training"),
            "last_sampler_checkpoint": self._newest_checkpoint(row["id"], "sampler"),
            "user_metadata": json.loads(row["body"]).get("user_metadata"),
        }

    def _newest_checkpoint(self, model: str, kind: str) -> Answer | None:
        found = self._store.rows("checkpoints", model=model, kind=kind)
        return self._checkpoint_fields(max(found, key=lambda row: row["created"])) if found else None

    def _checkpoints(self, name: str | None = None) -> list[Answer]:
        """Those of one run, or all."""
        found = self._store.rows("checkpoints", **({} if name is None else {"model": name}))
        return [self._checkpoint_fields(row) for row in found]

    def _checkpoint_fields(self, row: Mapping[str, Any]) -> Answer:
        return {
            "checkpoint_id": row["id"].split("/", 3)[3],
            "checkpoint_type": row["kind"],
            "time": _date(row["created"]),
            "tinker_path": row["id"],
            "size_bytes": row["bytes"],
            "user_metadata": json.loads(row["body"])["user_metadata"],
            "expires_at": _date(row["expires"]) if row["expires"] else None,
        }

    async def _delete_checkpoint(self, request: Request) -> Response:
        self._forget(self._named_checkpoint(request))
        return Response(status_code=204)

    async def _set_expiry(self, request: Request) -> Response:
        """ttl_seconds from now; null: never."""
        body = object_of(await read_body(request))
        checkpoint, seconds = self._named_checkpoint(request), tinker_wire.seconds_to_live(body)
        self._store.set("checkpoints", checkpoint["id"], expires=time.time() + seconds if seconds else None)
        return Response(status_code=204)

    def _named_checkpoint(self, request: Request) -> dict[str, Any]:
        return self._row("checkpoints", "tinker://{name}/{checkpoint}".format(**request.path_params))

    def _forget(self, checkpoint: Mapping[str, Any]) -> None:
        # The files first: if this process ends in between, the remaining ones are still known.
        shutil.rmtree(checkpoint["folder"], ignore_errors=True)
        self._store.delete("checkpoints", checkpoint["id"])

    def _versions(self, name: str) -> Answer:
        """Which weights sampled each token: for each sequence [[run, weights, first token, end], ...]."""
        future = self._store.future(name)
        if future is None or future.kind != "asample" or future.answer is None:
            raise ApiError(404, f"{name} is no request that was sampled")
        return {"versions": json.loads(future.versions or "[]")}

    def _row(self, table: str, name: str | None) -> dict[str, Any]:
        row = self._store.row(table, name or "")
        if row is None:
            raise ApiError(404, f"{name} is not one of the {table.replace('_', ' ')}")
        return row

    def _check_base(self, name: str | None) -> None:
        if name is None or (name not in (*self._names, self._folder) and "*" not in self._names):
            raise RefusedCall(f"base_model: {name!r} is not served; there is {self._names[0]}")

    # ---- later

    def _create_model(self, body: Body, data: bytes) -> Answer:
        self._check_base(field(body, "base_model", str))
        lora = field(body, "lora_config", dict, {})
        for name in TRAINED:
            field(lora, name, bool)
        _check_optimizer(body)
        rank = number(lora, "rank", 0, 0, 2**16, whole=True)
        return self._new_run("create_model", data, body, rank=rank, seed=number(lora, "seed", 0, 0, 2**62, whole=True))

    def _load_weights(self, body: Body, data: bytes) -> Answer:
        if field(body, "model_id", str) is not None:
            return self._training_call("load_weights", body, data)
        path = tinker_wire.path_to_load(body)
        _check_optimizer(body)
        saved = self._store.row("checkpoints", path)
        if saved is None:
            raise ApiError(404, f"path: {path} is no checkpoint")
        origin = self._row("models", saved["model"])
        lora = json.loads(origin["body"]).get("lora_config")
        return self._new_run("load_weights", data, {**body, "lora_config": lora}, origin["rank"], origin["seed"])

    def _new_run(self, kind: str, data: bytes, body: Body, rank: int, seed: int) -> Answer:
        session = self._row("sessions", field(body, "session_id", str))["id"]
        name = f"{session}:train:{_sequence_number(body, 'model_seq_id', 'is missing')}"
        with self._store.writing():
            future, new = self._store.accept(name, 0, kind, data)
            if new:
                self._store.put(
                    "models", id=name, session=session, created=time.time(), rank=rank, seed=seed, body=json.dumps(body)
                )
        self._training.wake()
        return {"request_id": future.id, "model_id": name}

    async def _forward_backward(self, request: Request) -> Response:
        data = await read_body(request, most=self._most_bytes)
        if request.headers.get("content-type", "").split(";")[0] != _PROTOBUF:
            raise bad(f"content-type: must be {_PROTOBUF}")
        asked = tinker_wire.parse(data)
        body = {"model_id": asked.model_id, "seq_id": asked.seq_id}
        return JSONResponse(self._training_call("forward_backward", body, data))

    def _save_for_sampler(self, body: Body, data: bytes) -> Answer:
        # The client's own retry of this call has another number of the sampling session; that of the first stays.
        same = {name: value for name, value in body.items() if name != "sampling_session_seq_id"}
        return self._training_call("save_weights_for_sampler", body, data, json.dumps(same).encode())

    def _training_call(self, kind: str, body: Body, data: bytes, same: bytes | None = None) -> Answer:
        """A call of a run. What cannot be done is refused in its turn: the calls after it wait for its number."""
        model = self._row("models", field(body, "model_id", str))["id"]
        seq = number(body, "seq_id", None, 0, 2**62, whole=True)
        if not seq:  # the calls of a run are numbered from 1
            raise bad("seq_id: the number of the call is missing")
        future, _ = self._store.accept(model, seq, kind, data, same=same)
        self._asked[model] = time.time()
        self._training.wake()
        return {"request_id": future.id, "model_id": model}

    async def _retrieve(self, request: Request) -> Response:
        name = field(object_of(await read_body(request)), "request_id", str, "")
        future = self._store.future(name)
        if future is not None and future.answer is None:
            event = self._answered.setdefault(name, asyncio.Event())
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await event.wait()
            except TimeoutError:
                return JSONResponse({"type": "try_again", **self._queue_state(future)})
            future = self._store.future(name)
        if future is None or future.answer is None:
            raise ApiError(410, f"{name} is not known")
        return Response(future.answer, media_type=_PROTOBUF if future.proto else "application/json")

    def _queue_state(self, future: Future) -> dict[str, str]:
        holder = self._training.holder
        if future.kind != "asample" and holder not in ("", future.owner):
            return {"queue_state": "paused_capacity", "queue_state_reason": f"{holder} has the mesh"}
        return {"queue_state": "active"}

    # ---- sampling

    def _sample(self, body: Body, data: bytes) -> Answer:
        sampler = self._row("samplers", field(body, "sampling_session_id", str))["id"]
        seq = _sequence_number(body, "seq_id", "the number of the call is missing")
        count = number(body, "num_samples", 1, 1, MOST_SAMPLES, whole=True)
        future, new = self._store.accept(sampler, seq, "asample", data)
        if new:
            self._sampling.begin(future)
        sequences = [f"{future.id}:{i}" for i in range(count)]
        return {"request_id": future.id, "sample_sequence_ids": sequences}


def _of_path(serve: Callable[..., Answer]) -> Serve:
    """Answers a request by the parameters of its path alone."""

    async def answer(request: Request) -> Response:
        return JSONResponse(serve(**request.path_params))

    return answer


def _of_page(what: str, serve: Callable[..., list[Any]]) -> Serve:
    """Answers with the part of a list that the query's offset and limit ask for; by default all of it."""

    async def answer(request: Request) -> Response:
        found = serve(**request.path_params)
        cursor = {"offset": 0, "limit": len(found), "total_count": len(found)}
        for name in ("offset", "limit"):
            if (value := request.query_params.get(name)) is not None:
                if not re.fullmatch("[0-9]{1,18}", value):
                    raise bad(f"{name}: must be a whole number of at least 0")
                cursor[name] = int(value)
        return JSONResponse({what: found[cursor["offset"] :][: cursor["limit"]], "cursor": cursor})

    return answer


def _of_body(serve: Callable[[Body], Answer]) -> Serve:
    """Answers a request by its body, a JSON object."""
    return _of_call(lambda body, _: serve(body))


def _of_call(serve: Callable[[Body, bytes], Answer]) -> Serve:
    """Answers a request by its body, as a JSON object and as received."""

    async def answer(request: Request) -> Response:
        data = await read_body(request)
        return JSONResponse(serve(object_of(data), data))

    return answer


def _check_optimizer(body: Body) -> None:
    kind = field(field(body, "optimizer_config", dict, {}), "type", str, _ADAM)
    if kind != _ADAM:
        raise RefusedCall(f"optimizer_config: {kind} is not offered; there is {_ADAM}")


def _sequence_number(body: Body, name: str, missing: str) -> int:
    seq: int | None = number(body, name, None, 0, 2**62, whole=True)
    if seq is None:
        raise bad(f"{name}: {missing}")
    return seq


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


async def _failed(request: Request, error: Exception) -> Response:
    # Not 500, which the client repeats at once, for minutes.
    return JSONResponse({"detail": f"{request.url.path}: the server failed: {error!r}"}, 400)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": f"{request.method} {request.url.path}: {error.detail}"}, error.status_code)

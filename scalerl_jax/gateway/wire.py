"""What the protocols share: a body's fields, the request to the generators, and errors in either shape."""

import dataclasses
import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from scalerl_jax.contract import limits
from scalerl_jax.contract.codec import Sampling
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.environments.tool_calls import check_json
from scalerl_jax.gateway.sessions import ClientRequest, Session, Turn

MOST_BODY_BYTES = 32 * 2**20
MOST_CHOICES = 128
MOST_STOPS = 16  # tokens, which every server accepts

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# Status -> the error's type in OpenAI's shape, and in Anthropic's.
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    409: ("conflict_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "timeout_error"),
}


class ApiError(Exception):
    """An error answer to a client. param: the field at fault; code: a machine-readable name."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    def body(self, *, anthropic: bool) -> dict[str, Any]:
        openai_type, anthropic_type = _TYPES[self.status]
        if anthropic:
            return {"type": "error", "error": {"type": anthropic_type, "message": self.message}}
        error = {"message": self.message, "type": openai_type, "param": self.param, "code": self.code}
        return {"error": error}


def check_key(shown: str, token: str, *, whose: str) -> None:
    """Raises ApiError if a call does not carry the token; "": none is required."""
    if token and not hmac.compare_digest(*(hashlib.blake2b(key.encode()).digest() for key in (shown, token))):
        raise ApiError(401, f"the key is not the {whose}'s token", code="invalid_api_key")


def bad(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


async def body_of(request: Request, *, empty: bool = False) -> dict[str, Any]:
    """The request's JSON object. Raises ApiError. empty: the body may be empty."""
    data = await read_body(request)
    return {} if empty and not data else object_of(data)


async def read_body(request: Request, *, most: int = MOST_BODY_BYTES) -> bytes:
    """most: bytes. Raises ApiError."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise ApiError(413, f"the body is longer than {most} bytes", headers={"connection": "close"})
    return bytes(data)


def object_of(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises ApiError."""
    try:
        # Decoded here: json.loads lets half of a surrogate pair through.
        body = json.loads(data.decode(), parse_constant=_finite, parse_float=_finite)
        if _SURROGATE.search(data):
            check_json(body)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(body, dict):
        raise bad("the body is not a JSON object")
    return body


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


@dataclasses.dataclass(frozen=True)
class SampleRequest(ClientRequest):
    """One prompt, how it is sampled, and how its completions are read."""

    max_tokens: int | None = None  # None: as many as fit
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def sampling(self, stop_ids: Sequence[int], *, capacity: int) -> Sampling:
        """stop_ids: the model's own. capacity: tokens that fit after the prompt."""
        greedy = self.temperature < limits.TEMPERATURES[0]  # colder than any engine samples
        return Sampling(
            temperature=1.0 if greedy else self.temperature,
            top_p=self.top_p,
            top_k=1 if greedy else self.top_k,
            answer_budget=min(capacity, self.max_tokens or capacity),
            stop_token_ids=tuple(dict.fromkeys([*stop_ids, *self.stop_token_ids])),
        )


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What was sampled for a request."""

    calls: Sequence[Sequence[Turn]]  # the choices of each prompt
    body: Mapping[str, Any]
    model: str  # its name in the answer
    session: Session
    tokenizer: Tokenizer

    @property
    def turn(self) -> Turn:
        """The first one, which is the only one in most protocols."""
        return self.calls[0][0]

    @property
    def name(self) -> str:
        """The answer's id, before which each protocol writes its own prefix; a retry's is the same."""
        return f"{self.session.name}-{self.turn.turn_id}"

    def prompt(self, number: int = 0) -> list[int]:
        """The token ids of the prompt with this number."""
        return self.session.prompt(self.calls[number][0]).tolist()


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """The field's value; null means the default. Raises ApiError if it is of another kind."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise bad(f"{name}: must be {' or '.join(_WORDS[one] for one in kinds)}", name)
    return value


_WORDS = {
    bool: "true or false", str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object",
}  # fmt: skip


def number(body: Mapping[str, Any], name: str, default: Any, low: float, high: float, *, whole: bool = False) -> Any:
    value = field(body, name, int if whole else (int, float), default)
    if value is not None and not low <= value <= high:
        raise bad(f"{name}: must be from {low:g} to {high:g}", name)
    return value


_DRAWING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip


def sampling_fields(body: Mapping[str, Any], *, stop: str = "stop") -> dict[str, Any]:
    """The sampling fields of SampleRequest. stop: the field with the stop strings. Raises ApiError."""
    stops = field(body, stop, (str, list), [])
    stops = [stops] if isinstance(stops, str) else stops
    if not all(isinstance(one, str) and one for one in stops):
        raise bad(f"{stop}: must be texts that are not empty", stop)
    return {
        "temperature": number(body, "temperature", 1.0, 0, limits.TEMPERATURES[1]),
        "top_p": number(body, "top_p", 1.0, limits.SMALLEST_TOP_P, 1),
        "top_k": max(0, number(body, "top_k", 0, -1, 2**31 - 1, whole=True)),
        "seed": number(body, "seed", None, -(2**63), 2**64 - 1, whole=True),
        "stops": tuple(stops),
    }


def may_call_tools(tool_choice: Any) -> bool:
    """Whether the model may call tools. Raises ApiError if it is to call a certain one, which is not offered."""
    if tool_choice not in ("auto", "none"):
        raise bad("tool_choice: auto and none are offered", "tool_choice")
    return tool_choice == "auto"


def tool(given: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """A tool as chat templates have it. schema: the field with the schema of its parameters. Raises ApiError."""
    function = {
        "name": given["name"],
        "description": field(given, "description", str, ""),
        "parameters": field(given, schema, dict, {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}


def without_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body without the fields that say how tokens are drawn."""
    kept = {name: value for name, value in body.items() if name not in _DRAWING}
    inner = kept.get("sampling_params")
    return {**kept, "sampling_params": without_sampling(inner)} if isinstance(inner, dict) else kept


def refuse(body: Mapping[str, Any], **neutral: Any) -> None:
    """Raises ApiError if an unsupported field requests something. neutral: each field's value that requests nothing."""
    for name, value in neutral.items():
        if body.get(name) not in (None, value, *([[], {}] if value is None else [])):
            raise bad(f"{name}: is not offered", name)


def token_ids(ids: Any, name: str, vocabulary: int) -> np.ndarray:
    """[tokens] int32. Raises ApiError."""
    if not isinstance(ids, list) or not ids:
        raise bad(f"{name}: must be token ids, one at least", name)
    if not all(type(one) is int and 0 <= one < vocabulary for one in ids):
        raise bad(f"{name}: token ids are from 0 to {vocabulary - 1}", name)
    return np.asarray(ids, np.int32)


def content_text(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a string or of its parts. Raises ApiError if a part is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad(f"{where}: must be a text or a list of parts", where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise bad(f"{where}: only parts of the type text are understood", where)
    return "".join(part["text"] for part in content)


def usage_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """Which versions sampled which tokens: spans over all choices' tokens, one choice after the other."""
    versions, forced, at = [], [], 0
    for turn in turns:
        versions += [[step, start + at, end + at] for step, start, end in turn.versions]
        forced += [[start + at, end + at] for start, end in turn.forced]
        at += len(turn.token_ids)
    return {"versions": versions, "forced": forced}

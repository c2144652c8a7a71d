"""Plain Python values for what travels on the wire, and the conversion both ways.

Everything outside this package uses the frozen dataclasses below; only this file touches the generated protobuf
classes' bulk fields. Arrays are little-endian on the wire whatever the machine.

Left out on purpose: nothing here knows an engine or a trainer; numpy and protobuf are all it needs.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.contract import limits
from scalerl_jax.contract import rollout_pb2 as pb

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORTED: "aborted",
}
_EXPERT_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
_FINISH_CODES = {name: code for code, name in FINISH_REASONS.items()}

# Fields that have one name, and one meaning, on the wire and here.
_OF_REQUEST = ("incarnation", "group_id", "minimum_step", "router_replay", "session")
_OF_SAMPLING = ("temperature", "top_p", "top_k", "answer_budget")
_OF_COMPLETION = ("incarnation", "group_id", "index", "queued_seconds", "sampling_seconds")


@dataclasses.dataclass(frozen=True, order=True)
class Version:
    """The policy after `step` batches of the trainer process `incarnation` (0: no trainer)."""

    incarnation: int
    step: int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are drawn; budgets are in sampled tokens."""

    temperature: float = 1.0
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    answer_budget: int = 1
    stop_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Interruption:
    """The forced phrase, and the tokens that end thinking; both empty if a completion is all answer."""

    text_token_ids: tuple[int, ...] = ()
    end_of_thinking_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    index: int
    seed: int
    thinking_budget: int = 0


@dataclasses.dataclass(frozen=True)
class GroupRequest:
    """Some completions of one prompt."""

    incarnation: int
    group_id: str
    prompt: np.ndarray  # [tokens] int32
    completions: tuple[CompletionRequest, ...]
    sampling: Sampling
    interruption: Interruption = Interruption()
    minimum_step: int = 0
    pinned_step: int | None = None
    router_replay: bool = False  # its completions must include their experts
    session: str = ""  # that its completions are turns of; empty: none

    def most_tokens(self, wanted: CompletionRequest) -> int:
        """Most tokens of one of its completions, forced tokens included."""
        return wanted.thinking_budget + len(self.interruption.text_token_ids) + self.sampling.answer_budget


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished completion. `versions` cover [0, tokens) in order; `forced` tokens were fed, not sampled."""

    incarnation: int
    group_id: str
    index: int
    token_ids: np.ndarray  # [tokens] int32
    logprobs: np.ndarray  # [tokens] float32, 0 at forced tokens
    versions: tuple[tuple[int, int, int], ...]  # (step, start, end)
    forced: tuple[tuple[int, int], ...]  # (start, end)
    finish_reason: str  # "stop" | "length" | "aborted"
    queued_seconds: float = 0.0
    sampling_seconds: float = 0.0
    # [prompt + tokens - 1, layers, experts per token] uint8 | uint16: of each token fed; None: not reported
    experts: np.ndarray | None = None
    # The fields below are never on the wire. (start, end) of an environment's replies between turns, among `forced`.
    replies: tuple[tuple[int, int], ...] = ()
    # Of an agent, whose turns may form several paths: the prompt of this branch, [tokens] int32 (None: the row's), and
    # the branches after the first one. A turn that several branches share is a reply in all but the first.
    prompt: np.ndarray | None = None
    others: tuple["Completion", ...] = ()

    @property
    def branches(self) -> tuple["Completion", ...]:
        """The sequences to train on."""
        return (self, *self.others)

    @property
    def interrupted(self) -> bool:
        """Whether the interruption phrase was fed."""
        return any(len(branch.forced) > len(branch.replies) for branch in self.branches)

    def token_steps(self) -> np.ndarray:
        """The policy step that sampled (or fed) each token: [tokens] int64."""
        steps = np.zeros(len(self.token_ids), np.int64)
        for step, start, end in self.versions:
            steps[start:end] = step
        return steps

    def sampled(self) -> np.ndarray:
        """True at the tokens that were sampled, the loss tokens: [tokens] bool."""
        mask = np.ones(len(self.token_ids), bool)
        for start, end in self.forced:
            mask[start:end] = False
        return mask

    def sampled_ids(self) -> np.ndarray:
        """The sampled tokens of every branch: [tokens] int32."""
        return np.concatenate([branch.token_ids[branch.sampled()] for branch in self.branches])


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """A sequence to score from the token at position `first` on: n = tokens - first of them."""

    token_ids: np.ndarray  # [tokens] int32
    first: int = 0
    top_k: int = 0
    target_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # [n, k]; -1: none

    def __post_init__(self) -> None:
        if not self.target_ids.size:  # k is 0
            none = np.zeros((max(0, len(self.token_ids) - self.first), 0), np.int32)
            object.__setattr__(self, "target_ids", none)

    def ids(self) -> np.ndarray:
        """[n, 1 + k] int32: each token itself, then its targets; -1 where nothing is requested or predicted."""
        ids = np.concatenate([self.token_ids[self.first :, None], self.target_ids], axis=1).astype(np.int32)
        ids[: self.first == 0] = -1
        return ids


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of those n tokens, each given the ones before it, at temperature 1. Position 0 has 0, and -1 as ids."""

    logprobs: np.ndarray  # [n] float32
    top_ids: np.ndarray  # [n, top_k] int32, the most likely first
    top_logprobs: np.ndarray  # [n, top_k] float32
    target_logprobs: np.ndarray  # [n, k] float32; 0 where there is no target


@dataclasses.dataclass(frozen=True)
class TeacherScores:
    """A teacher's log-probs of one sequence of t tokens, at temperature 1; the first token, which nothing predicts, has
    0 and no ids.

    ids: the k ids that are compared at each token, each once and -1 for none: the teacher's most likely ones or the
    student's, depending on the form of distillation. None: there are only the log-probs of the sequence itself.
    """

    logprobs: np.ndarray  # [t] float32, of the sequence's own tokens
    ids: np.ndarray | None = None  # [t, k] int32
    top_logprobs: np.ndarray | None = None  # [t, k] float32, of these ids; 0 where there is none


def encode_ids(ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def decode_ids(data: bytes) -> np.ndarray:
    """[tokens] int32. Raises ValueError if the bytes are not whole int32s."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


def _id_tuple(data: bytes) -> tuple[int, ...]:
    return tuple(decode_ids(data).tolist())


def encode_floats(values: Sequence[float] | np.ndarray) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def decode_floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def _same(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def version_to_proto(version: Version) -> pb.Version:
    return pb.Version(incarnation=version.incarnation, step=version.step)


def version_from_proto(message: pb.Version) -> Version:
    return Version(message.incarnation, message.step)


def request_to_proto(request: GroupRequest) -> pb.GenerateRequest:
    sampling, interruption = request.sampling, request.interruption
    return pb.GenerateRequest(
        **_same(request, _OF_REQUEST),
        prompt_token_ids=encode_ids(request.prompt),
        completions=[pb.CompletionRequest(**vars(wanted)) for wanted in request.completions],
        sampling=pb.Sampling(**_same(sampling, _OF_SAMPLING), stop_token_ids=encode_ids(sampling.stop_token_ids)),
        interruption=pb.Interruption(
            text_token_ids=encode_ids(interruption.text_token_ids),
            end_of_thinking_token_ids=encode_ids(interruption.end_of_thinking_token_ids),
        ),
        pinned_step=request.pinned_step,
    )


def request_from_proto(message: pb.GenerateRequest) -> GroupRequest:
    """Raises ValueError on bytes that are no tokens, and on a name that is too long.

    The server decides whether it can be served (rollout_server/engines/engine.py).
    """
    for field in ("group_id", "session"):
        if (length := len(getattr(message, field))) > limits.MAXIMUM_NAME_CHARACTERS:
            raise ValueError(f"a {field} of {length} characters, at most {limits.MAXIMUM_NAME_CHARACTERS} may be")
    return GroupRequest(
        **_same(message, _OF_REQUEST),
        prompt=decode_ids(message.prompt_token_ids),
        completions=tuple(CompletionRequest(c.index, c.seed, c.thinking_budget) for c in message.completions),
        sampling=Sampling(
            **_same(message.sampling, _OF_SAMPLING), stop_token_ids=_id_tuple(message.sampling.stop_token_ids)
        ),
        interruption=Interruption(
            _id_tuple(message.interruption.text_token_ids), _id_tuple(message.interruption.end_of_thinking_token_ids)
        ),
        pinned_step=message.pinned_step if message.HasField("pinned_step") else None,
    )


def completion_to_proto(completion: Completion) -> pb.Completion:
    return pb.Completion(
        **_same(completion, _OF_COMPLETION),
        token_ids=encode_ids(completion.token_ids),
        logprobs=encode_floats(completion.logprobs),
        versions=[pb.VersionSpan(step=s, start=a, end=b) for s, a, b in completion.versions],
        forced=[pb.Span(start=a, end=b) for a, b in completion.forced],
        finish_reason=_FINISH_CODES[completion.finish_reason],
        experts=None if completion.experts is None else _experts_to_proto(completion.experts),
    )


def completion_from_proto(message: pb.Completion) -> Completion:
    """Raises ValueError on a completion that breaks the contract: it must not reach the loss."""
    name = f"completion {message.group_id!r}/{message.index}"
    token_ids, logprobs = decode_ids(message.token_ids), decode_floats(message.logprobs)
    if not len(token_ids):
        raise ValueError(f"{name}: no tokens")
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{name}: {len(token_ids)} tokens but {len(logprobs)} log-probabilities")
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise ValueError(f"{name}: log-probabilities that are not finite or above 0")
    if message.finish_reason not in FINISH_REASONS:
        raise ValueError(f"{name}: finish reason {message.finish_reason} is unknown")
    for field in ("versions", "forced"):  # before an object is made of each
        if (count := len(getattr(message, field))) > len(token_ids):
            raise ValueError(f"{name}: {count} {field} of {len(token_ids)} tokens")
    versions = tuple((v.step, v.start, v.end) for v in message.versions)
    _check_cover(name, versions, len(token_ids))
    forced = tuple((s.start, s.end) for s in message.forced)
    edges = [edge for span in forced for edge in span]
    if any(start >= end for start, end in forced) or edges != sorted(edges) or (edges and edges[-1] > len(token_ids)):
        raise ValueError(f"{name}: forced spans that are empty, out of order or outside the completion")
    return Completion(
        **_same(message, _OF_COMPLETION),
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        forced=forced,
        finish_reason=FINISH_REASONS[message.finish_reason],
        experts=_experts_from_proto(name, message.experts) if message.HasField("experts") else None,
    )


def expert_dtype(experts: int) -> np.dtype[Any]:
    """The dtype in which the ids of that many experts travel."""
    return np.dtype(np.uint8 if experts <= 2**8 else np.uint16)


def _experts_to_proto(experts: np.ndarray) -> pb.Experts:
    _, layers, each = experts.shape
    assert experts.dtype in _EXPERT_DTYPES.values(), experts.dtype
    ids = experts.astype(experts.dtype.newbyteorder("<")).tobytes()
    return pb.Experts(layers=layers, experts_per_token=each, expert_bytes=experts.dtype.itemsize, ids=ids)


def _experts_from_proto(name: str, message: pb.Experts) -> np.ndarray:
    layers, each, size = message.layers, message.experts_per_token, message.expert_bytes
    dtype, row = _EXPERT_DTYPES.get(size), layers * each * size
    if dtype is None or not row or len(message.ids) % row:
        raise ValueError(
            f"{name}: {len(message.ids)} bytes of experts, for {layers} layers with {each} of {size} bytes each"
        )
    return np.frombuffer(message.ids, dtype.newbyteorder("<")).astype(dtype).reshape(-1, layers, each)


def _check_cover(name: str, versions: Iterable[tuple[int, int, int]], tokens: int) -> None:
    at, latest = 0, None
    for step, start, end in versions:
        if start != at or end <= start:
            raise ValueError(f"{name}: version spans do not cover the tokens in order")
        if latest is not None and step < latest:
            raise ValueError(f"{name}: version {step} follows version {latest}")
        at, latest = end, step
    if at != tokens:
        raise ValueError(f"{name}: version spans end at {at} of {tokens} tokens")


def score_request_to_proto(request: ScoreRequest) -> pb.ScoreRequest:
    ids = {name: encode_ids(getattr(request, name)) for name in ("token_ids", "target_ids")}
    return pb.ScoreRequest(**ids, first=request.first, top_k=request.top_k)


def score_request_from_proto(message: pb.ScoreRequest) -> ScoreRequest:
    """Raises ValueError on bytes that are not the right number of ids. The server decides whether it can be served."""
    token_ids, first, targets = decode_ids(message.token_ids), message.first, len(message.target_ids)
    if first >= max(len(token_ids), 1):
        raise ValueError(f"first is {first}, of {len(token_ids)} tokens to score")
    rows = len(token_ids) - first
    if targets % (4 * max(rows, 1)):
        raise ValueError(f"{targets} bytes of target ids, not as many int32s for each of {rows} tokens")
    target_ids = decode_ids(message.target_ids).reshape(max(rows, 1), -1)
    return ScoreRequest(token_ids, first, message.top_k, target_ids)


def scores_to_proto(scores: Scores, version: Version) -> pb.ScoreReply:
    return pb.ScoreReply(
        logprobs=encode_floats(scores.logprobs),
        version=version_to_proto(version),
        top_ids=encode_ids(scores.top_ids),
        top_logprobs=encode_floats(scores.top_logprobs),
        target_logprobs=encode_floats(scores.target_logprobs),
    )


def scores_from_proto(message: pb.ScoreReply, request: ScoreRequest, *, vocabulary: int) -> Scores:
    """Raises ValueError, in one line, on a reply that breaks the contract: it must not reach the loss."""
    rows, targets = len(request.token_ids) - request.first, request.target_ids
    top = (rows, request.top_k)
    shapes = {"logprobs": (rows,), "top_ids": top, "top_logprobs": top, "target_logprobs": (rows, targets.shape[1])}
    arrays: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        data, decode = getattr(message, name), decode_ids if name == "top_ids" else decode_floats
        if len(data) != 4 * math.prod(shape):
            raise ValueError(f"scores: {len(data)} bytes of {name}, which are {list(shape)} numbers of 4 bytes")
        arrays[name] = decode(data).reshape(shape)
        if name != "top_ids" and not (np.isfinite(arrays[name]) & (arrays[name] <= 1e-3)).all():
            raise ValueError(f"scores: {name} that are not finite or above 0")
    scores, start = Scores(**arrays), int(request.first == 0)
    ids, logprobs, targeted = scores.top_ids[start:], scores.top_logprobs[start:], scores.target_logprobs
    wrong = {
        "numbers for the first token, which nothing predicts": bool(start) and (
            scores.logprobs[0] or (scores.top_ids[0] != -1).any() or scores.top_logprobs[0].any() or targeted[:1].any()
        ),
        f"top_ids outside [0, {vocabulary})": ids.size and not (ids.min() >= 0 and ids.max() < vocabulary),
        "top_ids with an id twice for one token": (np.diff(np.sort(ids)) == 0).any(),
        "top_logprobs that do not descend": (np.diff(logprobs) > 0).any(),
        "top_logprobs of more than all of the mass": (np.exp(logprobs).sum(axis=1) > 1 + 1e-3).any(),
        "target_logprobs where there is no target": targeted.size and targeted[targets < 0].any(),
    }  # fmt: skip
    for what, is_so in wrong.items():
        if is_so:
            raise ValueError(f"scores: {what}")
    return scores

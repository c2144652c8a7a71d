"""Converts clients' protobuf requests to segments and objectives of the trainer, and encodes the answers.

    cross_entropy         - sum w logp                                       reinforce, with w as the advantage
    importance_sampling   - sum r A                                          clip, without a bound
    ppo                   - sum min(r A, clip(r, low, high) A)               clip
    cispo                 - sum sg(clip(r, low, high)) A logp                cispo
    gspo                  as ppo, with s = exp(mean log r) instead of r      gspo, whose tokens are the sequence's
    dro                   - sum (A logp - beta / 2 (log r)^2)                dro

r = exp(logp - logprobs), the sums over all tokens of all data; a token with advantage 0 does not count. A datum of n
input tokens is one segment of n + 1: targets are the inputs shifted by one, and the last target. Other targets, and
several for a token ([n, k], with as many weights), are for cross_entropy alone: they are the segment's soft targets.

Numbers are those of loss_fn_config: `clip_low_threshold` and `clip_high_threshold`, bounds of r itself; `beta`. A datum
may have thresholds for each token in place of them.

Unsupported requests raise RefusedCall, whose text the client shows.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

from scalerl_jax.config import ObjectiveConfig, OptimizerConfig
from scalerl_jax.contract.codec import Completion, Scores, TeacherScores
from scalerl_jax.gateway.wire import MOST_BODY_BYTES, bad, field, number
from scalerl_jax.learner.packing import Segment
from scalerl_jax.objective.losses import SOFT_TARGETS, THRESHOLDS, policy_loss
from scalerl_jax.tinker import tinker_pb2 as pb

_DTYPES: dict[int, Any] = {
    pb.DTYPE_FLOAT32: np.float32,
    pb.DTYPE_INT64: np.int64,
    pb.DTYPE_INT32: np.int32,
    pb.DTYPE_BFLOAT16: ml_dtypes.bfloat16,
}
_LOW, _HIGH, _BETA = "clip_low_threshold", "clip_high_threshold", "beta"
_NUMBERS = {  # of each loss, with their defaults
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {_LOW: 0.8, _HIGH: 1.2},
    "cispo": {_LOW: 0.0, _HIGH: 4.0},
    "gspo": {_LOW: 0.8, _HIGH: 1.2},
    "dro": {_BETA: 0.05},
}
_NO_BOUND = 1e9  # beyond any ratio that the losses let through
_NOT_OFFERED = ("stable_reinforce", "custom")
_EMPTY = -99999.0  # the log-prob where there is no token
_MOST_TARGETS = 1024  # of a token
_TARGET_BYTES = 12  # its id and its weight
_MOST_STORED = 2**29  # bytes of a call; SQLite stores up to a billion
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_ADAM = (  # the field, its name here, its bounds
    ("learning_rate", "", 0, 1e3), ("beta1", "beta1", 0, 1), ("beta2", "beta2", 0, 1), ("eps", "epsilon", 0, 1e3),
    ("weight_decay", "weight_decay", 0, 1e3), ("grad_clip_norm", "max_grad_norm", 0, 1e12),
)  # fmt: skip


class RefusedCall(ValueError):
    """The request cannot be done; the text is for the client."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One call of forward or forward_backward."""

    segments: list[Segment]
    objective: ObjectiveConfig
    forward_only: bool
    targets: list[int | None]  # of each token of each segment; None: one, without an axis

    @property
    def soft(self) -> bool:
        return self.objective.distill == SOFT_TARGETS


def seconds_to_live(body: Mapping[str, Any]) -> float | None:
    """Raises ApiError."""
    return number(body, "ttl_seconds", None, 1, 10**10)


def name_of_save(body: Mapping[str, Any]) -> str | None:
    """The name under which a call saves; None: a snapshot, of a sampling session. Raises ApiError."""
    name = field(body, "path", str)
    if name is not None and not _NAME.fullmatch(name):
        raise bad("path: must be a name of letters, digits, '.', '_' and '-'")
    if name is None and number(body, "sampling_session_seq_id", None, 0, 2**62, whole=True) is None:
        raise bad("path or sampling_session_seq_id: one of them is needed")
    if field(body, "kind", str, "snapshot") not in ("snapshot", "inflight"):
        raise bad("kind: must be snapshot or inflight")
    field(body, "overwrite", bool)
    seconds_to_live(body)
    return name


def path_to_load(body: Mapping[str, Any]) -> str:
    """Raises ApiError."""
    path: str | None = field(body, "path", str)
    if path is None or field(body, "optimizer", bool) is None:
        raise bad("path and optimizer: both are needed")
    return path


def optimizer_of(body: Mapping[str, Any]) -> tuple[OptimizerConfig, float]:
    """The optimizer of a step, and its learning rate. Raises ApiError, RefusedCall."""
    given = field(body, "adam_params", dict)
    if given is None:
        raise RefusedCall("optim_step: only adam_params are offered")
    values = {}
    for name, ours, low, high in _ADAM:
        values[ours] = number(given, name, None, low, high)
        if values[ours] is None:
            raise bad(f"adam_params.{name}: is missing")
    rate = values.pop("")
    return OptimizerConfig(**values), rate


def most_bytes(longest: int) -> int:
    """Of one call of forward_backward: a client divides calls, but no datum. longest: tokens of a datum."""
    return min(MOST_BODY_BYTES + longest * _MOST_TARGETS * _TARGET_BYTES, _MOST_STORED)


def parse(body: bytes) -> pb.ForwardBackwardRequest:
    """Raises RefusedCall."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RefusedCall(f"the body is no ForwardBackwardRequest: {error}") from None


def pass_of(request: pb.ForwardBackwardRequest, *, vocabulary: int, longest: int) -> Pass:
    """longest: tokens of a segment. Raises RefusedCall, naming the datum at fault."""
    numbers = _numbers_of(request)
    objective = objective_of(request.loss_fn, numbers)
    if not request.data:
        raise RefusedCall("data: there is none")
    read = functools.partial(
        _segment, loss=request.loss_fn, numbers=numbers, forward_only=request.forward_only, vocabulary=vocabulary,
        longest=longest,
    )  # fmt: skip
    segments, targets = zip(*(read(f"data[{i}]", datum) for i, datum in enumerate(request.data)), strict=True)
    if any(segment.teacher is not None for segment in segments):
        objective = dataclasses.replace(objective, distill=SOFT_TARGETS)  # type: ignore[arg-type]  # not for RL
        segments = tuple(map(_softened, segments))
    if any(segment.thresholds is not None for segment in segments):
        # What matters of the objective's own numbers is that they are on.
        objective = dataclasses.replace(objective, **dict.fromkeys(THRESHOLDS[objective.loss], 1.0))  # type: ignore
        bounds = np.asarray(_bounds("loss_fn_config", request.loss_fn, numbers[_LOW], numbers[_HIGH]), np.float32)
        segments = tuple(
            dataclasses.replace(one, thresholds=np.tile(bounds, (len(one.tokens), 1)))
            if one.thresholds is None
            else one
            for one in segments
        )
    return Pass(list(segments), objective, request.forward_only, list(targets))


def _numbers_of(request: pb.ForwardBackwardRequest) -> dict[str, float]:
    """Those of the loss. Raises RefusedCall."""
    name, numbers = request.loss_fn, dict(request.loss_fn_config)
    if name not in _NUMBERS:
        why = "is not offered" if name in _NOT_OFFERED else "is not known"
        raise RefusedCall(f"loss_fn: {name!r} {why}; there are {', '.join(_NUMBERS)}")
    for key, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise RefusedCall(f"loss_fn_config: {key} must be a number")
        numbers[key] = value.number
    known = _NUMBERS[name]
    for key, value in numbers.items():
        if key not in known:
            has = f" (it has {', '.join(known)})" if known else ""
            raise RefusedCall(f"loss_fn_config: {name} has no {key}{has}")
        if not 0 <= value <= _NO_BOUND:
            raise RefusedCall(f"loss_fn_config: {key} is {value:g}, and must be from 0 to {_NO_BOUND:g}")
    return known | numbers


def objective_of(name: str, numbers: Mapping[str, float]) -> ObjectiveConfig:
    """Raises RefusedCall."""
    if name == "cross_entropy":
        return ObjectiveConfig(loss="reinforce")
    if name == "importance_sampling":
        return ObjectiveConfig(loss="clip", clip_low=1.0, clip_high=_NO_BOUND)
    if name == "dro":
        return ObjectiveConfig(loss="dro", dro_beta=numbers[_BETA])
    low, high = _bounds("loss_fn_config", name, numbers[_LOW], numbers[_HIGH])
    if name == "cispo":
        return ObjectiveConfig(loss="cispo", min_ratio=low, max_ratio=high)
    return ObjectiveConfig(loss="gspo" if name == "gspo" else "clip", clip_low=low, clip_high=high)


def _bounds(where: str, loss: str, low: Any, high: Any) -> tuple[Any, Any]:
    """The thresholds, numbers or arrays, as the objective's (losses.THRESHOLDS). Raises RefusedCall."""
    for one, other in np.broadcast(low, high):
        if loss == "cispo" and not (0 <= one <= other and other > 0):
            raise RefusedCall(f"{where}: {_HIGH} must be above 0 and {_LOW}, and is {other:g} ({_LOW}: {one:g})")
        if loss != "cispo" and not 0 <= one <= 1 <= other:
            raise RefusedCall(f"{where}: the thresholds must be around 1, and are {one:g} and {other:g}")
    return (low, high) if loss == "cispo" else (1 - low, high - 1)


def _softened(segment: Segment) -> Segment:
    """A segment of cross_entropy with its loss as that of soft targets."""
    teacher = segment.teacher or _soft(segment.tokens[1:], segment.advantages[1:])
    assert teacher.top_logprobs is not None
    counted = np.any(teacher.top_logprobs != 0, axis=1).astype(np.float32)
    return dataclasses.replace(segment, teacher=teacher, weights=counted, advantages=np.zeros_like(counted))


def _soft(targets: np.ndarray, weights: np.ndarray) -> TeacherScores:
    """[n, k] or [n] each, of the tokens after the first."""
    ids, weights = (np.pad(part.reshape(len(part), -1), ((1, 0), (0, 0))) for part in (targets, weights))
    return TeacherScores(np.zeros(len(ids), np.float32), ids.astype(np.int32), weights.astype(np.float32))


def _segment(
    where: str, datum: pb.Datum, *, loss: str, numbers: Mapping[str, float], forward_only: bool, vocabulary: int,
    longest: int,
) -> tuple[Segment, int | None]:  # fmt: skip
    """The segment, and how many targets each of its tokens has; None: one, without an axis.

    forward_only: only log-probs are computed, so every target counts.
    """
    tokens = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("kind")
        if kind != "encoded_text":
            raise RefusedCall(f"{where}.model_input: only chunks of encoded_text are offered")
        tokens.append(_array(f"{where}.model_input", chunk.encoded_text.tokens, np.int32))
    inputs = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
    if not len(inputs):
        raise RefusedCall(f"{where}.model_input: there is no token")
    if len(inputs) + 1 > longest:
        raise RefusedCall(f"{where}: {len(inputs)} tokens, and at most {longest - 1} are offered (--maximum_tokens)")
    given = dict(datum.loss_fn_inputs)

    def tensor(name: str, *, columns: bool = False) -> np.ndarray:
        if name not in given:
            raise RefusedCall(f"{where}.loss_fn_inputs: {loss} needs {name}")
        return _tensor(f"{where}.loss_fn_inputs.{name}", given.pop(name), len(inputs), columns=columns)

    supervised = loss == "cross_entropy"
    targets = tensor("target_tokens", columns=supervised).astype(np.int64)
    count = targets.shape[1] if targets.ndim == 2 else None
    whole = np.concatenate([inputs, targets[-1:] if count is None else targets[-1:, 0]])
    if supervised:
        advantages, logprobs = tensor("weights", columns=True), np.zeros(len(inputs), np.float32)
    else:
        advantages, logprobs = tensor("advantages"), tensor("logprobs")
    if advantages.shape != targets.shape:
        raise RefusedCall(f"{where}.loss_fn_inputs: weights have the shape of target_tokens, {list(targets.shape)}")
    follows = count is None and targets[:-1] == inputs[1:]  # one without loss may be any: several recipes have 0 there
    soft = not np.all(follows if forward_only or count else follows | (advantages[:-1] == 0))
    if soft and not supervised:
        raise RefusedCall(f"{where}.target_tokens: {loss} has no targets but the tokens that follow the inputs")
    for ids in (whole, targets) if soft else (whole,):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise RefusedCall(f"{where}: token ids are from 0 to {vocabulary - 1}")
    teacher = None
    if soft:
        teacher = _soft(targets, advantages)
        advantages = np.zeros(len(inputs), np.float32)  # the loss is the teacher's alone
    weights = (advantages != 0).astype(np.float32)
    if loss == "gspo" and "sequence_ratio_mask" in given:
        mask = tensor("sequence_ratio_mask")
        if np.any(advantages[mask == 0] != 0):
            raise RefusedCall(f"{where}.sequence_ratio_mask: it leaves out tokens that have an advantage")
        weights = (mask != 0).astype(np.float32)
    thresholds = None
    if _LOW in numbers and not given.keys().isdisjoint((_LOW, _HIGH)):
        low, high = (tensor(name) if name in given else numbers[name] for name in (_LOW, _HIGH))
        low, high = (np.where(weights > 0, bound, 1.0) for bound in (low, high))  # others have no effect
        thresholds = np.stack(_bounds(f"{where}.loss_fn_inputs", loss, low, high), axis=1)
        thresholds = np.pad(thresholds, ((1, 0), (0, 0))).astype(np.float32)
    given.pop("mask", None)  # several clients send it with the advantages, which it is already multiplied into
    if given:
        raise RefusedCall(f"{where}.loss_fn_inputs: {loss} does not take {', '.join(sorted(given))}")
    parts = [np.concatenate([[0], part]).astype(np.float32) for part in (weights, advantages, logprobs)]
    segment = Segment(whole.astype(np.int32), parts[0], parts[1], parts[2], teacher=teacher, thresholds=thresholds)
    return segment, count


def _array(where: str, data: bytes, dtype: Any) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise RefusedCall(f"{where}: {len(data)} bytes are no whole number of items")
    return np.frombuffer(data, dtype)


def _tensor(where: str, tensor: pb.Tensor, length: int, *, columns: bool) -> np.ndarray:
    """[length], finite. columns: [length, k] as well."""
    if tensor.dtype not in _DTYPES:
        raise RefusedCall(f"{where}: its dtype is not known")
    dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
    sparse = tensor.sparse_csr if tensor.WhichOneof("data") == "sparse_csr" else None
    values = _array(where, tensor.dense if sparse is None else sparse.values, dtype)
    shape = shape or [len(values)]
    several = columns and len(shape) == 2
    if shape[0] != length or len(shape) > 1 + several or (sparse is not None and not several):
        wanted = f"[{length}]" + (f" or [{length}, k]" if columns else "") + ", a number for each token"
        raise RefusedCall(f"{where}: its shape is {shape}, and must be {wanted}")
    if several and not 1 <= shape[1] <= _MOST_TARGETS:
        raise RefusedCall(f"{where}: {shape[1]} for each token, and 1 to {_MOST_TARGETS} are offered")
    if sparse is not None:
        values = _dense(where, sparse, values, shape)
    elif values.size != np.prod(shape):
        raise RefusedCall(f"{where}: {values.size} numbers do not have the shape {shape}")
    values = values.reshape(shape)
    if not np.all(np.isfinite(values.astype(np.float64))):
        raise RefusedCall(f"{where}: some are not finite")
    return values


def _dense(where: str, sparse: pb.SparseCsr, values: np.ndarray, shape: list[int]) -> np.ndarray:
    """Zero wherever the compressed rows have nothing."""
    starts, columns = (_array(where, data, np.int64) for data in (sparse.crow_indices, sparse.col_indices))
    counts = np.diff(starts)
    if len(counts) != shape[0] or starts[0] != 0 or starts[-1] != len(values) or np.any(counts < 0):
        raise RefusedCall(f"{where}: crow_indices must rise from 0 to {len(values)} in {shape[0]} steps")
    if len(columns) != len(values) or not np.all((columns >= 0) & (columns < shape[1])):
        raise RefusedCall(f"{where}: col_indices must be {len(values)} from 0 to {shape[1] - 1}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def loss_of(asked: Pass, logprobs: Sequence[np.ndarray]) -> float:
    """The loss of a pass whose log-probs are known. It is computed in one row, padded to a power of two."""
    segments, objective = asked.segments, asked.objective
    if asked.soft:
        return -sum(
            float(np.sum(weights * found[:, 1 : 1 + weights.shape[1]]))
            for segment, found in zip(segments, logprobs, strict=True)
            if segment.teacher is not None and (weights := segment.teacher.top_logprobs) is not None
        )
    lengths = [len(segment.tokens) for segment in segments]
    size = 1 << (sum(lengths) - 1).bit_length()

    def row(parts: Sequence[np.ndarray], dtype: Any = np.float32) -> Any:
        values = np.concatenate(parts).astype(dtype)
        return jnp.asarray(np.pad(values, (0, size - len(values)))[None])

    if segments[0].thresholds is not None:
        columns = zip(*(segment.thresholds.T for segment in segments if segment.thresholds is not None), strict=True)
        bounds = dict(zip(THRESHOLDS[objective.loss], map(row, columns), strict=True))
        objective = dataclasses.replace(objective, **bounds)
    loss, _ = policy_loss(
        row(logprobs),
        row([segment.generator_logprobs for segment in segments]),
        row([segment.advantages for segment in segments]),
        row([segment.weights for segment in segments]),
        row([np.full(length, i + 1) for i, length in enumerate(lengths)], np.int32),
        objective,
    )
    return float(loss)


def output_of(asked: Pass, logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The answer to a pass. logprobs: of each segment, as Pending.logprobs. metrics: `name:reduction`."""
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    of_each = zip(asked.targets, logprobs, strict=True)
    for count, data in itertools.groupby(of_each, key=lambda one: one[0]):  # a record is rectangular
        parts = [np.asarray(one[1:], "<f4") for _, one in data]
        if asked.soft:
            parts = [part[:, 1] if count is None else part[:, 1 : 1 + count] for part in parts]
        offsets = np.concatenate([[0], np.cumsum([part.nbytes for part in parts])]).astype("<i8")
        tensor = pb.BatchedTensor(
            data=b"".join(part.tobytes() for part in parts), offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32,
            trailing_shape=[] if count is None else [count],
        )  # fmt: skip
        output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(parts)).fields["logprobs"].CopyFrom(tensor)
    return output.SerializeToString(deterministic=True)


def top_of(ids: np.ndarray, logprobs: np.ndarray) -> pb.TopkLogprobs:
    """[n, k] each; an id of -1 is none."""
    none = ids < 0
    return pb.TopkLogprobs(
        token_ids=np.where(none, 0, ids).astype("<i4").tobytes(),
        logprobs=np.where(none, _EMPTY, logprobs).astype("<f4").tobytes(),
        length=ids.shape[0],
        k=ids.shape[1],
    )


def samples_of(
    completions: Sequence[Completion], tops: Sequence[Scores | None], prompt: Scores | None, *, last: int | None,
    top_k: int, targets: pb.Tensor | None,
) -> bytes:  # fmt: skip
    """The answer to a sampling request.

    tops: of each completion's tokens, if requested. prompt: of the prompt's tokens. last: how many of these, the last
    ones, are wanted; None: all. targets: as requested, without values.
    """
    response = pb.SampleResponse()
    for completion, top in zip(completions, tops, strict=True):
        stopped = completion.finish_reason == "stop"
        sequence = response.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
            tokens=completion.token_ids.astype("<i4").tobytes(),
            logprobs=completion.logprobs.astype("<f4").tobytes(),
        )
        if top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(top_of(top.top_ids, top.top_logprobs))
    if prompt is not None:
        count = len(prompt.logprobs)
        known = np.arange(count) >= max(1, count - (count if last is None else last))
        response.prompt_logprobs = np.where(known, prompt.logprobs, np.nan).astype("<f4").tobytes()
        if top_k:
            ids = np.where(known[:, None], prompt.top_ids, -1)
            response.topk_prompt_logprobs.CopyFrom(top_of(ids, prompt.top_logprobs))
        if targets is not None:
            response.target_prompt_logprobs.CopyFrom(targets)
            response.target_prompt_logprobs.dense = prompt.target_logprobs[1:].astype("<f4").tobytes()
    return response.SerializeToString(deterministic=True)

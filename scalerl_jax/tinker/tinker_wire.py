"""Converts clients' protobuf requests to segments and objectives of the trainer, and encodes the answers.

    cross_entropy         - sum w logp                                       reinforce, with w as the advantage
    importance_sampling   - sum r A                                          clip, without a bound
    ppo                   - sum min(r A, clip(r, low, high) A)               clip
    cispo                 - sum sg(clip(r, low, high)) A logp                cispo
    gspo                  as ppo, with s = exp(mean log r) instead of r      gspo, whose tokens are the sequence's
    dro                   - sum (A logp - beta / 2 (log r)^2)                dro

r = exp(logp - logprobs), the sums over all tokens of all data; a token with advantage 0 does not count. A datum of n
input tokens is one segment of n + 1: targets are the inputs shifted by one, and the last target.

Numbers are those of loss_fn_config: `clip_low_threshold` and `clip_high_threshold`, bounds of r itself; `beta`.

Unsupported requests raise RefusedCall, whose text the client shows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.contract.codec import Completion, Scores
from scalerl_jax.learner.packing import Segment
from scalerl_jax.objective.losses import policy_loss
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


class RefusedCall(ValueError):
    """The request cannot be done; the text is for the client."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One call of forward or forward_backward."""

    segments: list[Segment]
    objective: ObjectiveConfig
    forward_only: bool


def parse(body: bytes) -> pb.ForwardBackwardRequest:
    """Raises RefusedCall."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RefusedCall(f"the body is no ForwardBackwardRequest: {error}") from None


def pass_of(request: pb.ForwardBackwardRequest, *, vocabulary: int, longest: int) -> Pass:
    """longest: tokens of a segment. Raises RefusedCall, naming the datum at fault."""
    objective = objective_of(request)
    if not request.data:
        raise RefusedCall("data: there is none")
    segments = [
        _segment(
            f"data[{i}]",
            datum,
            request.loss_fn,
            forward_only=request.forward_only,
            vocabulary=vocabulary,
            longest=longest,
        )
        for i, datum in enumerate(request.data)
    ]
    return Pass(segments, objective, request.forward_only)


def objective_of(request: pb.ForwardBackwardRequest) -> ObjectiveConfig:
    """Raises RefusedCall."""
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
    if name == "cross_entropy":
        return ObjectiveConfig(loss="reinforce")
    if name == "importance_sampling":
        return ObjectiveConfig(loss="clip", clip_low=1.0, clip_high=_NO_BOUND)
    numbers = known | numbers
    if name == "dro":
        return ObjectiveConfig(loss="dro", dro_beta=numbers[_BETA])
    low, high = numbers[_LOW], numbers[_HIGH]
    if name == "cispo":
        if not (high > 0 and low <= high):
            raise RefusedCall(f"loss_fn_config: {_HIGH} must be above 0 and {_LOW}, and is {high:g}")
        return ObjectiveConfig(loss="cispo", min_ratio=low, max_ratio=high)
    if not low <= 1 <= high:
        raise RefusedCall(f"loss_fn_config: the thresholds must be around 1, and are {low:g} and {high:g}")
    return ObjectiveConfig(loss="gspo" if name == "gspo" else "clip", clip_low=1 - low, clip_high=high - 1)


def _segment(where: str, datum: pb.Datum, loss: str, *, forward_only: bool, vocabulary: int, longest: int) -> Segment:
    """forward_only: only log-probs are computed, so every target counts."""
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

    def tensor(name: str) -> np.ndarray:
        if name not in given:
            raise RefusedCall(f"{where}.loss_fn_inputs: {loss} needs {name}")
        return _tensor(f"{where}.loss_fn_inputs.{name}", given.pop(name), len(inputs))

    targets = tensor("target_tokens").astype(np.int64)
    whole = np.concatenate([inputs, targets[-1:]])
    if whole.min() < 0 or whole.max() >= vocabulary:
        raise RefusedCall(f"{where}: token ids are from 0 to {vocabulary - 1}")
    if loss == "cross_entropy":
        advantages, logprobs = tensor("weights"), np.zeros(len(inputs), np.float32)
    else:
        advantages, logprobs = tensor("advantages"), tensor("logprobs")
    follows = targets[:-1] == inputs[1:]  # a token without loss may have any target: several recipes have 0 there
    if not np.all(follows if forward_only else follows | (advantages[:-1] == 0)):
        raise RefusedCall(f"{where}.target_tokens: only the tokens that follow the inputs are offered as targets")
    weights = (advantages != 0).astype(np.float32)
    if loss == "gspo" and "sequence_ratio_mask" in given:
        mask = tensor("sequence_ratio_mask")
        if np.any(advantages[mask == 0] != 0):
            raise RefusedCall(f"{where}.sequence_ratio_mask: it leaves out tokens that have an advantage")
        weights = (mask != 0).astype(np.float32)
    given.pop("mask", None)  # several clients send it with the advantages, which it is already multiplied into
    if given:
        raise RefusedCall(f"{where}.loss_fn_inputs: {loss} does not take {', '.join(sorted(given))}")
    parts = [np.concatenate([[0], part]).astype(np.float32) for part in (weights, advantages, logprobs)]
    return Segment(whole.astype(np.int32), parts[0], parts[1], parts[2])


def _array(where: str, data: bytes, dtype: Any) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise RefusedCall(f"{where}: {len(data)} bytes are no whole number of items")
    return np.frombuffer(data, dtype)


def _tensor(where: str, tensor: pb.Tensor, length: int) -> np.ndarray:
    """[length], finite."""
    if tensor.WhichOneof("data") == "sparse_csr":
        raise RefusedCall(f"{where}: sparse tensors, as of several targets for a token, are not offered")
    if tensor.dtype not in _DTYPES:
        raise RefusedCall(f"{where}: its dtype is not known")
    values = _array(where, tensor.dense, _DTYPES[tensor.dtype])
    if values.shape != (length,) or list(tensor.shape) not in ([], [length]):
        shape = list(tensor.shape) or [len(values)]
        raise RefusedCall(f"{where}: its shape is {shape}, and must be [{length}], a number for each token")
    if not np.all(np.isfinite(values.astype(np.float64))):
        raise RefusedCall(f"{where}: some are not finite")
    return values


def loss_of(segments: Sequence[Segment], logprobs: Sequence[np.ndarray], objective: ObjectiveConfig) -> float:
    """The loss of segments whose log-probs are known. It is computed in one row, padded to a power of two."""
    lengths = [len(segment.tokens) for segment in segments]
    size = 1 << (sum(lengths) - 1).bit_length()

    def row(parts: Sequence[np.ndarray], dtype: Any = np.float32) -> Any:
        values = np.concatenate(parts).astype(dtype)
        return jnp.asarray(np.pad(values, (0, size - len(values)))[None])

    loss, _ = policy_loss(
        row(logprobs),
        row([segment.generator_logprobs for segment in segments]),
        row([segment.advantages for segment in segments]),
        row([segment.weights for segment in segments]),
        row([np.full(length, i + 1) for i, length in enumerate(lengths)], np.int32),
        objective,
    )
    return float(loss)


def output_of(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The answer to a pass. logprobs: of each segment [t], the first without meaning. metrics: `name:reduction`."""
    found = [np.asarray(one[1:], "<f4") for one in logprobs]
    offsets = np.concatenate([[0], np.cumsum([one.nbytes for one in found])]).astype("<i8")
    tensor = pb.BatchedTensor(data=b"".join(one.tobytes() for one in found), offsets=offsets.tobytes())
    tensor.dtype = pb.DTYPE_FLOAT32
    record = pb.ArrayRecord(type_tag="ArrayRecord", fields={"logprobs": tensor}, num_datums=len(found))
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics)
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

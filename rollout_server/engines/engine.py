"""The interface between the service and an engine, and the checks for requests that an engine could never serve.

An engine owns the model and its sampling loop. The service (aio gRPC) calls it from one event loop; an engine with its
own thread crosses over with `loop.call_soon_threadsafe`.
"""

import collections
import dataclasses
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import numpy as np

from scalerl_jax.contract import limits
from scalerl_jax.contract.codec import Completion, GroupRequest, ScoreRequest, Scores, Version
from scalerl_jax.contract.weight_delta import Change

# Limits on a request's widths; fixed, because they are shapes that an engine compiles.
LONGEST_PHRASE = 128
LONGEST_END = 16
MOST_STOPS = 16


class QueueFull(Exception):
    """The waiting queue cannot hold the whole request; none of it was queued."""


class WrongVersion(Exception):
    """The weights held are not those that the request requires."""


class AskedAgain(Exception):
    """A newer request asks for one of the same completions; this one has lost its places."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The options that scalerl-serve passes to every engine."""

    model: str  # Hugging Face folder: config.json, *.safetensors, the tokenizer's files
    slots: int  # completions sampled at once
    queue: int  # completions that may wait for a slot
    maximum_tokens: int  # prompt and completion together
    compute_dtype: str  # "float32" | "bfloat16", of the matrix products
    sync_dtype: str  # likewise; weights are rounded to it, then used in compute_dtype
    head_precision: str = "default"  # | "highest" | "bfloat16", as in the trainer's config
    numerics: str = "fast"  # | "bitwise", as in the trainer's config
    decode_chunk: int = 8  # decode steps between two checks of queue and weights
    router_replay: bool = False  # can return the experts that its completions were routed to


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """Counters run from the engine's start; see StatusReply in rollout.proto for the meaning of each."""

    version: Version
    busy_slots: int
    queued: int
    sampled_tokens: int
    forced_tokens: int
    prefill_tokens: int
    busy_seconds: float
    pause_seconds: float
    reused_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """Properties that do not change while the process lives."""

    name: str  # "jax" | "vllm"
    slots: int
    queue_capacity: int
    maximum_tokens: int
    # Hugging Face name -> shape of every tensor that a version of the weights must hold.
    tensors: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    vocabulary: int = 2**31  # token ids are below it
    model_config: str = "{}"  # canonical JSON
    tokenizer_fingerprint: str = ""
    compute_dtype: str = "float32"
    head_dtype: str = "float32"
    head_precision: str = "default"  # | "highest" | "bfloat16": precision of the logits
    sync_dtype: str = "float32"
    numerics: str = "fast"  # or, with bitwise numerics, a fingerprint of what the bits depend on
    devices: int = 1
    router_replay: bool = False  # returns the experts of completions, where a request asks for them
    maximum_top_k: int = 0  # the most top ids, and target ids, of a token that `score` returns


# Tensor name -> its changes; None: it may differ anywhere. A tensor that is not named is unchanged, to the bit.
Changes = Mapping[str, Change | None]


class Engine(Protocol):
    info: EngineInfo

    def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        """Yields each completion as it finishes. Closing the generator frees its slots.

        Before the first completion it raises QueueFull, WrongVersion (weights of another incarnation, older than
        minimum_step, or not pinned_step) or ValueError (can never be served). At any time it raises WrongVersion when
        weights of another incarnation arrive, and AskedAgain when a newer request asks for one of its completions.
        """
        ...

    def end_older(self, request: GroupRequest) -> None:
        """Ends older requests for one of this request's completions with AskedAgain, as `generate` does at once."""
        ...

    def weight_buffer(self, size: int) -> np.ndarray:
        """[size] uint8, in which the service keeps its host copy of the weights. Called once, before the first `load`.

        An engine whose workers are other processes returns memory that they can read too.
        """
        ...

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        """Replaces the weights by `tensors` (Hugging Face names, complete, in sync dtype) between two decode chunks.

        Requests pinned to the version held are finished first. Requests of another incarnation end with WrongVersion.
        Returns the seconds that decoding was paused. All tensors are replaced, or none. The arrays are read-only views
        into weight_buffer, which is overwritten once this returns: copy what is kept (jax on the CPU aliases aligned
        arrays). `changes` lists what has changed since the version held. Called for one version at a time, and never
        cancelled.
        """
        ...

    async def score(self, request: ScoreRequest) -> tuple[Scores, Version]:
        """Teacher-forced log-probabilities, and the version used for them. Raises ValueError as check_score does."""
        ...

    def status(self) -> EngineStatus:
        """The current status, at little cost. Raises RuntimeError if the engine can never serve again; the server then
        ends."""
        ...

    async def close(self) -> None: ...


# ------------------------------------------------------------------- requests that can never be served, even when idle


def check_request(request: GroupRequest, info: EngineInfo) -> None:
    """Raises ValueError where this engine could never serve the request, even when idle."""
    maximum_tokens = info.maximum_tokens
    sampling, interruption = request.sampling, request.interruption
    name = f"group {request.group_id!r}"
    if not len(request.prompt):
        raise ValueError(f"{name}: the prompt is empty")
    if not request.completions:
        raise ValueError(f"{name}: no completion is asked for")
    check_places(request.group_id, len(request.completions), info)
    (twice, times), *_ = collections.Counter(wanted.index for wanted in request.completions).most_common(1)
    if times > 1:
        raise ValueError(f"{name}: completion {twice} is asked for twice in one request")
    lowest, highest = limits.TEMPERATURES
    # As float32, which the field is.
    if not np.float32(lowest) <= sampling.temperature <= highest:
        raise ValueError(f"{name}: temperature {sampling.temperature:g} is not within {lowest:g} and {highest:g}")
    if not np.float32(limits.SMALLEST_TOP_P) <= sampling.top_p <= 1:
        raise ValueError(f"{name}: top_p {sampling.top_p:g} is not within {limits.SMALLEST_TOP_P:g} and 1")
    if sampling.top_k < 0 or sampling.answer_budget < 1:
        raise ValueError(f"{name}: top_k is {sampling.top_k}, the answer budget {sampling.answer_budget}")
    phrase, end = interruption.text_token_ids, interruption.end_of_thinking_token_ids
    if phrase[len(phrase) - len(end) :] != end:
        raise ValueError(f"{name}: the interruption phrase does not end with end_of_thinking")
    if not phrase and any(wanted.thinking_budget for wanted in request.completions):
        raise ValueError(f"{name}: a thinking budget without an interruption phrase")
    if request.router_replay and not info.router_replay:
        raise ValueError(f"{name}: experts are asked for, and this server does not tell them")
    if len(request.prompt) >= maximum_tokens:
        raise ValueError(f"{name}: a prompt of {len(request.prompt)} tokens, and {maximum_tokens} with the completion")
    lists = {
        "prompt": (request.prompt, maximum_tokens),
        "phrase": (phrase, LONGEST_PHRASE),
        "end_of_thinking": (end, LONGEST_END),
        "stop tokens": (sampling.stop_token_ids, MOST_STOPS),
    }
    for what, (ids, longest) in lists.items():
        if len(ids) > longest:
            raise ValueError(f"{name}: {len(ids)} tokens of {what}, at most {longest} are possible")
        _check_ids(f"{name}: token ids of {what}", np.asarray(ids, np.int64), info)


def check_places(group: str, completions: int, info: EngineInfo) -> None:
    """Raises ValueError where slots and queue together cannot hold so many completions."""
    places = info.slots + info.queue_capacity
    if completions > places:
        raise ValueError(f"group {group!r}: {completions} completions, slots and queue hold {places}")


def check_score(request: ScoreRequest, info: EngineInfo) -> None:
    """Raises ValueError where this engine cannot score the request."""
    if not 0 < len(request.token_ids) <= info.maximum_tokens:
        raise ValueError(f"{len(request.token_ids)} tokens to score, not within 1 and {info.maximum_tokens}")
    for what, most in (("top ids", request.top_k), ("target ids", request.target_ids.shape[1])):
        if most > info.maximum_top_k:
            raise ValueError(f"{most} {what} a token, at most {info.maximum_top_k} are possible")
    _check_ids("token ids to score", request.token_ids, info)
    _check_ids("target ids that are not -1 and", request.target_ids[request.target_ids != -1], info)


def _check_ids(what: str, ids: np.ndarray, info: EngineInfo) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < info.vocabulary):
        raise ValueError(f"{what} outside [0, {info.vocabulary})")

"""What the service asks of an engine.

An engine owns the model and its sampling loop. The service (aio gRPC) calls it from one event loop; an engine that has
a thread of its own crosses over with `loop.call_soon_threadsafe`.
"""

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import numpy as np

from scalerl_jax.contract.codec import Completion, GroupRequest, ScoreRequest, Scores, Version
from scalerl_jax.contract.weight_delta import Change


class QueueFull(Exception):
    """The waiting queue has no room for the whole request; nothing was taken."""


class WrongVersion(Exception):
    """The weights held are not those the request demands."""


class AskedAgain(Exception):
    """A newer request asks for one of the completions, and has taken over their places."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What scalerl-serve tells every engine."""

    model: str  # Hugging Face folder: config.json, *.safetensors, the tokenizer's files
    slots: int  # completions sampled at once
    queue: int  # completions that may wait for a slot
    maximum_tokens: int  # prompt and completion together
    compute_dtype: str  # "float32" | "bfloat16", of the matrix products
    sync_dtype: str  # likewise; weights are rounded to it, then used in the other
    head_precision: str = "default"  # | "highest" | "bfloat16", as in the trainer's config
    numerics: str = "fast"  # | "bitwise", as in the trainer's config
    decode_chunk: int = 8  # decode steps between two looks at queue and weights
    router_replay: bool = False  # can tell the experts of its completions


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
    """What does not change while the process lives."""

    name: str  # "jax" | "vllm"
    slots: int
    queue_capacity: int
    maximum_tokens: int
    # Hugging Face name -> shape: what a version of the weights must hold.
    tensors: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    vocabulary: int = 2**31  # token ids are below it
    model_config: str = "{}"  # canonical JSON
    tokenizer_fingerprint: str = ""
    compute_dtype: str = "float32"
    head_dtype: str = "float32"
    head_precision: str = "default"  # | "highest" | "bfloat16": that of the logits
    sync_dtype: str = "float32"
    numerics: str = "fast"  # or what the same bits depend on, in words
    devices: int = 1
    router_replay: bool = False  # tells the experts of completions, where a request asks for them
    maximum_top_k: int = 0  # top and target ids of a token that `score` returns


# By tensor's name. None: it may differ anywhere. A tensor that is not named is as it was, to the bit.
Changes = Mapping[str, Change | None]


class Engine(Protocol):
    info: EngineInfo

    def generate(self, request: GroupRequest) -> AsyncGenerator[Completion, None]:
        """Yields each completion as it finishes. Closing the generator frees its slots.

        Raises QueueFull, WrongVersion (weights of another incarnation, older than minimum_step, or not pinned_step) or
        ValueError (can never be served) before the first completion. Later too: WrongVersion, when weights of another
        incarnation arrive, and AskedAgain, when a newer request asks for one of its completions.
        """
        ...

    def end_older(self, request: GroupRequest) -> None:
        """Ends older requests for one of its completions, as `generate` does at once: with AskedAgain."""
        ...

    def weight_buffer(self, size: int) -> np.ndarray:
        """[size] uint8: where the service keeps its host copy of the weights. Called once, before the first `load`.

        An engine whose workers are other processes gives memory that they can read too.
        """
        ...

    async def load(self, version: Version, tensors: Mapping[str, np.ndarray], changes: Changes) -> float:
        """Makes `tensors` (Hugging Face names, complete, in sync dtype) the weights, between two decode chunks.

        Requests pinned to the version held are finished first. Requests leased by another incarnation are ended with
        WrongVersion. Returns the seconds that decoding stood still. All tensors or none. The arrays are read-only
        views into weight_buffer, which is written again once this returns: what is kept must be copied (jax on the
        CPU aliases aligned arrays). `changes` says what of them is new since the version held. Called for one version
        at a time, and never cancelled.
        """
        ...

    async def score(self, request: ScoreRequest) -> tuple[Scores, Version]:
        """Teacher-forced log-probabilities, and the version they are of. Raises ValueError as check_score does."""
        ...

    def status(self) -> EngineStatus:
        """Cheap. Raises RuntimeError where the engine can never serve again; the server then ends."""
        ...

    async def close(self) -> None: ...

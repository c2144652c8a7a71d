from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason

class Version(_message.Message):
    __slots__ = ("incarnation", "step")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    step: int
    def __init__(self, incarnation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("step", "start", "end")
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    step: int
    start: int
    end: int
    def __init__(self, step: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class CompletionRequest(_message.Message):
    __slots__ = ("index", "seed", "thinking_budget")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    index: int
    seed: int
    thinking_budget: int
    def __init__(self, index: _Optional[int] = ..., seed: _Optional[int] = ..., thinking_budget: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "answer_budget", "stop_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BUDGET_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    answer_budget: int
    stop_token_ids: bytes
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., answer_budget: _Optional[int] = ..., stop_token_ids: _Optional[bytes] = ...) -> None: ...

class Interruption(_message.Message):
    __slots__ = ("text_token_ids", "end_of_thinking_token_ids")
    TEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_OF_THINKING_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text_token_ids: bytes
    end_of_thinking_token_ids: bytes
    def __init__(self, text_token_ids: _Optional[bytes] = ..., end_of_thinking_token_ids: _Optional[bytes] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("incarnation", "group_id", "prompt_token_ids", "completions", "sampling", "interruption", "minimum_step", "pinned_step", "router_replay", "session")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTION_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_STEP_FIELD_NUMBER: _ClassVar[int]
    PINNED_STEP_FIELD_NUMBER: _ClassVar[int]
    ROUTER_REPLAY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    group_id: str
    prompt_token_ids: bytes
    completions: _containers.RepeatedCompositeFieldContainer[CompletionRequest]
    sampling: Sampling
    interruption: Interruption
    minimum_step: int
    pinned_step: int
    router_replay: bool
    session: str
    def __init__(self, incarnation: _Optional[int] = ..., group_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., completions: _Optional[_Iterable[_Union[CompletionRequest, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., interruption: _Optional[_Union[Interruption, _Mapping]] = ..., minimum_step: _Optional[int] = ..., pinned_step: _Optional[int] = ..., router_replay: bool = ..., session: _Optional[str] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("incarnation", "group_id", "index", "token_ids", "logprobs", "versions", "forced", "finish_reason", "queued_seconds", "sampling_seconds", "experts")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    group_id: str
    index: int
    token_ids: bytes
    logprobs: bytes
    versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    forced: _containers.RepeatedCompositeFieldContainer[Span]
    finish_reason: FinishReason
    queued_seconds: float
    sampling_seconds: float
    experts: Experts
    def __init__(self, incarnation: _Optional[int] = ..., group_id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., forced: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., queued_seconds: _Optional[float] = ..., sampling_seconds: _Optional[float] = ..., experts: _Optional[_Union[Experts, _Mapping]] = ...) -> None: ...

class Experts(_message.Message):
    __slots__ = ("layers", "experts_per_token", "expert_bytes", "ids")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    experts_per_token: int
    expert_bytes: int
    ids: bytes
    def __init__(self, layers: _Optional[int] = ..., experts_per_token: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class TensorInfo(_message.Message):
    __slots__ = ("name", "dtype", "shape", "digest", "dense", "changed", "gap_bytes", "blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    GAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: int
    dense: bool
    changed: int
    gap_bytes: int
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[int] = ..., dense: bool = ..., changed: _Optional[int] = ..., gap_bytes: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("start", "size")
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    size: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[_Iterable[int]] = ..., size: _Optional[_Iterable[int]] = ...) -> None: ...

class WeightHeader(_message.Message):
    __slots__ = ("target", "tensors", "payload_bytes", "chunk_bytes", "base", "part", "parts")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    target: Version
    tensors: _containers.RepeatedCompositeFieldContainer[TensorInfo]
    payload_bytes: int
    chunk_bytes: int
    base: Version
    part: int
    parts: int
    def __init__(self, target: _Optional[_Union[Version, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorInfo, _Mapping]]] = ..., payload_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., base: _Optional[_Union[Version, _Mapping]] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class WeightChunk(_message.Message):
    __slots__ = ("index", "data", "crc32")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    crc32: int
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class WeightMessage(_message.Message):
    __slots__ = ("header", "chunk", "commit")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    header: WeightHeader
    chunk: WeightChunk
    commit: bool
    def __init__(self, header: _Optional[_Union[WeightHeader, _Mapping]] = ..., chunk: _Optional[_Union[WeightChunk, _Mapping]] = ..., commit: bool = ...) -> None: ...

class WeightReply(_message.Message):
    __slots__ = ("resend", "applied", "refused", "full_sync")
    class Applied(_message.Message):
        __slots__ = ("version", "staging_seconds", "pause_seconds", "checking_seconds", "server_id")
        VERSION_FIELD_NUMBER: _ClassVar[int]
        STAGING_SECONDS_FIELD_NUMBER: _ClassVar[int]
        PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        CHECKING_SECONDS_FIELD_NUMBER: _ClassVar[int]
        SERVER_ID_FIELD_NUMBER: _ClassVar[int]
        version: Version
        staging_seconds: float
        pause_seconds: float
        checking_seconds: float
        server_id: str
        def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., staging_seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ..., checking_seconds: _Optional[float] = ..., server_id: _Optional[str] = ...) -> None: ...
    RESEND_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FULL_SYNC_FIELD_NUMBER: _ClassVar[int]
    resend: int
    applied: WeightReply.Applied
    refused: str
    full_sync: str
    def __init__(self, resend: _Optional[int] = ..., applied: _Optional[_Union[WeightReply.Applied, _Mapping]] = ..., refused: _Optional[str] = ..., full_sync: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("token_ids", "first", "top_k", "target_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TARGET_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    first: int
    top_k: int
    target_ids: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., first: _Optional[int] = ..., top_k: _Optional[int] = ..., target_ids: _Optional[bytes] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("logprobs", "version", "top_ids", "top_logprobs", "target_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TARGET_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    version: Version
    top_ids: bytes
    top_logprobs: bytes
    target_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., target_logprobs: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("server_id", "engine", "version", "model_config", "tokenizer_fingerprint", "compute_dtype", "head_dtype", "sync_dtype", "devices", "slots", "busy_slots", "queue_capacity", "queued", "maximum_tokens", "sampled_tokens", "forced_tokens", "prefill_tokens", "up_seconds", "busy_seconds", "pause_seconds", "versions_applied", "chunks_refused", "head_precision", "router_replay", "reused_tokens", "maximum_top_k", "numerics")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    HEAD_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SYNC_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    HEAD_PRECISION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_REPLAY_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_TOP_K_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    engine: str
    version: Version
    model_config: str
    tokenizer_fingerprint: str
    compute_dtype: str
    head_dtype: str
    sync_dtype: str
    devices: int
    slots: int
    busy_slots: int
    queue_capacity: int
    queued: int
    maximum_tokens: int
    sampled_tokens: int
    forced_tokens: int
    prefill_tokens: int
    up_seconds: float
    busy_seconds: float
    pause_seconds: float
    versions_applied: int
    chunks_refused: int
    head_precision: str
    router_replay: bool
    reused_tokens: int
    maximum_top_k: int
    numerics: str
    def __init__(self, server_id: _Optional[str] = ..., engine: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., model_config: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., compute_dtype: _Optional[str] = ..., head_dtype: _Optional[str] = ..., sync_dtype: _Optional[str] = ..., devices: _Optional[int] = ..., slots: _Optional[int] = ..., busy_slots: _Optional[int] = ..., queue_capacity: _Optional[int] = ..., queued: _Optional[int] = ..., maximum_tokens: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., forced_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., up_seconds: _Optional[float] = ..., busy_seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ..., versions_applied: _Optional[int] = ..., chunks_refused: _Optional[int] = ..., head_precision: _Optional[str] = ..., router_replay: bool = ..., reused_tokens: _Optional[int] = ..., maximum_top_k: _Optional[int] = ..., numerics: _Optional[str] = ...) -> None: ...

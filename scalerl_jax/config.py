"""The typed config tree: every number a run depends on, with its unit.

A config file is Python: it defines `get_config() -> Config`, its docstring gives the command, the hardware, the time
and the result to expect, and it says only what differs from the defaults here, which are the paper's where the paper
gives one (README, "Where the paper is silent", lists the rest). Flags override any leaf: --config.rollout.top_p=0.9.

A field's choices and bounds stand in its annotation; config_check.py reads them there, and --help the comments.
"""

import dataclasses
from typing import Annotated, Literal

from scalerl_jax.config_bounds import Above, AtLeast, Between, NotNegative, Positive, Share

PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"


@dataclasses.dataclass
class ModelConfig:
    path: str = ""  # Hugging Face folder of the policy to start from, tokenizer included
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the trainer's matrix products
    sync_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # what the weights are rounded to, on both sides
    # default: operands in compute_dtype, float32 sums; highest: float32 operands
    head_precision: Literal["default", "highest"] = "default"
    remat: bool = True  # recompute each block in the backward pass


@dataclasses.dataclass
class EnvironmentConfig:
    name: Literal["arithmetic", "jsonl"] = "arithmetic"  # arithmetic: made here; jsonl: train_file, validation_file
    train_file: str = ""  # JSONL of {"prompt": str, "answer": str}
    validation_file: str = ""  # JSONL of the same, held out: never trained on
    train_prompts: Positive[int] = 512  # arithmetic: how many distinct training prompts
    minimum_terms: Positive[int] = 3  # arithmetic: terms of the shortest chain
    maximum_terms: Positive[int] = 8  # arithmetic: terms of the longest chain
    verifier_processes: Positive[int] = 1  # jsonl: how many judge answers
    verifier_seconds: Positive[float] = 5.0  # jsonl: one answer is judged wrong after this much CPU time


@dataclasses.dataclass
class SftConfig:
    max_steps: Positive[int] = 400  # optimizer steps
    rows_per_step: Positive[int] = 16  # packed rows
    seq_len: Positive[int] = 256  # tokens of a packed row
    learning_rate: Positive[float] = 3e-3  # peak; linear warm-up, cosine to 10 %
    warmup_steps: NotNegative[int] = 40  # linear
    weight_decay: NotNegative[float] = 0.01  # AdamW
    traces_file: str = ""  # JSONL of {"prompt": str, "completion": str}; empty: traces of the built-in task
    error_rate: Share = 0.2  # built-in task: share of steps with a wrong result
    model_path: str = ""  # Hugging Face folder to start from, tokenizer included; empty: a new decoder
    model_file: str = ""  # config.json of the decoder to make; empty: the sizes below
    layers: Positive[int] = 3  # of a new decoder
    hidden_size: Positive[int] = 96  # of its hidden states
    heads: Positive[int] = 4  # query heads of its attention
    kv_heads: Positive[int] = 2  # key and value heads; they divide heads
    head_dim: Positive[int] = 32  # of one head
    intermediate_size: Positive[int] = 256  # inside its MLP
    vocab_size: Positive[int] = 384  # tokens, at most: the tokenizer is made from the traces
    checkpoint_every: Positive[int] = 100  # steps
    log_every: Positive[int] = 20  # steps between two rows of metrics


@dataclasses.dataclass
class CurriculumConfig:
    # a prompt whose latest pass rate is at or over this is not drawn again; above 1: off
    no_positive_resampling_at: NotNegative[float] = 0.9


@dataclasses.dataclass
class RolloutConfig:
    prompts_per_step: Positive[int] = 48  # prompts whose groups one step is made of
    group_size: Annotated[int, AtLeast(2)] = 16  # completions per prompt
    temperature: Annotated[float, Between(0.01, 100)] = 1.0  # anything but 1 and 1 makes the ratio biased
    top_p: Annotated[float, Above(0, up_to=1)] = 1.0  # 1: off
    top_k: NotNegative[int] = 0  # 0: off
    max_prompt_tokens: Positive[int] = 2048  # tokens; longer prompts are refused at the start
    # the thinking budget is uniform in [min, max], per completion; 0 and 0: no thinking
    thinking_budget_min: NotNegative[int] = 10_000
    thinking_budget_max: NotNegative[int] = 12_000  # see thinking_budget_min
    answer_budget: Positive[int] = 2048  # tokens after the end of thinking
    interruption_text: str = PHRASE  # fed when the thinking budget is spent; it ends thinking
    end_of_thinking: str = "</think>"  # what is behind it is the answer


@dataclasses.dataclass
class ObjectiveConfig:
    loss: Literal["cispo", "clip", "gspo"] = "cispo"  # of a token, as a function of its ratio and advantage
    max_ratio: Positive[float] = 5.0  # cispo: on the ratio itself
    clip_low: NotNegative[float] = 0.2  # clip, gspo: ratio in [1 - low, 1 + high]
    clip_high: NotNegative[float] = 0.26  # 0.2: GRPO; 0.26: DAPO
    aggregation: Literal["prompt", "sample", "token"] = "prompt"  # what counts once: a prompt, a completion or a token
    # by whose standard deviation advantages are divided
    advantage_normalization: Literal["batch", "prompt", "none"] = "batch"
    # completions cut by the budget: exclude leaves them out of the loss, penalize gives -1
    truncated: Literal["exclude", "penalize"] = "exclude"
    filter_zero_variance: bool = True  # prompts whose completions are all right or all wrong are left out
    tis_cap: NotNegative[float] = 0.0  # clip, gspo: cap on the ratio itself, whatever the advantage's sign; 0: off
    icepop_low: NotNegative[float] = 0.0  # tokens with a ratio outside [low, high] are masked; 0 and 0: off
    icepop_high: NotNegative[float] = 0.0  # see icepop_low
    # tokens whose sampled probability moved further than this are masked; 0: off
    dppo_tv_threshold: NotNegative[float] = 0.0


@dataclasses.dataclass
class OptimizerConfig:
    learning_rate: Positive[float] = 5e-7  # of AdamW, constant after the warm-up
    warmup_steps: NotNegative[int] = 100  # linear
    beta1: Annotated[float, AtLeast(0, below=1)] = 0.9  # decay of the mean of gradients
    beta2: Annotated[float, AtLeast(0, below=1)] = 0.95  # decay of the mean of their squares
    epsilon: Positive[float] = 1e-15  # added to the root of the second mean
    weight_decay: NotNegative[float] = 0.01  # decoupled; not of the norms' scales
    max_grad_norm: NotNegative[float] = 0.0  # global norm; 0: off


@dataclasses.dataclass
class LearnerConfig:
    replica: Positive[int] = 1  # mesh axis: copies of the parameters
    fsdp: NotNegative[int] = 0  # mesh axis: parts that the parameters are split into; 0: all remaining devices
    tensor: Positive[int] = 1  # mesh axis: devices that share each matrix product
    seq_len: Positive[int] = 16_384  # tokens of a packed row
    micro_batch_rows: Positive[int] = 1  # rows of a micro-batch, per replica x fsdp shard
    logprob_chunk: Positive[int] = 128  # tokens per chunk of the head


@dataclasses.dataclass
class PacingConfig:
    kind: Literal["pipeline", "phased"] = "pipeline"  # pipeline: generators never wait; phased: sample, then train
    # k of PipelineRL-k: how many steps older than the policy a completion may be
    max_off_policy_steps: Positive[int] = 8
    # finished, untrained groups beyond the batch in training, in batches
    max_buffered_batches: NotNegative[float] = 1.0


@dataclasses.dataclass
class FleetConfig:
    servers: Positive[int] = 2  # local ones, when --servers is not given
    engine: Literal["jax", "vllm", "replay"] = "jax"  # local servers
    vllm_python: str = ".venv-vllm/bin/python"  # local vllm servers: the environment that has it (make vllm-cpu)
    slots: Positive[int] = 64  # local servers: completions sampled at once
    queue: NotNegative[int] = 128  # local servers: completions that may wait
    decode_chunk: Positive[int] = 8  # local servers: tokens between two looks at the queue and at the weights
    compute_dtype: Literal["bfloat16", "float32"] = "float32"  # local servers: of their matrix products
    threads: NotNegative[int] = 0  # local servers: cores that each computes on; 0: those there are, divided by servers
    # local servers, all together: of the memory of a GPU that the trainer is on too
    gpu_share: Annotated[float, Above(0, below=0.9)] = 0.4
    start_seconds: Positive[float] = 600.0  # local servers: until each must serve, loading and compiling included
    tls_authority: str = ""  # PEM of who signs the servers' certificates; empty: no TLS
    tls_certificate: str = ""  # PEM of the trainer's own, for servers that ask for one
    tls_key: str = ""  # PEM of its private key
    tls_name: str = ""  # that the servers' certificates carry; empty: the host dialled, or the name of dns:///name
    token_file: str = ""  # holds the token that every call carries; empty: none
    discovery_seconds: Positive[float] = 5.0  # between two looks at a watched file or a DNS name
    connect_seconds: Positive[float] = 60.0  # within which a first server must answer
    heartbeat_seconds: Positive[float] = 1.0  # between two status calls
    status_seconds: Positive[float] = 5.0  # deadline of a status call
    silence_seconds: Positive[float] = 15.0  # no status for this long: the server is given up until it answers again
    stall_seconds: Positive[float] = 120.0  # it answers, and samples no token for this long: given up too
    slowest_tokens_per_second: Positive[float] = 1.0  # of a completion with a slot: one that is slower counts as lost
    push_seconds: Positive[float] = 600.0  # a version's transfer is given up when nothing of it moves for this long
    chunk_bytes: Annotated[int, Between(1, 2**24)] = 2**20  # of one message of weights
    # of a tensor's shard: where more of it changed, it goes out whole; 0: all always do
    max_delta_density: Share = 1 / 16
    relay: bool = True  # servers send versions on to each other, at the addresses by which the trainer knows them
    # host memory for the deltas of the last versions; a server further behind gets all
    delta_cache_bytes: NotNegative[int] = 2**30


@dataclasses.dataclass
class ParityConfig:
    completions: Positive[int] = 8  # that a server samples when it is met, for the trainer to score
    mean_limit: NotNegative[float] = 0.0  # of |log-prob difference|; 0: by dtype (1e-3 in float32, 2e-2 in bfloat16)
    p99_limit: NotNegative[float] = 0.0  # 0: by dtype (1e-2 in float32, 2e-1 in bfloat16)
    every: NotNegative[int] = 50  # steps between two probes of the servers that have groups; 0: they are met once
    share: Share = 1 / 32  # of the completions that no update looks at, scored by the trainer before they count
    ratio_limit: Positive[float] = 0.04  # of a server's mean importance ratio, away from 1: median of its last groups
    # nats, of a server's mean |log-prob difference|, staleness included: likewise
    difference_limit: Positive[float] = 1.0


@dataclasses.dataclass
class EvaluationConfig:
    every: Positive[int] = 100  # steps; also at step 0 and at the end
    prompts: Positive[int] = 1000  # held-out prompts
    samples: Positive[int] = 16  # completions of each
    servers: NotNegative[int] = 0  # how many of the servers evaluate; 0: all, and training waits


@dataclasses.dataclass
class CheckpointConfig:
    every: Positive[int] = 20  # steps
    keep: Positive[int] = 2  # newest ones that stay on disk


@dataclasses.dataclass
class TelemetryConfig:
    tensorboard: bool = True  # event files in WORKDIR/tensorboard
    wandb_project: str = ""  # of Weights & Biases; empty: off
    samples_every: NotNegative[int] = 10  # steps between samples of rollouts written down
    samples: NotNegative[int] = 8  # completions written each time


@dataclasses.dataclass
class Config:
    seed: NotNegative[int] = 0  # of prompts, budgets and sampling
    max_steps: Positive[int] = 1000  # optimizer steps: how many batches are trained on
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    environment: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    sft: SftConfig = dataclasses.field(default_factory=SftConfig)
    curriculum: CurriculumConfig = dataclasses.field(default_factory=CurriculumConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    pacing: PacingConfig = dataclasses.field(default_factory=PacingConfig)
    fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
    parity: ParityConfig = dataclasses.field(default_factory=ParityConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)

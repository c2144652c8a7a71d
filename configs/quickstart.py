"""A policy that learns arithmetic on a laptop, with the whole recipe switched on.

Command    make quickstart
           (scalerl-sft  --config=configs/quickstart.py --workdir=runs/quickstart-warm-start
            scalerl-train --config=configs/quickstart.py --workdir=runs/quickstart)
Hardware   2 CPU cores, 4 GB of memory
Time       3 to 9 minutes, the installation not counted
Expect     held-out pass rate from under 0.40 to about 0.90 or more by RL alone; the forecast at half of the compute is
           within 0.05 of the last quarter
"""

from scalerl_jax.config import Config


def get_config() -> Config:
    config = Config(max_steps=130)
    config.model.path = "runs/quickstart-warm-start/model"
    config.model.compute_dtype = "float32"
    config.model.sync_dtype = "float32"
    config.model.remat = "none"

    # Chains of 6 to 10 terms; a fifth of the steps in the warm start's traces are slips. About two epochs of prompts.
    config.environment.minimum_terms = 6
    config.environment.maximum_terms = 10
    config.environment.train_prompts = 1536
    config.sft.max_steps = 220
    config.sft.learning_rate = 6e-3
    config.sft.error_rate = 0.2

    # The longest chain takes 38 tokens to think: a few of them are interrupted.
    config.rollout.prompts_per_step = 24
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 24
    config.rollout.thinking_budget_min = 36
    config.rollout.thinking_budget_max = 52
    config.rollout.answer_budget = 8

    config.optimizer.learning_rate = 8e-5
    config.optimizer.warmup_steps = 10
    config.optimizer.beta2 = 0.99

    # One micro-batch holds the largest batch, so an update costs the same when most of its prompts are dropped: the
    # device-hours of the forecast then grow with the updates.
    config.learner.seq_len = 512
    config.learner.micro_batch_rows = 24

    config.fleet.slots = 64
    config.fleet.queue = 128

    config.evaluation.every = 5
    config.evaluation.prompts = 256
    config.evaluation.samples = 8
    config.checkpoint.every = 5
    return config

"""A run that takes seconds: 2 layers of width 32, 4 prompts an update. The tests give it its model and its files.

Command    scalerl-train --config=tests/train/tiny.py --workdir=D --config.model.path=M ...
Hardware   any
Time       seconds, start-up apart
Expect     nothing: the policy knows ten words
"""

from scalerl_jax.config import Config


def get_config() -> Config:
    config = Config(seed=5, max_steps=12)
    config.model.compute_dtype = config.model.sync_dtype = "float32"
    config.model.remat = "none"
    config.environment.name = "math"

    config.rollout.prompts_per_step, config.rollout.group_size = 4, 4
    config.rollout.max_prompt_tokens = 8
    config.rollout.thinking_budget_min, config.rollout.thinking_budget_max = 6, 10
    config.rollout.answer_budget = 4
    config.rollout.interruption_text = "time is up</think>"
    config.pacing.max_off_policy_steps = 3

    config.optimizer.learning_rate, config.optimizer.warmup_steps = 3e-3, 2
    config.learner.seq_len, config.learner.micro_batch_rows, config.learner.logprob_chunk = 64, 4, 32

    config.fleet.slots, config.fleet.queue, config.fleet.decode_chunk = 8, 16, 4
    config.fleet.heartbeat_seconds = 0.2
    config.evaluation.every, config.evaluation.prompts, config.evaluation.samples = 4, 6, 2
    config.checkpoint.every = 3
    config.telemetry.tensorboard = False
    config.telemetry.samples_every, config.telemetry.samples = 1, 4
    return config

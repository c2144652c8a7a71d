"""MiniMax-M1's recipe, in the terms of arXiv 2510.13786 (table of A.17, figure 2).

Row        CISPO | prompt average | PPO-off-policy | 1,280 completions | zero-variance prompts dropped | FP32 head

Chosen     what the row leaves open: k = 8; the prompt's standard deviation, as GRPO; interruptions; no curriculum; the
           ratio's cap, 5, as ScaleRL

Command    scalerl-train --config=configs/recipes/minimax_m1.py --workdir=runs/minimax_m1 --servers=host:port,...
           with config.model.path at an 8B policy after supervised fine-tuning, as for configs/scalerl_8b.py
Hardware   as configs/scalerl_8b.py
Time       never run here at this size
Expect     the paper: asymptote 0.610, exponent 1.77, midpoint 4,137 GPU-hours
"""

import os

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file


def change(config: Config) -> Config:
    """What makes it this recipe, whatever the model and the task."""
    config.objective.loss = "cispo"
    config.objective.max_ratio = 5.0
    config.objective.aggregation = "prompt"
    config.objective.advantage_normalization = "prompt"
    config.objective.filter_zero_variance = True
    config.pacing.kind = "phased"
    config.pacing.max_off_policy_steps = 8
    config.rollout.prompts_per_step = config.rollout.prompts_per_step * 5 // 3  # 80, where ScaleRL has 48
    config.curriculum.no_positive_resampling_at = 2.0  # off
    config.rollout.length_control = "interrupt"
    config.model.head_precision = "default"  # operands as everywhere, logits in float32
    return config


def get_config() -> Config:
    return change(load_file(os.path.join(os.path.dirname(__file__), "..", "scalerl_8b.py")))

"""GRPO as DeepSeek-R1 has it, in the terms of arXiv 2510.13786 (table of A.17, figure 2).

Row        clip 0.2 and 0.2 | sample average | PPO-off-policy-8 | 768 completions | all prompts kept | no FP32 head |
           prompt standard deviation | interruptions

Chosen     every prompt of an epoch is drawn, however often it was solved: the row names no curriculum

Command    scalerl-train --config=configs/recipes/deepseek_grpo.py --workdir=runs/deepseek_grpo --servers=host:port,...
           with config.model.path at an 8B policy after supervised fine-tuning, as for configs/scalerl_8b.py
Hardware   as configs/scalerl_8b.py
Time       never run here at this size
Expect     the paper: asymptote 0.490, exponent 1.17, midpoint 1,733 GPU-hours; past 6,000 GPU-hours it was unstable
"""

import os

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file


def change(config: Config) -> Config:
    """What makes it this recipe, whatever the model and the task."""
    config.objective.loss = "clip"
    config.objective.clip_low, config.objective.clip_high = 0.2, 0.2
    config.objective.aggregation = "sample"
    config.objective.advantage_normalization = "prompt"
    config.objective.filter_zero_variance = False
    config.pacing.kind = "phased"
    config.pacing.max_off_policy_steps = 8
    config.curriculum.no_positive_resampling_at = 2.0  # off
    config.rollout.length_control = "interrupt"
    config.model.head_precision = "bfloat16"
    return config


def get_config() -> Config:
    return change(load_file(os.path.join(os.path.dirname(__file__), "..", "scalerl_8b.py")))

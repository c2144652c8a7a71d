"""Magistral's recipe, in the terms of arXiv 2510.13786 (table of A.17, figure 2).

Row        as DAPO (clip 0.2 and 0.26, prompt average, zero-variance prompts dropped, no FP32 head), on PipelineRL

Chosen     what the row leaves open: k = 8; 1,280 completions, as DAPO; the batch's standard deviation, which the paper
           names as Magistral's own; interruptions; no curriculum

Command    scalerl-train --config=configs/recipes/magistral.py --workdir=runs/magistral --servers=host:port,...
           with config.model.path at an 8B policy after supervised fine-tuning, as for configs/scalerl_8b.py
Hardware   as configs/scalerl_8b.py
Time       never run here at this size
Expect     the paper: asymptote 0.535, exponent 1.44, midpoint 2,139 GPU-hours
"""

import os

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file


def change(config: Config) -> Config:
    """What makes it this recipe, whatever the model and the task."""
    config.objective.loss = "clip"
    config.objective.clip_low, config.objective.clip_high = 0.2, 0.26
    config.objective.aggregation = "prompt"
    config.objective.advantage_normalization = "batch"
    config.objective.filter_zero_variance = True
    config.pacing.kind = "pipeline"
    config.pacing.max_off_policy_steps = 8
    config.rollout.prompts_per_step = config.rollout.prompts_per_step * 5 // 3  # 80, where ScaleRL has 48
    config.curriculum.no_positive_resampling_at = 2.0  # off
    config.rollout.length_control = "interrupt"
    config.model.head_precision = "bfloat16"
    return config


def get_config() -> Config:
    return change(load_file(os.path.join(os.path.dirname(__file__), "..", "scalerl_8b.py")))

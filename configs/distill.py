"""The quickstart's policy learns from a teacher that RL made, on the quickstart's task: on-policy distillation.

Command    make quickstart, which makes the warm start and, by RL, the teacher; then
           scalerl-export --workdir=runs/quickstart --out=runs/quickstart-teacher
           scalerl-train --config=configs/distill.py --workdir=runs/distill
Hardware   2 CPU cores, 4 GB of memory
Time       2 to 4 minutes on two cores that other work shared, after the quickstart
Expect     held-out pass rate from 0.31 to about 0.94 in a fifth of RL's model FLOPs, where the teacher has 0.954
           (docs/how_to/distillation.md)
"""

import os

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file


def get_config() -> Config:
    config = load_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "quickstart.py"))
    config.max_steps = 18
    # Nothing compares the completions of a group: few of each prompt, and many prompts.
    config.rollout.prompts_per_step = 96
    config.rollout.group_size = 2
    config.pacing.max_off_policy_steps = 1
    config.distill.teachers = {"rl": "runs/quickstart-teacher"}
    config.objective.distill = "student_topk"
    config.distill.k = 8
    config.objective.reward_weight = 0.0  # the teacher alone
    config.objective.truncated = "penalize"  # what is cut is learned from, too
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 3
    config.optimizer.decay_steps = 15
    return config

"""The quickstart's policy learns from a teacher that RL made, on the quickstart's task: on-policy distillation.

Command    make quickstart, which makes the warm start and, by RL, the teacher; then
           scalerl-export --workdir=runs/quickstart --out=runs/quickstart-teacher
           scalerl-train --config=configs/distill.py --workdir=runs/distill
Hardware   2 CPU cores, 4 GB of memory
Time       1 to 2 minutes on two cores, after the quickstart
Expect     held-out pass rate from 0.31 to the teacher's, about 0.95, in a fifth of RL's model FLOPs
           (docs/how_to/distillation.md)
"""

import os

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file


def get_config() -> Config:
    config = load_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "quickstart.py"))
    config.max_steps = 72
    # Nothing compares the completions of a group, and each token has a target of its own: small batches, many steps.
    config.rollout.group_size = 2
    config.learner.micro_batch_rows = 6  # hold a step
    config.pacing.max_off_policy_steps = 1
    config.distill.teachers = {"rl": "runs/quickstart-teacher"}
    config.objective.distill = "student_topk"
    config.distill.k = 8
    config.objective.reward_weight = 0.0  # the teacher alone
    config.objective.truncated = "penalize"  # what is cut is learned from, too
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 6
    config.optimizer.decay_steps = 66
    # From step to step the norm of the gradient differs by a factor of up to 30, .04 to 1.3.
    config.optimizer.max_grad_norm = 0.2
    config.evaluation.every = 6
    config.checkpoint.every = 12
    return config

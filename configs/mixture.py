"""Two environments at once: arithmetic, and small programs that are judged by running them in the sandbox.

The rest is as in quickstart.py.

Command    scalerl-sft --config=configs/mixture.py --workdir=runs/mixture-warm-start
           scalerl-train --config=configs/mixture.py --workdir=runs/mixture
Hardware   2 CPU cores, 4 GB of memory; Linux with bubblewrap (apt-get install bubblewrap)
Time       about 7 minutes, installed
Expect     held-out pass rate of both from about 0.4 to over 0.8; each has its own curve (curve-arithmetic.png,
           curve-programs.png) and its own forecast
"""

import os

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.config_io import load_file


def get_config() -> Config:
    config = load_file(os.path.join(os.path.dirname(__file__), "quickstart.py"))
    config.max_steps = 160
    config.model.path = "runs/mixture-warm-start/model"

    # Of each batch half the prompts are of either: weights say otherwise.
    config.mixture = {
        "arithmetic": EnvironmentConfig(minimum_terms=5, maximum_terms=8, train_prompts=768),
        "programs": EnvironmentConfig(
            name="programs", minimum_terms=3, maximum_terms=5, train_prompts=768, verifier_processes=2
        ),
    }
    config.environment = EnvironmentConfig()  # which is not read beside them

    config.rollout.answer_budget = 40  # a program
    config.optimizer.warmup_steps = 40
    config.evaluation.every = 8
    config.evaluation.prompts = 128
    config.evaluation.samples = 4
    config.checkpoint.every = 8
    return config

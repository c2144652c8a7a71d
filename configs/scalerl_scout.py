"""The paper's mixture of experts, Llama-4 Scout (17B x 16), with ScaleRL (arXiv 2510.13786, section 5 and figure 1).

Command    scalerl-train --config=configs/scalerl_scout.py --workdir=runs/scalerl_scout --servers=host:port,...
           with config.model.path at a Scout after supervised fine-tuning; prompts as for configs/scalerl_8b.py.
           Plan it, and do not start it yet: the vllm engine does not update a Scout, and the JAX engine has one device,
           which does not hold it twice (docs/limitations.md)
Hardware   the paper does not say. scalerl-plan --config=configs/scalerl_scout.py --topology=v5p:4x4x4
           --model_config=configs/scalerl_scout.json tells what 64 v5p take (docs/how_to/plan.md)
Time       the paper: fitted to 16,000 GPU-hours, continued to 45,000, 7,100 updates; never run here at this size
Expect     the paper, on its own data: a higher asymptote than the 8B run's, at a sixth of its compute
"""

import os

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file


def get_config() -> Config:
    config = load_file(os.path.join(os.path.dirname(__file__), "scalerl_8b.py"))
    config.max_steps = 7100
    config.model.path = "models/policy-scout-sft"
    config.learner.tensor = 4
    return config

"""Qwen3-1.7B on GSM8K on one GPU of 80 GB: as qwen3_0_6b_gsm8k.py, where the rest is said.

Command    hf download Qwen/Qwen3-1.7B --local-dir=Qwen/Qwen3-1.7B
           scalerl-train --config=configs/qwen3_1_7b_gsm8k.py --workdir=runs/qwen3_1_7b_gsm8k
Hardware   one NVIDIA GPU of 80 GB. Of its memory the trainer takes 60 %, the generator 30 %, 10 % is free: the trainer
           has 48 GiB, for masters, moments and gradients of 1.72 G parameters in float32 (25.6), two copies in
           bfloat16 (6.4), and activations; the generator 24 GiB, for two versions in bfloat16 (6.4), and keys and
           values of 64 sequences of 1,200 tokens (8.2, more while it works)
Time       not measured: never run, on any machine
Expect     not measured
"""

import os

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file


def get_config() -> Config:
    config = load_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "qwen3_0_6b_gsm8k.py"))
    config.model.path = "Qwen/Qwen3-1.7B"
    config.fleet.gpu_share = 0.3
    config.fleet.slots = 64
    config.learner.micro_batch_rows = 2
    return config

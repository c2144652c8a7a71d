"""The paper's 8B run: 48 prompts x 16 completions, up to 12,000 tokens to think, PipelineRL-8 (arXiv 2510.13786, A.3).

Command    scalerl-train --config=configs/scalerl_8b.py --workdir=runs/scalerl_8b --servers=host:port,...
           with config.model.path at an 8B policy after supervised fine-tuning (Llama 3 or Qwen3 architecture); the
           prompts are Polaris-53K from the hub, 1,000 of them held out
           (hf download --repo-type=dataset POLARIS-Project/Polaris-Dataset-53K, with scalerl-jax[environments])
Hardware   the paper: 16 trainers and 64 generators (GB200). float32 masters, moments and gradients of 8B parameters
           take 128 GB before activations, so the trainer needs at least two 141 GB devices
Time       the paper: 16,000 GPU-hours for about 6,250 updates
Expect     the paper, on its own data: asymptote 0.61, exponent 1.92, midpoint 2,542 GPU-hours
"""

from scalerl_jax.config import Config


def get_config() -> Config:
    config = Config(max_steps=6250)
    config.model.path = "models/policy-8b-sft"
    config.environment.name = "math"
    config.environment.train = "polaris"
    config.environment.long_prompts = "drop"
    config.environment.verifier_processes = 8
    config.learner.seq_len = 16_384
    config.fleet.slots = 256
    config.fleet.queue = 512
    config.fleet.decode_chunk = 32
    config.fleet.compute_dtype = "bfloat16"
    config.fleet.slowest_tokens_per_second = 4.0  # a loaded server makes 10: what is lost is missed within an hour
    return config

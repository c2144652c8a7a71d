"""The configs for one GPU: what their docstrings say of memory is what the run sets, and what the model takes."""

import dataclasses
import math
import os
import re

import jax
import pytest

from launch import accelerators
from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.jax import engine
from rollout_server.engines.jax.weights import abstract_weights, decode_precision
from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file
from scalerl_jax.environments.data import layouts
from scalerl_jax.model import DecoderConfig, Precision
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.system.memory import GIB
from tests.support.paths import ROOT

# As the folders' config.json say.
SMALL = DecoderConfig(
    vocab_size=151_936, hidden_size=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate_size=3072,
    family="qwen3", tied_embeddings=True, rope_theta=1e6, max_positions=40_960,
)  # fmt: skip
MODELS = {"0_6b": SMALL, "1_7b": dataclasses.replace(SMALL, hidden_size=2048, intermediate_size=6144)}
GPU = {"0_6b": 24, "1_7b": 80}  # GiB
ACTIVATIONS = 2.0  # GiB that must be left to the trainer: a row's block inputs, one block's insides, chunks of the head


def load(size: str) -> tuple[Config, str]:
    path = os.path.join(ROOT, "configs", f"qwen3_{size}_gsm8k.py")
    with open(path, encoding="utf-8") as file:
        return load_file(path), " ".join(file.read().split('"""')[1].split())


@pytest.mark.parametrize("size", ["0_6b", "1_7b"])
def test_trainer_and_generator_fit_side_by_side(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, said = load(size)
    monkeypatch.setattr(accelerators, "jax_uses_gpus", lambda environment: True)
    sharing = accelerators.share_out(
        servers=config.fleet.servers, share=config.fleet.gpu_share, environment={"CUDA_VISIBLE_DEVICES": "0"}
    )
    assert sharing is not None
    shares = [
        float(environment["XLA_PYTHON_CLIENT_MEM_FRACTION"]) for environment in (sharing.trainer, *sharing.servers)
    ]
    trainer, server = (share * GPU[size] * GIB for share in shares)
    assert sharing.vllm_memory == pytest.approx(shares[1])
    assert (
        f"trainer takes {shares[0]:.0%}".replace("%", " %") in said
        and f"generator {shares[1]:.0%}".replace("%", " %") in said
    )

    parameters = sum(map(math.prod, hf_tensors(MODELS[size]).values()))
    states, copies = 16 * parameters, 2 * 2 * parameters  # masters, two moments, gradients; bits sent and compared
    assert states + copies + ACTIVATIONS * GIB < trainer
    assert f"float32 ({states / GIB:.1f})" in said and f"bfloat16 ({copies / GIB:.1f})" in said

    precision = Precision(compute="bfloat16", sync="bfloat16")
    weights = abstract_weights(MODELS[size], precision)
    tokens = config.rollout.max_prompt_tokens + config.rollout.answer_budget
    longest = int(re.sub(",", "", re.search(r"sequences of ([\d,]+) tokens", said)[1]))
    assert config.rollout.thinking_budget_max == 0 and tokens <= longest <= tokens + 64 <= config.learner.seq_len
    options = EngineOptions(
        "", slots=config.fleet.slots, queue=0, maximum_tokens=longest, compute_dtype="bfloat16", sync_dtype="bfloat16"
    )
    booked = engine.of_model(options, MODELS[size], decode_precision(precision, "gpu"), weights)
    assert f"of {config.fleet.slots} sequences" in said and f"({booked.cache / GIB:.1f}, more" in said
    # Scoring stacks the weights once more.
    working = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)) + GIB // 2
    booked = dataclasses.replace(booked, working=working)
    assert "would fit" not in booked.check(device=int(server), host=16 * GIB, process=2 * GIB)


@pytest.mark.parametrize("size", ["0_6b", "1_7b"])
def test_their_problems_are_those_of_gsm8k(size: str) -> None:
    config, said = load(size)
    assert config.environment.train in layouts.LAYOUTS and config.environment.name == "math"
    assert f"--config=configs/qwen3_{size}_gsm8k.py" in said and f"--local-dir={config.model.path}" in said
    assert "\\boxed{}" in config.environment.prompt_suffix
    # The scheduled completions keep the generator busy: more may wait than one group.
    assert config.fleet.slots + config.fleet.queue >= config.rollout.prompts_per_step * config.rollout.group_size

"""Tiny models on disk, and a vLLM on them.

A vLLM takes seconds to start and GBs to run, so the tests of a file share one, and one runs at a time.
"""

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import hf_tensors

MAXIMUM_TOKENS = 480
SLOTS = 4


def config(kind: str = "qwen3", *, tied: bool = True, **sizes: Any) -> DecoderConfig:
    """Two layers, two query heads on each of two key/value heads; a vocabulary that vLLM pads."""
    small: dict[str, Any] = {
        "vocab_size": 90, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32,
        "intermediate_size": 48, "max_positions": 512,
    }  # fmt: skip
    rope: dict[str, Any] = {"rope_theta": 500_000.0, "rope_scaling": (8.0, 1.0, 4.0, 64.0)} if kind == "llama" else {}
    return DecoderConfig(family=kind, tied_embeddings=tied, **{**small, **rope, **sizes})


def random_tensors(model: DecoderConfig, seed: int) -> dict[str, np.ndarray]:
    """Sharp enough that other weights give other probabilities."""
    rng = np.random.default_rng(seed)
    named = {}
    for name, shape in hf_tensors(model).items():
        value = rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(0, 2 / math.sqrt(shape[-1]), shape)
        named[name] = value.astype(np.float32)
    return named


def write_folder(folder: pathlib.Path, model: DecoderConfig, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.to_hf()))
    words = {f"t{i}": i for i in range(model.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


def started(folder: pathlib.Path, model: DecoderConfig, **options: Any) -> Iterator[Any]:
    """For fixtures: a vLLM on random weights of seed 0, ended when its tests are over."""
    from tests.rollout_server.shared_vllm import Shared

    write_folder(folder, model, random_tensors(model, 0))
    defaults = {
        "slots": SLOTS,
        "maximum_tokens": MAXIMUM_TOKENS,
        "compute_dtype": "float32",
        "sync_dtype": "float32",
    }
    shared = Shared(folder, **{**defaults, **options})
    yield shared
    shared.close()

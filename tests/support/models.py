"""Toy decoders and their Hugging Face folders. No jax here: vLLM's environment has none."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import hf_tensors


def toy_decoder(**sizes: Any) -> DecoderConfig:
    """Two layers, two query heads on each of two key/value heads; `sizes` are fields of DecoderConfig."""
    toy: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "intermediate_size": 48,
    }  # fmt: skip
    return DecoderConfig(**{**toy, **sizes})


def random_tensors(decoder: DecoderConfig, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights by Hugging Face name, sharp enough that other weights give other probabilities."""
    rng = np.random.default_rng(seed)
    named = {}
    for name, shape in hf_tensors(decoder).items():
        value = rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(0, 2 / math.sqrt(shape[-1]), shape)
        named[name] = value.astype(np.float32)
    return named


def write_folder(folder: pathlib.Path, decoder: DecoderConfig, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    """With a tokenizer of as many words as the vocabulary; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(decoder.to_hf()))
    words = {f"t{number}": number for number in range(decoder.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder

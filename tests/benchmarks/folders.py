"""Model folders for benchmarks."""

import json
import os

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from scalerl_jax.model import DecoderConfig
from scalerl_jax.model.hf import hf_tensors


def write_folder(path: str, config: DecoderConfig) -> int:
    """A model folder with random weights; the number of parameters."""
    rng = np.random.default_rng(0)
    named = {}
    for name, shape in hf_tensors(config).items():
        value = np.ones(shape) if len(shape) == 1 else rng.normal(0, shape[-1] ** -0.5, shape)
        named[name] = value.astype(np.float32)
    save_file(named, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config.to_hf(), file)
    words = {str(i): i for i in range(config.vocabulary)}
    Tokenizer(WordLevel(words, unk_token="0")).save(os.path.join(path, "tokenizer.json"))
    return sum(value.size for value in named.values())

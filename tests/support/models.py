"""Toy decoders and their Hugging Face folders. No jax here: vLLM's environment has none."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.safetensors_folder import Tensors
from scalerl_jax.model.tensor_layout import hf_tensors, layout, stored


def toy_decoder(**sizes: Any) -> DecoderConfig:
    """Two layers, two query heads on each of two key/value heads; `sizes` are fields of DecoderConfig."""
    toy: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "intermediate_size": 48,
    }  # fmt: skip
    if sizes.get("family") == "qwen3_moe":
        toy |= {"experts": 4, "experts_per_token": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    if sizes.get("family") == "llama4_text":
        toy |= {
            "layers": 4, "experts": 4, "experts_per_token": 1, "nope_interval": 4, "attention_chunk": 16,
            "head_l2_norm": True, "temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.1,
        }  # fmt: skip
        toy["moe_intermediate_size"] = sizes.get("intermediate_size", toy["intermediate_size"])
    return DecoderConfig(**{**toy, **sizes})


def random_tensors(decoder: DecoderConfig, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights by Hugging Face name, sharp enough that other weights give other probabilities."""
    rng = np.random.default_rng(seed)
    named = {}
    for name, shape in hf_tensors(decoder).items():
        value = rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(0, 2 / math.sqrt(shape[-1]), shape)
        named[name] = value.astype(np.float32)
    return named


def in_files(decoder: DecoderConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As published folders have them: experts one by one, or several projections of theirs in one tensor."""
    out: dict[str, np.ndarray] = {}
    for name, parts in stored(decoder).items():
        if name not in tensors:
            continue
        if layout(decoder)[name].row.columns:  # gate comes before up
            before = [out[parts[0]]] if parts[0] in out else []
            out[parts[0]] = np.ascontiguousarray(np.concatenate([*before, tensors[name].swapaxes(1, 2)], axis=2))
        else:
            out |= {name: tensors[name]} if parts == [name] else dict(zip(parts, tensors[name], strict=True))
    return out


def read_tensors(folder: pathlib.Path, decoder: DecoderConfig) -> dict[str, np.ndarray]:
    """What write_folder was given."""
    tensors = Tensors(str(folder), decoder)
    return {name: tensors[name] for name in hf_tensors(decoder)}


def write_folder(folder: pathlib.Path, decoder: DecoderConfig, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    """With a tokenizer of as many words as the vocabulary; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(in_files(decoder, tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(decoder.to_hf()))
    words = {f"t{number}": number for number in range(decoder.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder

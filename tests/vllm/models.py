"""Tiny models on disk, and a vLLM on them.

A vLLM takes seconds to start and GBs to run, so the tests of a file share one.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

from scalerl_jax.model.decoder_config import DecoderConfig
from tests.support.models import random_tensors, toy_decoder, write_folder
from tests.support.transformers_reference import Reference

MAXIMUM_TOKENS = 1200
SLOTS = 4


def config(kind: str = "qwen3", *, tied: bool = True, **sizes: Any) -> DecoderConfig:
    """Two layers, two query heads on each of two key/value heads; a vocabulary that vLLM pads."""
    small = {"vocab_size": 90, "head_dim": 32, "max_positions": 1536}
    rope: dict[str, Any] = {"rope_theta": 500_000.0, "rope_scaling": (8.0, 1.0, 4.0, 64.0)} if kind == "llama" else {}
    wide = {"hidden_size": 128} if kind == "qwen2" else {}  # vLLM's has no heads of another size than width / heads
    return toy_decoder(family=kind, tied_embeddings=tied, **{**small, **rope, **wide, **sizes})


def reference_of(shared: Any, seed: int) -> Reference:
    """transformers' model of the same shape, with the weights of a seed."""
    return Reference(shared.vllm.options.model, shared.vllm.config, seed)


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

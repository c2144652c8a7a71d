"""The policy: parameters, forward pass, log-probabilities, Hugging Face names.

The names below are imported on first use, so that the model families' rows can be read without jax.
"""

import importlib
from typing import Any

_HOMES = {
    "Decoder": "module",
    "DecoderConfig": "decoder_config",
    "Precision": "decoder",
    "abstract_params": "decoder",
    "forward": "decoder",
    "init_params": "decoder",
    "load_hf": "hf",
    "logits": "head",
    "token_logprobs": "head",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

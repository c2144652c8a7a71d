"""Qwen2 and Qwen2.5: as Llama, with a bias on query, key and value."""

from collections.abc import Callable
from typing import Any

from scalerl_jax.model.families import dense

ARCHITECTURE = "Qwen2ForCausalLM"
ONLY = {"attention_bias": True, "mlp_bias": False}
ROWS = (*dense.EMBED, *dense.ATTENTION, *dense.BIASES, *dense.MLP, *dense.AFTER)


def layer(w: Any, x: Any, attend: Callable[..., Any]) -> Any:
    return dense.mlp(w, dense.attention(w, x, attend, biases=True))

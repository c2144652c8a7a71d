"""Llama 3.x; the rescaled frequencies of 3.1 are read from the config."""

from collections.abc import Callable
from typing import Any

from scalerl_jax.model.families import dense

ARCHITECTURE = "LlamaForCausalLM"
ONLY = {"attention_bias": False, "mlp_bias": False}
ROWS = (*dense.EMBED, *dense.ATTENTION, *dense.MLP, *dense.AFTER)


def layer(w: Any, x: Any, attend: Callable[..., Any]) -> Any:
    return dense.mlp(w, dense.attention(w, x, attend))

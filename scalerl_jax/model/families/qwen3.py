"""Qwen3: as Llama, with an RMSNorm on each head's query and key."""

from collections.abc import Callable
from typing import Any

from scalerl_jax.model.families import dense

ARCHITECTURE = "Qwen3ForCausalLM"
ONLY = {"attention_bias": False}
IMPLIED = {"use_qk_norm": True}  # some folders repeat what the family always has
ROWS = (*dense.EMBED, *dense.ATTENTION, *dense.HEAD_NORMS, *dense.MLP, *dense.AFTER)


def layer(w: Any, x: Any, attend: Callable[..., Any]) -> Any:
    return dense.mlp(w, dense.attention(w, x, attend, head_norms=True))

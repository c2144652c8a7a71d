"""A family that is one file and one row: beside Qwen3's MLP the mean of experts, whose weights have three dimensions.

Importing it adds the row to FAMILIES. What its experts' dimension is called does not matter: here one for each channel
of a head, so that no field of the config is needed.
"""

import types
from collections.abc import Callable
from typing import Any

from scalerl_jax.model.families import FAMILIES, dense, qwen3
from scalerl_jax.model.families.rows import WeightRow

_FUSED = "mlp.experts.gate_up_proj"
EXPERTS = (
    WeightRow("experts_gate", "mlp.experts.gate_proj", ("head", "width", "mlp"), fused=_FUSED),
    WeightRow("experts_up", "mlp.experts.up_proj", ("head", "width", "mlp"), fused=_FUSED),
    WeightRow("experts_down", "mlp.experts.down_proj", ("head", "mlp", "width"), "residual"),
)


def layer(w: Any, x: Any, attend: Callable[..., Any]) -> Any:
    x = dense.attention(w, x, attend, head_norms=True)
    h = w.norm(x, "mlp_norm")[..., None, None, :]
    gate, up = w.weight("experts_gate", "experts_up")
    mixed = (w.silu(h @ gate) * (h @ up)) @ w.weight("experts_down")  # [..., experts, 1, width]
    return dense.mlp(w, x) + mixed.mean(axis=(-3, -2))


FAMILIES["experts"] = types.SimpleNamespace(  # type: ignore[assignment]
    ARCHITECTURE="ExpertsForCausalLM", ROWS=(*qwen3.ROWS[:-2], *EXPERTS, *qwen3.ROWS[-2:]), layer=layer
)

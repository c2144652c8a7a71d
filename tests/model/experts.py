"""A family some of whose weights have three dimensions, for all that carries weights: its layer is never run.

Importing it adds the row to FAMILIES. What its experts' dimension is called does not matter: here one for each channel
of a head, so that no field of the config is needed.
"""

import types

from scalerl_jax.model.families import FAMILIES, qwen3
from scalerl_jax.model.families.rows import Row

_FUSED = "mlp.experts.gate_up_proj"
EXPERTS = (
    Row("experts_gate", "mlp.experts.gate_proj", ("head", "width", "mlp"), fused=_FUSED),
    Row("experts_up", "mlp.experts.up_proj", ("head", "width", "mlp"), fused=_FUSED),
    Row("experts_down", "mlp.experts.down_proj", ("head", "mlp", "width"), "residual"),
)
FAMILIES["experts"] = types.SimpleNamespace(  # type: ignore[assignment]
    ARCHITECTURE="ExpertsForCausalLM", ROWS=(*qwen3.ROWS[:-2], *EXPERTS, *qwen3.ROWS[-2:]), layer=None
)

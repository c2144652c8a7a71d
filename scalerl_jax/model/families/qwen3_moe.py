"""Qwen3-MoE: as Qwen3, with experts in place of the MLP of every layer.

    x += sum of k experts e:  weight_e * down_e(silu(gate_e(h)) * up_e(h))       h = rms_norm(x)

for the k experts of the highest probability in softmax(router(h)); weight_e is that probability, normalized to a sum of
1 with norm_topk_prob. One tensor [experts, out, in] holds a projection of all experts; published folders hold each
expert separately.

Left out on purpose: layers without experts (mlp_only_layers, decoder_sparse_step; no published model has them), and
the auxiliary loss: training does not act on the balance, and reports it.
"""

from collections.abc import Callable
from typing import Any

from scalerl_jax.model.families import dense
from scalerl_jax.model.families.dense import WeightRow, norm

ARCHITECTURE = "Qwen3MoeForCausalLM"
FIELDS = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
ALIASES = {"num_local_experts": "num_experts"}  # transformers 5
ONLY: dict[str, Any] = {"attention_bias": False, "mlp_only_layers": [], "decoder_sparse_step": 1}
# Some folders repeat what the family always has. Where there is a window, every layer has it.
IMPLIED = {"use_qk_norm": True, "use_sliding_window": False}

_GATE_UP, _DOWN = "mlp.experts.w13_weight", "mlp.experts.w2_weight"
_OUT, _IN = ("experts", "expert_mlp", "width"), ("experts", "width", "expert_mlp")


def _expert(part: str, dimensions: tuple[str, ...], initial: str, fused: str) -> WeightRow:
    name, stored = f"mlp.experts.{part}_proj", f"mlp.experts.{{}}.{part}_proj.weight"
    return WeightRow(f"expert_{part}", name, dimensions, initial, fused=fused, stored=stored)


EXPERTS = (
    norm("mlp_norm", "post_attention_layernorm.weight"),
    WeightRow("router", "mlp.gate.weight", ("router", "width")),
    _expert("gate", _OUT, "normal", _GATE_UP),
    _expert("up", _OUT, "normal", _GATE_UP),
    _expert("down", _IN, "residual", _DOWN),
)
ROWS = (*dense.EMBED, *dense.ATTENTION, *dense.HEAD_NORMS, *EXPERTS, *dense.AFTER)


def layer(w: Any, x: Any, attend: Callable[..., Any]) -> Any:
    x = dense.attention(w, x, attend, head_norms=True)
    with w.scope("experts"):
        h = w.norm(x, "mlp_norm")
        return x + w.experts(h, w.route(h, "router", "softmax"), ("expert_gate", "expert_up", "expert_down"))

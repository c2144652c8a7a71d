"""Llama 4's text model (Scout): layers of two kinds, experts in each.

    local    q, k = l2(rope(q)), l2(rope(k)); a token attends inside its chunk of attention_chunk positions
    global   every nope_interval-th: no positions; q times  1 + attn_scale log(1 + floor((t + 1) / floor_scale))

    x += output(attend(q, k, v))                                          h = rms_norm(x)
    x += shared(h) + sum of k experts e:  expert_e(sigmoid(router_e(h)) h)   h = rms_norm(x)

RoPE rotates neighbors as pairs, not halves as in the other families; l2 is an RMSNorm without a scale. One compiled
layer serves both kinds: `w.local` selects the kind.

In the files gate and up of all experts are one tensor [experts, in, 2 out] and down is [experts, in, out]; published
folders also hold a model for images, which is not read.

Left out on purpose: layers without experts (Maverick's), and images. vLLM keeps query and key in another order, so its
engine does not support this family.
"""

from collections.abc import Callable, Mapping
from typing import Any

from scalerl_jax.model.families import dense
from scalerl_jax.model.families.dense import WeightRow, norm

ARCHITECTURE = "Llama4ForCausalLM"
FIELDS = {
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_intermediate_size": "intermediate_size",
    "nope_interval": "no_rope_layer_interval",
    "attention_chunk": "attention_chunk_size",
    "head_l2_norm": "use_qk_norm",
    "temperature_tuning": "attn_temperature_tuning",
    "floor_scale": "floor_scale",
    "attn_scale": "attn_scale",
}
ONLY: dict[str, Any] = {"attention_bias": False, "interleave_moe_layer_step": 1}
IN_VLLM = False

DEFAULT_THETA = 500_000.0
_DEFAULTS = {  # transformers', for keys that files leave out; its default sizes are no real model's, and not used
    "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "use_qk_norm": True, "attn_temperature_tuning": True,
    "floor_scale": 8192, "attn_scale": 0.1, "rms_norm_eps": 1e-5, "head_dim": 128, "max_position_embeddings": 131_072,
}  # fmt: skip
_GATE_UP = "feed_forward.shared_expert.gate_up_proj.weight"
_EXPERTS = "feed_forward.experts."
_OUT, _IN = ("experts", "expert_mlp", "width"), ("experts", "width", "expert_mlp")

ROWS = (
    *dense.EMBED,
    *dense.ATTENTION,
    norm("mlp_norm", "post_attention_layernorm.weight"),
    WeightRow("router", "feed_forward.router.weight", ("router", "width")),
    WeightRow("shared_gate", "feed_forward.shared_expert.gate_proj.weight", ("mlp", "width"), fused=_GATE_UP),
    WeightRow("shared_up", "feed_forward.shared_expert.up_proj.weight", ("mlp", "width"), fused=_GATE_UP),
    WeightRow("shared_down", "feed_forward.shared_expert.down_proj.weight", ("width", "mlp"), "residual"),
    WeightRow(
        "expert_gate", _EXPERTS + "gate_proj", _OUT, fused=_EXPERTS + "w13_weight",
        stored=_EXPERTS + "gate_up_proj", columns=(0, 2),
    ),
    WeightRow(
        "expert_up", _EXPERTS + "up_proj", _OUT, fused=_EXPERTS + "w13_weight",
        stored=_EXPERTS + "gate_up_proj", columns=(1, 2),
    ),
    WeightRow(
        "expert_down", _EXPERTS + "down_proj", _IN, "residual", fused=_EXPERTS + "w2_weight",
        stored=_EXPERTS + "down_proj", columns=(0, 1),
    ),
    *dense.AFTER,
)  # fmt: skip


def plain(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json of this family with the kinds of its layers as one number. Raises ValueError for other kinds."""
    out = {**_DEFAULTS, **config}
    layers, interval = out.get("num_hidden_layers"), out["no_rope_layer_interval"]
    if not isinstance(layers, int) or not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        return out  # and the error is raised where all numbers are read
    listed = out.pop("no_rope_layers", None)
    if listed:  # 1: with RoPE
        listed = [bool(entry) for entry in listed] if isinstance(listed, list) else []
        interval = out["no_rope_layer_interval"] = listed.index(False) + 1 if False in listed else layers + 1
    local = [(i + 1) % interval != 0 for i in range(layers)]
    kinds = ["chunked_attention" if one else "full_attention" for one in local]
    for key, found, wanted in (
        ("no_rope_layers", listed or local, local),
        ("layer_types", out.pop("layer_types", None) or kinds, kinds),
        ("moe_layers", out.pop("moe_layers", None) or list(range(layers)), list(range(layers))),
    ):
        if found != wanted:
            raise ValueError(f"{key} has other layers than every {interval}th without RoPE, and experts in each")
    # The first belongs to layers without experts; older files have a number instead of true in the second.
    out.pop("intermediate_size_mlp", None)
    if isinstance(out["attn_temperature_tuning"], int):
        out["attn_temperature_tuning"] = bool(out["attn_temperature_tuning"])
    return out


def layer(w: Any, x: Any, attend: Callable[..., Any]) -> Any:
    with w.scope("attention"):
        q, k, v = (w.heads(y) for y in w.project(w.norm(x, "attention_norm"), "query", "key", "value"))
        mixed = attend(w.placed_query(q), w.placed_key(k), v, local=w.local)
        x = x + w.project(mixed.reshape(*x.shape[:-1], -1), "output")
    with w.scope("experts"):
        h = w.norm(x, "mlp_norm")
        gate, up = w.project(h, "shared_gate", "shared_up")
        shared = w.project(w.silu(gate) * up, "shared_down")
        return x + shared + w.experts(h, w.route(h, "router", "sigmoid"), ("expert_gate", "expert_up", "expert_down"))

"""The weights and the two halves of a dense layer, for families that use them; biases and head norms are optional.

x += output(attend(rope(norm(query(h))), rope(norm(key(h))), value(h)))   h = rms_norm(x)
x += down(silu(gate(h)) * up(h))                                          h = rms_norm(x)
"""

from collections.abc import Callable
from typing import Any

from scalerl_jax.model.families.rows import WeightRow, bias, norm

_QKV, _QKV_BIAS, _GATE_UP = "self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias", "mlp.gate_up_proj.weight"

EMBED = (WeightRow("embed", "model.embed_tokens.weight", ("vocabulary", "width"), layered=False),)
ATTENTION = (
    norm("attention_norm", "input_layernorm.weight"),
    WeightRow("query", "self_attn.q_proj.weight", ("heads", "width"), fused=_QKV),
    WeightRow("key", "self_attn.k_proj.weight", ("kv_heads", "width"), fused=_QKV),
    WeightRow("value", "self_attn.v_proj.weight", ("kv_heads", "width"), fused=_QKV),
    WeightRow("output", "self_attn.o_proj.weight", ("width", "heads"), "residual"),
)
BIASES = (
    bias("query_bias", "self_attn.q_proj.bias", "heads", fused=_QKV_BIAS),
    bias("key_bias", "self_attn.k_proj.bias", "kv_heads", fused=_QKV_BIAS),
    bias("value_bias", "self_attn.v_proj.bias", "kv_heads", fused=_QKV_BIAS),
)
HEAD_NORMS = (
    norm("query_norm", "self_attn.q_norm.weight", "head"),
    norm("key_norm", "self_attn.k_norm.weight", "head"),
)
MLP = (
    norm("mlp_norm", "post_attention_layernorm.weight"),
    WeightRow("gate", "mlp.gate_proj.weight", ("mlp", "width"), fused=_GATE_UP),
    WeightRow("up", "mlp.up_proj.weight", ("mlp", "width"), fused=_GATE_UP),
    WeightRow("down", "mlp.down_proj.weight", ("width", "mlp"), "residual"),
)
AFTER = (
    norm("final_norm", "model.norm.weight", layered=False),
    WeightRow("head", "lm_head.weight", ("vocabulary", "width"), layered=False),
)


def attention(w: Any, x: Any, attend: Callable[..., Any], *, biases: bool = False, head_norms: bool = False) -> Any:
    """x [..., width] -> like x. biases: on query, key and value; head_norms: RMSNorm on each head's query and key."""
    with w.scope("attention"):
        qkv = w.project(w.norm(x, "attention_norm"), "query", "key", "value")
        if biases:
            qkv = w.add(qkv, "query_bias", "key_bias", "value_bias")
        q, k, v = (w.heads(y) for y in qkv)
        if head_norms:
            q, k = w.norm(q, "query_norm"), w.norm(k, "key_norm")
        mixed = attend(w.rotate(q), w.rotate(k), v)
        return x + w.project(mixed.reshape(*x.shape[:-1], -1), "output")


def mlp(w: Any, x: Any) -> Any:
    """x [..., width] -> like x."""
    with w.scope("mlp"):
        gate, up = w.project(w.norm(x, "mlp_norm"), "gate", "up")
        return x + w.project(w.silu(gate) * up, "down")

"""One row of a family's table, with the properties of one weight; and the rows and the two halves of a dense layer, for
families that use them. Biases and head norms are optional.

x += output(attend(rope(norm(query(h))), rope(norm(key(h))), value(h)))   h = rms_norm(x)
x += down(silu(gate(h)) * up(h))                                          h = rms_norm(x)
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """`name` and `fused` are names within a layer if `layered`.

    A dimension's name gives its size (tensor_layout.sizes), the mesh axes that shard it in the trainer
    (sharding.RULES), and whether vLLM's workers split it (tensor_layout.CUT). Matrices of layers are [out, in] in the
    contract, as in `dimensions`, and [in, out] in the trainer's tree; any other tensor is the same in both, so experts
    are [experts, out, in] everywhere. Files may hold each expert separately: then `stored` is its name, with {} for the
    expert's number; or all of them transposed, with several weights side by side: then there are `columns`.
    """

    leaf: str  # of the trainer's parameter tree
    name: str  # Hugging Face's
    dimensions: tuple[str, ...]  # as in the files
    initial: str = "normal"  # normal | residual: smaller, the end of a residual branch | ones | zeros
    fused: str = ""  # vLLM's parameter that holds it and the next weights with this name; empty: a separate one
    decays: bool = True  # weight decay
    layered: bool = True
    stored: str = ""  # name in the files, if those hold it in another form; empty: as `name`
    # (n, of): the n-th of so many parts of `stored`'s last dimension, [experts, in, of * out]
    columns: tuple[int, int] | None = None

    @property
    def transposed(self) -> bool:
        return self.layered and len(self.dimensions) == 2

    @property
    def tree_dimensions(self) -> tuple[str, ...]:
        """The dimensions in the trainer's tree, the stack of layers first."""
        own = self.dimensions[::-1] if self.transposed else self.dimensions
        return ("layers", *own) if self.layered else own

    @property
    def side(self) -> int:
        """The axis of the outputs in the trainer's tree, along which weights that share a product are concatenated."""
        return -1 if self.transposed or len(self.dimensions) < 2 else -2


def norm(leaf: str, name: str, dimension: str = "scale", *, layered: bool = True) -> WeightRow:
    """The scale of an RMSNorm."""
    return WeightRow(leaf, name, (dimension,), "ones", decays=False, layered=layered)


def bias(leaf: str, name: str, dimension: str, *, fused: str) -> WeightRow:
    """The bias of the outputs of a product."""
    return WeightRow(leaf, name, (dimension,), "zeros", fused=fused, decays=False)


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

"""The shapes in which every family is held against transformers and against itself. No jax: vLLM has none.

Among them, for each family: heads whose size is not width / heads; one, four and eight query heads on a key/value
head; tied and untied; vocabularies that nothing divides; Llama 3.1's RoPE, with more positions than it was made for; a
token with one, some and all of the experts.
"""

from typing import Any

from scalerl_jax.model.decoder_config import DecoderConfig
from tests.support.models import toy_decoder

_DENSE: dict[str, dict[str, Any]] = {
    "alone-tied": {"vocab_size": 61, "heads": 4, "kv_heads": 4, "tied_embeddings": True},
    "fours-untied-scaled": {
        "vocab_size": 97, "hidden_size": 48, "heads": 8, "kv_heads": 2, "head_dim": 16, "norm_epsilon": 1e-5,
        "rope_theta": 500_000.0, "rope_scaling": (8.0, 1.0, 4.0, 32.0),
    },
    "eights-tied-scaled": {
        "vocab_size": 131, "hidden_size": 40, "layers": 3, "heads": 8, "kv_heads": 1, "head_dim": 10,
        "intermediate_size": 56, "tied_embeddings": True, "rope_theta": 1e6, "rope_scaling": (32.0, 1.0, 2.0, 16.0),
    },
}  # fmt: skip
_EXPERTS: dict[str, dict[str, Any]] = {
    "two-of-eight": {"experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "one-of-five": {"experts": 5, "experts_per_token": 1, "moe_intermediate_size": 40, "norm_topk_prob": False},
    "all-of-three": {"experts": 3, "experts_per_token": 3, "moe_intermediate_size": 8, "norm_topk_prob": False},
}
_LLAMA4: dict[str, dict[str, Any]] = {  # chunks and temperatures that change inside of the segments
    "one-of-four": {"experts": 4, "attention_chunk": 16, "temperature_tuning": True},
    "global-every-second": {"experts": 3, "nope_interval": 2, "attention_chunk": 7, "head_l2_norm": False},
    "two-of-four": {
        "experts": 4,
        "experts_per_token": 2,
        "nope_interval": 3,
        "attention_chunk": 1000,
        "floor_scale": 3,
    },
}
SHAPES: dict[str, dict[str, dict[str, Any]]] = dict.fromkeys(("llama", "qwen2", "qwen3"), _DENSE) | {
    "llama4_text": {
        name: {**dense, **own} for dense, (name, own) in zip(_DENSE.values(), _LLAMA4.items(), strict=True)
    },
    "qwen3_moe": {name: {**dense, **own} for dense, (name, own) in zip(_DENSE.values(), _EXPERTS.items(), strict=True)},
}
CASES = [f"{family}-{shape}" for family, shapes in SHAPES.items() for shape in shapes]
# For tests that compile much, whose other cases are slow: one shape of each family, and every shape of a dense one.
QUICK = [f"{family}-{list(shapes)[i % 3]}" for i, (family, shapes) in enumerate(SHAPES.items())]


def decoder(case: str) -> DecoderConfig:
    family, shape = case.split("-", 1)
    return toy_decoder(**{"family": family, "max_positions": 4096, **SHAPES[family][shape]})

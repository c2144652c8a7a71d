"""The decoder's shape, read from and written to a Hugging Face config.json.

Both sides must run the same function: they compare its canonical JSON when they meet. No jax: a generator reads it too.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from scalerl_jax.model.families import FAMILIES

SIZES = {  # field -> its key in config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}
_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU MLP."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    # Llama 3.1's rescaled frequencies: (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings).
    rope_scaling: tuple[float, float, float, float] | None = None
    norm_epsilon: float = 1e-6
    family: str = "qwen3"  # of FAMILIES
    tied_embeddings: bool = False
    max_positions: int = 32_768
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} is odd: rotary positions need pairs")

    def canonical_json(self) -> str:
        """What both sides of the contract compare: everything that changes the function the weights compute."""
        shape = dataclasses.asdict(self)
        del shape["stop_token_ids"], shape["max_positions"]
        return json.dumps(shape, sort_keys=True)

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "DecoderConfig":
        """From the contents of config.json. Raises ValueError naming the key that is missing or not supported."""
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise ValueError(f"model_type {kind!r} is not one of {', '.join(FAMILIES)}")
        for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if config.get(key):
                raise ValueError(f"{key}={config[key]!r} is not supported")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act={config['hidden_act']!r} is not supported")
        for key in SIZES.values():
            if key not in config and key not in ("num_key_value_heads", "head_dim"):
                raise ValueError(f"{key} is missing")
        heads = int(config["num_attention_heads"])
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
        sizes = {**config, "num_key_value_heads": kv_heads, "head_dim": head_dim}
        # transformers 5 keeps everything about RoPE in rope_parameters; 4 had two keys for it.
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "llama3"):
            raise ValueError(f"rope type {rope_type!r} is not supported")
        scaling: Any = tuple(float(rope[key]) for key in _ROPE) if rope_type == "llama3" else None
        stop = config.get("eos_token_id")
        stops = () if stop is None else tuple(stop) if isinstance(stop, list) else (int(stop),)
        return DecoderConfig(
            **{field: int(sizes[key]) for field, key in SIZES.items()},
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
            rope_scaling=scaling,
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            family=kind,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=int(config.get("max_position_embeddings", 32_768)),
            stop_token_ids=stops,
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The contents of a config.json that transformers and vLLM read."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3", **dict(zip(_ROPE, self.rope_scaling))}
            rope[_ROPE[-1]] = int(rope[_ROPE[-1]])
        stops = list(self.stop_token_ids)
        return {
            "architectures": [FAMILIES[self.family].ARCHITECTURE],
            "model_type": self.family,
            **{key: getattr(self, field) for field, key in SIZES.items()},
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "rms_norm_eps": self.norm_epsilon,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.max_positions,
            "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
            "torch_dtype": dtype,
            "dtype": dtype,
            "use_cache": True,
        }


def read_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """The decoder config of a model folder. Raises ValueError naming the file."""
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        raise ValueError(f"{path}: no config.json there, so it is not a Hugging Face model folder")
    try:
        with open(file, encoding="utf-8") as opened:
            return DecoderConfig.from_hf(json.load(opened))
    except (json.JSONDecodeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error

"""The decoder's shape, read from and written to a Hugging Face config.json.

Both sides must run the same function: they compare its canonical JSON when they connect. hf_fields.py checks the other
fields of a config.json. No jax: a generator reads it too.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from scalerl_jax.model import hf_fields
from scalerl_jax.model.families import FAMILIES, WITH_IMAGES
from scalerl_jax.system.files import read_object

SIZES = {  # field -> its key in config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}
# Keys that a family's config.json may lack or have as null; for other families transformers uses a fixed default.
_DERIVED = {
    "llama": ("num_key_value_heads", "head_dim"),
    **dict.fromkeys(("qwen2", "qwen3_moe", "llama4_text"), ("head_dim",)),
}


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
    family: str = "qwen3"  # one of FAMILIES
    tied_embeddings: bool = False
    max_positions: int = 32_768
    stop_token_ids: tuple[int, ...] = ()
    # For families with experts; 0: none.
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # the weights of a token's experts add up to 1
    # For families with local and global layers (llama4.py); 0: none.
    nope_interval: int = 0
    attention_chunk: int = 0
    head_l2_norm: bool = False
    temperature_tuning: bool = False
    floor_scale: int = 0
    attn_scale: float = 0.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} is odd: rotary positions need pairs")
        if beyond := [stop for stop in self.stop_token_ids if stop >= self.vocab_size]:
            raise ValueError(f"eos_token_id has {beyond[0]}, beyond the vocabulary of {self.vocab_size}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"{self.experts_per_token} experts per token cannot be chosen of {self.experts}")

    def canonical_json(self) -> str:
        """JSON that both sides of the contract compare: everything that changes the function the weights compute."""
        shape = dataclasses.asdict(self)
        del shape["stop_token_ids"], shape["max_positions"]
        return json.dumps(shape, sort_keys=True)

    def local_layers(self) -> tuple[bool, ...]:
        """Whether each layer is local; empty for families with one kind of layer."""
        return tuple((i + 1) % self.nope_interval != 0 for i in range(self.layers if self.nope_interval else 0))

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "DecoderConfig":
        """From the contents of config.json. Raises ValueError naming the key that is missing or not supported."""
        kind = config.get("model_type")
        if isinstance(kind, str) and kind in WITH_IMAGES and isinstance(config.get("text_config"), Mapping):
            config, kind = text_of(config), WITH_IMAGES[kind]
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise ValueError(f"model_type {kind!r} is not one of {', '.join(FAMILIES)}")
        family = FAMILIES[kind]
        own, only = getattr(family, "FIELDS", {}), getattr(family, "ONLY", {}) | getattr(family, "IMPLIED", {})
        if hasattr(family, "plain"):
            config = family.plain(config)
        for other, key in getattr(family, "ALIASES", {}).items():
            if key not in config and other in config:
                config = {key: config[other], **{name: value for name, value in config.items() if name != other}}
        hf_fields.check(config, architecture=family.ARCHITECTURE, read=own.values(), only=only)
        heads = hf_fields.size(config, "num_attention_heads")
        derived = {"num_key_value_heads": heads, "head_dim": hf_fields.size(config, "hidden_size") // heads}
        left_out = [key for key in _DERIVED.get(kind, ()) if config.get(key) is None]
        sizes = {**config, **{key: derived[key] for key in left_out}}
        theta, scaling = hf_fields.rope(config, default_theta=getattr(family, "DEFAULT_THETA", 10_000.0))
        return DecoderConfig(
            **{field: hf_fields.size(sizes, key) for field, key in SIZES.items()},
            **{field: _own_field(config, field, key) for field, key in own.items()},
            rope_theta=theta,
            rope_scaling=scaling,
            norm_epsilon=hf_fields.number(config, "rms_norm_eps", 1e-6),
            family=kind,
            tied_embeddings=hf_fields.flag(config, "tie_word_embeddings", False),
            max_positions=hf_fields.size({"max_position_embeddings": 32_768, **config}, "max_position_embeddings"),
            stop_token_ids=hf_fields.stops(config.get("eos_token_id")),
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The contents of a config.json that transformers and vLLM read."""
        # In the form of transformers 5, and in that of 4.
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        scaling: dict[str, Any] | None = None
        if self.rope_scaling is not None:
            scaling = {"rope_type": "llama3", **dict(zip(hf_fields.ROPE, self.rope_scaling))}
            scaling[hf_fields.ROPE[-1]] = int(scaling[hf_fields.ROPE[-1]])
            rope |= scaling
        family = FAMILIES[self.family]
        stops = list(self.stop_token_ids)
        return {
            "architectures": [family.ARCHITECTURE],
            "model_type": self.family,
            **{key: getattr(self, field) for field, key in SIZES.items()},
            "hidden_act": "silu",
            **{key: getattr(self, field) for field, key in getattr(family, "FIELDS", {}).items()},
            **getattr(family, "ONLY", {}),
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": rope,
            "rms_norm_eps": self.norm_epsilon,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.max_positions,
            "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
            "torch_dtype": dtype,
            "dtype": dtype,
            "use_cache": True,
        }


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's config of a model that also reads images; keys outside of it apply to both."""
    own = ("model_type", "architectures", "text_config", "vision_config")
    around = {key: value for key, value in config.items() if key not in own}
    text = {key: value for key, value in config["text_config"].items() if key not in own}
    return {**around, **text, "model_type": WITH_IMAGES[config["model_type"]]}


def _own_field(config: Mapping[str, Any], field: str, key: str) -> Any:
    """A family's own field, with its type in DecoderConfig. The key must be present."""
    kind = DecoderConfig.__annotations__[field]
    if kind is int:
        return hf_fields.size(config, key)
    if key not in config:
        raise ValueError(f"{key} is missing")
    if kind is float:
        return hf_fields.number(config, key, 0.0)
    assert kind is bool, f"{field}: {kind}"
    return hf_fields.flag(config, key, False)


def read_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """The decoder config of a model folder. Raises ValueError naming the file."""
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        raise ValueError(f"{path}: no config.json there, so it is not a Hugging Face model folder")
    return config_of_file(file)


def config_of_file(file: str) -> DecoderConfig:
    """The decoder config of one config.json. Raises ValueError naming it, and OSError."""
    config = read_object(file)
    try:
        return DecoderConfig.from_hf(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_folder(field: str, path: str) -> None:
    """Raises ValueError, one line, if no folder is given, or if it does not exist and may be the name of a model of the
    hub: then with the command that downloads it, after which the same config works."""
    if not path:
        raise ValueError(f"{field}: no model folder is given")
    if _HUB_NAME.fullmatch(path) and not os.path.exists(path):
        raise ValueError(
            f"{field}={path}: no such folder; if it is a model of the hub: hf download {path} --local-dir={path}"
        )

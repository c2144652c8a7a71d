"""Which fields of a config.json change the function that a model computes, and which values are supported.

A key is one of these:

    read       by decoder_config.py for every family (READ), or by the family itself (its FIELDS and ONLY)
    followed   here: RoPE in both generations of config.json, windows, custom code, keys with one harmless value
    harmless   only for training or sampling: dropout, initializers, token ids, caches (_HARMLESS)
    any other  refused if a word of its name is one of the maths (_MATHS) and its value does not mean "off"

A list of harmful keys alone would not do, nor one of harmless keys. Every year brings keys that change the maths (logit
caps, multipliers, layers without RoPE, heads that predict further tokens), and their names mention what they change;
users' tools add other keys (`unsloth_version`, `transformers.js_config`), which must not be refused. Refusing one key
too many costs a line that names it; accepting one too many would train another model than the generators run.

Every ValueError names a key and its value; the caller adds the file. No jax.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

Json = Mapping[str, Any]
RopeScaling = tuple[float, float, float, float]

ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of type llama3
READ = frozenset(
    "model_type architectures vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim intermediate_size rms_norm_eps tie_word_embeddings max_position_embeddings eos_token_id rope_theta "
    "rope_scaling rope_parameters original_max_position_embeddings sliding_window use_sliding_window max_window_layers "
    "layer_types auto_map hidden_act".split()
)
_MATHS = frozenset(
    "act activation adapter alibi attention attn bias bidirectional block blocks cap capping causal chunk chunked clip "
    "compression conv cross depth embed embedding embeddings embd emb expert experts factor ffn gate gated gating head "
    "heads interleave interleaved kv latent layer layernorm layers linear local logit logits loop loops lora mamba "
    "mask mixer mlp moe mrope mtp multiplier mup nextn nope norm normalization normalize parallel position positional "
    "positions post pre q qk qkv quant quantization recurrent residual rms rmsnorm rope rotary rotation routed router "
    "routing scale scaled scaling share shared sink sinks skip sliding softcap softcapping softmax sparse sparsity ssm "
    "temperature v vision window".split()
)
_HARMLESS = frozenset(
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal attn_implementation "
    "chunk_size_feed_forward cross_attention_hidden_size diversity_penalty is_llama_config length_penalty "
    "output_attentions output_router_logits repetition_penalty router_aux_loss_coef router_jitter_noise temperature "
    "use_flash_attn _flash_attn_2_enabled head_dtype".split()
)
_HARMLESS_NAME = re.compile(r"dropout|pdrop|_token(_id|_ids|_index)?$|^id2label$|^label2id$")
_OFF = (None, False, 0, "", [], {})
_ONE = re.compile(r"multiplier|scal|factor|ratio")  # for these 1 means "off"


def shown(key: str, value: Any) -> str:
    """key=value as in config.json, on one line, shortened if long."""
    text = json.dumps(value)
    return f"{key}={text if len(text) <= 80 else text[:77] + '...'}"


def refuse(key: str, value: Any, why: str = "") -> ValueError:
    return ValueError(f"{shown(key, value)} is not supported{why and f': {why}'}")


def size(config: Json, key: str) -> int:
    """The value of `key`, a positive whole number."""
    value = config.get(key)
    if value is None:
        raise ValueError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError(f"{shown(key, value)} is not a positive whole number")
    return value


def number(config: Json, key: str, default: float) -> float:
    """The value of `key`, a positive finite number."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{shown(key, value)} is not a positive number")
    return float(value)


def stops(value: Any) -> tuple[int, ...]:
    """The ids in eos_token_id: a token id, a list of them, or nothing."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if value == [] or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in ids):
        raise ValueError(f"{shown('eos_token_id', value)} is not a token id or a list of them")
    return tuple(ids)


def flag(config: Json, key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{shown(key, value)} is not true or false")
    return value


def check(config: Json, *, architecture: str, read: Collection[str], only: Json) -> None:
    """Raises ValueError naming the first field that specifies another function than the family's.

    Args:
      architecture: the family's, in transformers.
      read: keys that the family reads besides READ.
      only: key -> the only value that the family supports, which is also the default.
    """
    for key, value in only.items():
        if key in config and config[key] not in (value, None):
            raise refuse(key, config[key], f"only {json.dumps(value)} is")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise refuse("hidden_act", config["hidden_act"], "only silu is")
    named = config.get("architectures")
    if named and (not isinstance(named, list) or architecture.lower() not in [str(name).lower() for name in named]):
        raise refuse("architectures", named, f"only {architecture} is")
    own_code = config.get("auto_map") or {}
    if not isinstance(own_code, Mapping) or {"AutoModel", "AutoModelForCausalLM"} & own_code.keys():
        raise refuse("auto_map", own_code, "the model's own code may compute anything")
    if "layer_types" not in read:
        _check_windows(config)
    for key, value in config.items():
        if key in READ or key in read or key in only or key in _HARMLESS or _HARMLESS_NAME.search(key):
            continue
        words = _MATHS & set(re.split(r"[^a-z0-9]+", key.lower()))
        off = any(value is other or (value == other and type(value) is type(other)) for other in (*_OFF, 0.0))
        if words and not off and not (_ONE.search(key) and value == 1 and value is not True):
            raise refuse(key, value, "no known family of ours has it, and it may change what the model computes")


def _check_windows(config: Json) -> None:
    """Raises ValueError unless every layer attends to all earlier tokens."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise refuse("layer_types", kinds)
        for i, kind in enumerate(kinds):
            if kind != "full_attention":
                raise refuse(f"layer_types[{i}]", kind, "only full_attention is")
        return
    window, used = config.get("sliding_window"), config.get("use_sliding_window")
    if window and used is not False:
        first = config.get("max_window_layers")  # layers from this one on have the window
        if not used or not isinstance(first, int) or first < size(config, "num_hidden_layers"):
            raise refuse("sliding_window", window, "every layer attends to all tokens before")


def rope(config: Json, *, default_theta: float) -> tuple[float, RopeScaling | None]:
    """(theta, Llama 3.1's scaling or none). transformers 5 writes rope_parameters, 4 rope_theta and rope_scaling."""
    found: dict[str, RopeScaling | None] = {}
    thetas = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if table:
            if not isinstance(table, Mapping):
                raise refuse(key, table)
            found[key] = _scaling(config, key, table)
            thetas[f"{key}.rope_theta"] = table.get("rope_theta")
    given = {key: number(thetas, key, 0.0) for key, value in thetas.items() if value is not None}
    if len(set(given.values())) > 1:
        raise ValueError(f"{' and '.join(shown(*item) for item in given.items())} do not agree")
    if len(set(found.values())) > 1:
        raise ValueError(f"{' and '.join(shown(key, config[key]) for key in found)} do not agree")
    return next(iter(given.values()), default_theta), next(iter(found.values()), None)


def _scaling(config: Json, key: str, table: Json) -> RopeScaling | None:
    kinds = [table[name] for name in ("rope_type", "type") if table.get(name) is not None] or ["default"]
    if kinds[0] not in ("default", "llama3") or kinds[-1] != kinds[0]:
        raise refuse(f"{key}.rope_type", kinds[0] if kinds[-1] == kinds[0] else kinds, "only default and llama3 are")
    known = {"rope_type", "type", "rope_theta", *(ROPE if kinds[0] == "llama3" else ())}
    for inner, value in table.items():
        if inner == "partial_rotary_factor" and value == 1:
            continue
        if isinstance(value, Mapping):
            raise refuse(f"{key}.{inner}", value, "one RoPE for every layer is")
        if inner not in known and value is not None:
            raise refuse(f"{key}.{inner}", value)
    if kinds[0] == "default":
        return None
    before, outside = dict(table), config.get(ROPE[-1])
    if before.get(ROPE[-1]) is None:  # then it is outside of the table, or the maximum length is used
        before[ROPE[-1]] = config.get("max_position_embeddings") if outside is None else outside
    elif outside not in (None, before[ROPE[-1]]):
        inside = shown(f"{key}.{ROPE[-1]}", before[ROPE[-1]])
        raise ValueError(f"{shown(ROPE[-1], outside)} and {inside} do not agree")
    for name in ROPE:
        if before.get(name) is None:
            raise ValueError(f"{key}.{name} is missing")
    factor, low, high, original = (number({f"{key}.{name}": before[name]}, f"{key}.{name}", 0.0) for name in ROPE)
    if high < low:  # Llama 4 has them equal: then there is no range between them
        raise ValueError(f"{key}: {shown(ROPE[2], high)} is below {shown(ROPE[1], low)}")
    return factor, low, high, original

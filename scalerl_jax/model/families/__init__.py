"""The model families: one file each, and one row in FAMILIES under the `model_type` of config.json.

A family is a module with

    ARCHITECTURE             transformers' class
    ROWS                     its weights, in the order in which they are sent and stored (dense.WeightRow)
    layer(w, x, attend)      one layer; training, prefill and decode pass different `attend`
    FIELDS                   field of DecoderConfig -> its key in config.json, for fields that only some families have;
                             such a field is an int, a bool or a float, and the key is required (default: none)
    ALIASES                  other name of such a key -> its name (default: none)
    plain(config)            a config.json of the family, with alternative notations reduced to one (optional)
    IN_VLLM                  False: vLLM keeps weights in an order that this table cannot express (default: True)
    DEFAULT_THETA            of RoPE, if config.json has none (default: 10,000)
    ONLY                     key of config.json -> its only value that this file computes (default: none)

In `layer`, x is [..., width], `w` the weights of one layer as decoder.Layer applies them, and attend(q, k, v) maps
q [..., heads, h], k and v [..., kv_heads, h] to [..., heads, h]. A new family is a new file here and its row below:
parameters, shardings, weight decay, FLOPs, Hugging Face's names and the places in vLLM are read from ROWS.

Nothing here imports jax: a generator without jax reads the rows.
"""

from types import ModuleType

from scalerl_jax.model.families import llama, llama4, qwen2, qwen3, qwen3_moe

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "llama4_text": llama4,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
# model_type of a model that also reads images -> its text model, in text_config; its tensors begin with language_model.
WITH_IMAGES = {"llama4": "llama4_text"}

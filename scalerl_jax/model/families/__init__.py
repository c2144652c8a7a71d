"""The model families: one file each, and one row in FAMILIES under the `model_type` of config.json.

A family is a module with

    ARCHITECTURE             transformers' class
    ROWS                     its weights, in the order in which they are sent and stored (rows.py)
    layer(w, x, attend)      one layer; training, prefill and decode pass different `attend`

In `layer`, x is [..., width], `w` the weights of one layer as decoder.Layer applies them, and attend(q, k, v) takes
q [..., heads, h], k and v [..., kv_heads, h] to [..., heads, h]. A new family is a new file here and its row below:
parameters, shardings, weight decay, FLOPs, Hugging Face's names and where vLLM holds what are read from ROWS.

Nothing here imports jax: a generator reads the rows where there is none.
"""

from types import ModuleType

from scalerl_jax.model.families import llama, qwen3

FAMILIES: dict[str, ModuleType] = {"llama": llama, "qwen3": qwen3}

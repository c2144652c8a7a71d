"""The weights as the decode loop wants them, made once per version, off the decode path.

    DecodeWeights = {"embed" [V,D], "head" [V,D] (absent when tied), "final_norm" [D],
                     "layers": [{"attention_norm" [D], "qkv" [D,(H+2K)h], "query_norm" [h], "key_norm" [h] (as the model
                                 has them), "output" [Hh,D], "mlp_norm" [D], "gate_up" [D,2F], "down" [F,D]}, ...]}

One array per layer and not a stack: a slice of a stack would be copied in every decode step. q, k and v share one
product, gate and up another. Every value has been rounded to the wire's dtype, so that the policy is the trainer's, and
is held in the dtype of its use: matrices in the compute dtype, norms in float32, embedding and head in the head's.

Legend: V vocabulary, D width, H query heads, K key/value heads, h head size, F MLP width.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.model import DecoderConfig, Precision
from scalerl_jax.model.decoder import Params
from scalerl_jax.model.hf import from_hf

DecodeWeights = Mapping[str, Any]


def decode_precision(precision: Precision) -> Precision:
    """The precision to compute with on decode weights: they are rounded already, once is enough."""
    return Precision(compute=precision.compute, wire="float32", head=precision.head)


def decode_weights(tensors: Mapping[str, Any], config: DecoderConfig, precision: Precision) -> DecodeWeights:
    """Host arrays under their Hugging Face names -> decode weights on the device, sharing no memory with `tensors`.

    Raises ValueError naming a tensor that is missing or of another shape.
    """
    params = from_hf(tensors, config, jnp.dtype(precision.wire))
    head_dtype = jnp.dtype("float32" if precision.head == "highest" else precision.compute)

    def put(array: np.ndarray, dtype: Any) -> jax.Array:
        # A copy in any case: on a CPU, device_put may keep the host's memory, which the next version overwrites.
        return jax.device_put(np.array(array, dtype, order="C"))

    def one(i: int) -> dict[str, jax.Array]:
        layer = {name: stacked[i] for name, stacked in params["layers"].items()}
        joined = {
            "qkv": np.concatenate([layer["query"], layer["key"], layer["value"]], axis=1),
            "output": layer["output"],
            "gate_up": np.concatenate([layer["gate"], layer["up"]], axis=1),
            "down": layer["down"],
        }
        norms = {name: put(value, np.float32) for name, value in layer.items() if name.endswith("_norm")}
        return {**norms, **{name: put(value, jnp.dtype(precision.compute)) for name, value in joined.items()}}

    weights = {name: put(params[name], head_dtype) for name in ("embed", "head") if name in params}
    weights["final_norm"] = put(params["final_norm"], np.float32)
    return jax.block_until_ready({**weights, "layers": [one(i) for i in range(config.layers)]})


def model_params(weights: DecodeWeights, config: DecoderConfig) -> Params:
    """The same weights in the layout of scalerl_jax.model. Pure: for use inside jit, where the copy is short-lived."""
    c = config
    query, key = c.heads * c.head_size, c.kv_heads * c.head_size

    def one(layer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        q, k, v = jnp.split(layer["qkv"], [query, query + key], axis=1)
        gate, up = jnp.split(layer["gate_up"], 2, axis=1)
        rest = {name: value for name, value in layer.items() if name not in ("qkv", "gate_up")}
        return {**rest, "query": q, "key": k, "value": v, "gate": gate, "up": up}

    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[one(layer) for layer in weights["layers"]])
    return {**{name: value for name, value in weights.items() if name != "layers"}, "layers": layers}

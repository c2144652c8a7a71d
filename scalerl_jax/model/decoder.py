"""The policy: a Llama 3 / Qwen3 decoder as one parameter tree and pure functions over it.

    x = embed[token]
    each layer:  x += output(attention(rope(norm(query(h))), rope(norm(key(h))), value(h)))   h = rms_norm(x)
                 x += down(silu(gate(h)) * up(h))                                             h = rms_norm(x)
    hidden = rms_norm(x)                                       logits = head(hidden), in head.py

Legend of shapes: R rows, L length, D width, H query heads, K key/value heads, h head size, F MLP width, V vocabulary,
N layers. Weights are stored [in, out] and stacked over layers, so one compiled block serves all of them.

Precision. Masters are float32. Each use rounds a weight to the sync dtype, the policy that the generators run, and
then casts to the compute dtype; the rounding is straight-through. `project` returns weight cotangents in float32
whatever the compute dtype: a bf16 cotangent summed over chunks loses about 1 % of dW.

Left out on purpose: biases, sliding windows, dropout, and any state (caches live with the engine that decodes).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from scalerl_jax.contract.decoder_config import DecoderConfig
from scalerl_jax.model.attention import packed_attention
from scalerl_jax.model.sharding import ROWS, Rules, constrain, spec

Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of one forward pass, by name so that it can be a static argument."""

    compute: str = "float32"
    sync: str = "float32"  # what weights are rounded to before every use
    head: str = "default"  # default: operands in the compute dtype | highest: float32 operands

    @property
    def dot(self) -> jax.lax.Precision:
        # On TPU and recent GPUs a float32 product is done in bf16 or TF32 passes unless asked otherwise.
        return jax.lax.Precision.HIGHEST if self.compute == "float32" else jax.lax.Precision.DEFAULT

    def cast(self, weight: jax.Array, dtype: str | None = None) -> jax.Array:
        """The weight as every user of the policy sees it: rounded to the sync dtype, then in `dtype` (compute's)."""
        return _round(weight, self.sync).astype(dtype or self.compute)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _round(weight: jax.Array, dtype: str) -> jax.Array:
    """`weight` rounded to the values of `dtype`, in its own dtype; straight-through.

    Not astype there and back: the compiler may drop such a pair, and its cotangent would be rounded too.
    """
    if dtype == "float32":
        return weight
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(weight, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


_round.defvjp(lambda weight, dtype: (_round(weight, dtype), None), lambda dtype, _, g: (g,))


@dataclasses.dataclass(frozen=True)
class Weight:
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical, one per dimension: fields of sharding.Rules
    scale: float  # standard deviation of the initial values; 0: all ones (norms)


def weight_table(config: DecoderConfig) -> dict[str, Any]:
    """Every weight's shape, axes and initialiser, in the layout of the parameter tree."""
    c, n = config, config.layers
    std = 1 / math.sqrt(c.hidden_size)
    # Residual branches start smaller by the number of branches that add up (GPT-2, section 2.3).
    residual = std / math.sqrt(2 * n)
    layers = {
        "attention_norm": Weight((n, c.hidden_size), ("layers", "none"), 0.0),
        "query": Weight((n, c.hidden_size, c.heads * c.head_dim), ("layers", "width", "heads"), std),
        "key": Weight((n, c.hidden_size, c.kv_heads * c.head_dim), ("layers", "width", "heads"), std),
        "value": Weight((n, c.hidden_size, c.kv_heads * c.head_dim), ("layers", "width", "heads"), std),
        "output": Weight((n, c.heads * c.head_dim, c.hidden_size), ("layers", "heads", "width"), residual),
        "mlp_norm": Weight((n, c.hidden_size), ("layers", "none"), 0.0),
        "gate": Weight((n, c.hidden_size, c.intermediate_size), ("layers", "width", "mlp"), std),
        "up": Weight((n, c.hidden_size, c.intermediate_size), ("layers", "width", "mlp"), std),
        "down": Weight((n, c.intermediate_size, c.hidden_size), ("layers", "mlp", "width"), residual),
    }
    if c.qk_norm:
        layers["query_norm"] = Weight((n, c.head_dim), ("layers", "none"), 0.0)
        layers["key_norm"] = Weight((n, c.head_dim), ("layers", "none"), 0.0)
    table: dict[str, Any] = {
        "embed": Weight((c.vocab_size, c.hidden_size), ("vocabulary", "width"), std),
        "layers": layers,
        "final_norm": Weight((c.hidden_size,), ("none",), 0.0),
    }
    if not c.tied_embeddings:
        table["head"] = Weight((c.vocab_size, c.hidden_size), ("vocabulary", "width"), std)
    return table


class Decoder(nnx.Module):
    """Holds the parameters, and nothing else: the functions below take them as a plain tree (`params_of`)."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: Any = jnp.float32):
        def fill(module: nnx.Module, table: Mapping[str, Any], key: jax.Array) -> None:
            for part, (name, weight) in zip(jax.random.split(key, len(table)), sorted(table.items()), strict=True):
                if isinstance(weight, Weight):
                    value = jax.random.normal(part, weight.shape, jnp.float32) * weight.scale
                    setattr(module, name, nnx.Param((value if weight.scale else jnp.ones(weight.shape)).astype(dtype)))
                else:
                    child = nnx.Module()
                    fill(child, weight, part)
                    setattr(module, name, child)

        fill(self, weight_table(config), key)


def params_of(decoder: Decoder) -> Params:
    return nnx.to_pure_dict(nnx.state(decoder, nnx.Param))


def init_params(config: DecoderConfig, key: jax.Array, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> Params:
    """Fresh parameters, created sharded: no device ever holds a whole weight that the mesh cuts."""

    def make(key: jax.Array) -> Params:
        return params_of(Decoder(config, key, dtype))

    if mesh is None:
        return jax.jit(make)(key)
    return jax.jit(make, out_shardings=param_shardings(config, mesh))(key)


def abstract_params(config: DecoderConfig, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> Params:
    """ShapeDtypeStructs, with shardings where there is a mesh: what a checkpoint is restored into."""

    def one(weight: Weight) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, spec(weight.shape, weight.axes, mesh))
        return jax.ShapeDtypeStruct(weight.shape, dtype, sharding=sharding)

    return jax.tree.map(one, weight_table(config), is_leaf=lambda x: isinstance(x, Weight))


def param_shardings(config: DecoderConfig, mesh: Mesh, rules: Rules = Rules()) -> Params:
    def one(weight: Weight) -> NamedSharding:
        return NamedSharding(mesh, spec(weight.shape, weight.axes, mesh, rules))

    return jax.tree.map(one, weight_table(config), is_leaf=lambda x: isinstance(x, Weight))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: jax.Array, weight: jax.Array, precision: Precision) -> jax.Array:
    """x [..., in] in the compute dtype times a float32 master [in, out]; the weight's cotangent is float32."""
    return jnp.dot(x, precision.cast(weight), precision=precision.dot)


def _project_forward(x: jax.Array, weight: jax.Array, precision: Precision) -> tuple[jax.Array, Any]:
    return project(x, weight, precision), (x, weight)


def _project_backward(precision: Precision, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    dx = jnp.dot(g, precision.cast(weight).T, precision=precision.dot)
    tokens = tuple(range(x.ndim - 1))
    dw = jax.lax.dot_general(
        x, g, ((tokens, tokens), ((), ())), precision=precision.dot, preferred_element_type=jnp.float32
    )
    return dx, dw.astype(weight.dtype)


project.defvjp(_project_forward, _project_backward)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, precision: Precision = Precision()) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (normed * precision.cast(scale, "float32")).astype(x.dtype)


def rope_tables(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) [..., h/2] float32 of the rotation at each position; Llama 3.1's rescaling where the config has it."""
    frequency = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if config.rope_scaling is not None:
        factor, low, high, original = config.rope_scaling
        wavelength = 2 * math.pi / frequency
        smooth = jnp.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        frequency = frequency * (smooth + (1 - smooth) / factor)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [..., heads, h], halves paired as in Hugging Face; cos and sin are [..., h/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def qkv(
    layer: Params, config: DecoderConfig, x: jax.Array, cos: jax.Array, sin: jax.Array, precision: Precision
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [..., D] (normed) -> q [..., H, h], k [..., K, h], v [..., K, h]; q and k rotated. `layer`: of one layer."""
    c, lead = config, x.shape[:-1]
    q = project(x, layer["query"], precision).reshape(*lead, c.heads, c.head_dim)
    k = project(x, layer["key"], precision).reshape(*lead, c.kv_heads, c.head_dim)
    v = project(x, layer["value"], precision).reshape(*lead, c.kv_heads, c.head_dim)
    if c.qk_norm:
        q = rms_norm(q, layer["query_norm"], c.norm_epsilon, precision)
        k = rms_norm(k, layer["key_norm"], c.norm_epsilon, precision)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def mlp(layer: Params, x: jax.Array, precision: Precision) -> jax.Array:
    """down(silu(gate(x)) * up(x)) on x [..., D] (normed)."""
    gated = jax.nn.silu(project(x, layer["gate"], precision)) * project(x, layer["up"], precision)
    return project(gated, layer["down"], precision)


def embed(params: Params, tokens: jax.Array, precision: Precision) -> jax.Array:
    """[...] int32 -> [..., D]. Gathered in float32 first, so that its cotangent is summed in float32."""
    return precision.cast(params["embed"][tokens])


def forward(
    params: Params,
    config: DecoderConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    precision: Precision = Precision(),
    max_segment: int | None = None,
    remat: bool = True,
    mesh: Mesh | None = None,
) -> jax.Array:
    """The final hidden states of packed rows.

    Args:
      tokens, positions, segment_ids: [rows, length] int32. A token attends to the tokens before it, and itself, that
        have its segment id; positions start at 0 in each segment. Segment 0 is padding.
      max_segment: no segment is longer; a smaller bound makes attention cheaper. None: the row's length.
      remat: keep only each block's input for the backward pass.
      mesh: rows are kept cut over replica and fsdp.

    Returns: [rows, length, width] in the compute dtype, to be given to head.token_logprobs.
    """
    cos, sin = rope_tables(config, positions)
    x = constrain(embed(params, tokens, precision), mesh, ROWS, None, None)

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        with jax.named_scope("attention"):
            h = rms_norm(x, layer["attention_norm"], config.norm_epsilon, precision)
            q, k, v = qkv(layer, config, h, cos, sin, precision)
            mixed = packed_attention(q, k, v, segment_ids, max_segment=max_segment, precision=precision.dot)
            x = x + project(mixed.reshape(*x.shape[:-1], -1), layer["output"], precision)
        with jax.named_scope("mlp"):
            h = rms_norm(x, layer["mlp_norm"], config.norm_epsilon, precision)
            x = x + mlp(layer, h, precision)
        return constrain(x, mesh, ROWS, None, None), None

    x, _ = jax.lax.scan(jax.checkpoint(block) if remat else block, x, params["layers"])
    return rms_norm(x, params["final_norm"], config.norm_epsilon, precision)

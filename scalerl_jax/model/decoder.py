"""The policy: a decoder as one parameter tree and pure functions over it.

    x = embed[token]
    each layer:  x = layer(weights, x, attend)                 of its family, in families/
    hidden = rms_norm(x)                                       logits = head(hidden), in head.py

Legend of shapes: D width, H query heads, K key/value heads, h head size, V vocabulary. Weights are stored [in, out]
and stacked over layers, so one compiled block serves all of them.

Precision. Masters are float32. Each use rounds a weight to the sync dtype, the policy that the generators run, and
then casts to the compute dtype; the rounding is straight-through. `project` returns weight cotangents in float32
whatever the compute dtype: a bf16 cotangent summed over chunks loses about 1 % of dW.

Left out on purpose: biases, sliding windows, dropout, and any state (caches live with the engine that decodes).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from scalerl_jax.model.attention import packed_attention
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.families import FAMILIES
from scalerl_jax.model.families.rows import WeightRow
from scalerl_jax.model.sharding import ROWS, constrain, spec
from scalerl_jax.model.tensor_layout import rows, sizes

Params = Mapping[str, Any]
Rotation = tuple[jax.Array, jax.Array]  # cos, sin [..., h/2] float32


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


def param_tree(config: DecoderConfig, make: Callable[[WeightRow, tuple[int, ...]], Any]) -> dict[str, Any]:
    """The parameter tree with make(row, shape) at its leaves."""
    size = sizes(config)
    tree: dict[str, Any] = {"layers": {}}
    for row in rows(config).values():
        place = tree["layers"] if row.layered else tree
        place[row.leaf] = make(row, tuple(size[dimension] for dimension in row.tree_dimensions))
    return tree


class Decoder(nnx.Module):
    """Holds the parameters, and nothing else: the functions below take them as a plain tree (`params_of`)."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: Any = jnp.float32):
        std = 1 / math.sqrt(config.hidden_size)
        # Residual branches start smaller by the number of branches that add up (GPT-2, section 2.3).
        scales = {"normal": std, "residual": std / math.sqrt(2 * config.layers)}

        def value(row: WeightRow, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
            if row.initial == "ones":
                return lambda key: jnp.ones(shape)
            return lambda key: jax.random.normal(key, shape, jnp.float32) * scales[row.initial]

        def fill(module: nnx.Module, tree: Mapping[str, Any], key: jax.Array) -> nnx.Module:
            for part, (name, make) in zip(jax.random.split(key, len(tree)), sorted(tree.items()), strict=True):
                inner = isinstance(make, dict)
                setattr(module, name, fill(nnx.Module(), make, part) if inner else nnx.Param(make(part).astype(dtype)))
            return module

        fill(self, param_tree(config, value), key)


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

    def one(row: WeightRow, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, spec(shape, row.tree_dimensions, mesh))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return param_tree(config, one)


def param_shardings(config: DecoderConfig, mesh: Mesh) -> Params:
    return jax.tree.map(lambda struct: struct.sharding, abstract_params(config, mesh))


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


def rope_tables(config: DecoderConfig, positions: jax.Array) -> Rotation:
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


class Layer:
    """The weights of one layer, and what a family's `layer` does with them (families/dense.py).

    weights: of the parameter tree, without the layers' dimension; or of a generator, in which weights that are one
    fused parameter of vLLM's lie side by side in one array, under their leaves' names joined by "_".
    """

    scope = staticmethod(jax.named_scope)
    silu = staticmethod(jax.nn.silu)

    def __init__(self, weights: Params, config: DecoderConfig, rotation: Rotation, precision: Precision):
        self._weights, self._config, self._rotation, self._precision = weights, config, rotation, precision

    def norm(self, x: jax.Array, leaf: str) -> jax.Array:
        return rms_norm(x, self._weights[leaf], self._config.norm_epsilon, self._precision)

    def project(self, x: jax.Array, *leaves: str) -> Any:
        """x [..., in] times each of these matrices: [..., out], a list of them for several leaves."""
        return self._each(leaves, lambda weight: project(x, weight, self._precision))

    def weight(self, *leaves: str) -> Any:
        """The weight itself, in the compute dtype, for what is not one of these; a list of them for several leaves."""
        return self._each(leaves, self._precision.cast)

    def _each(self, leaves: tuple[str, ...], use: Callable[[jax.Array], jax.Array]) -> Any:
        if (joined := "_".join(leaves)) not in self._weights:
            return [use(self._weights[leaf]) for leaf in leaves]
        used = use(self._weights[joined])
        if len(leaves) == 1:
            return used
        size, own = sizes(self._config), rows(self._config)
        widths = [size[own[leaf].tree_dimensions[-1]] for leaf in leaves]
        return jnp.split(used, list(itertools.accumulate(widths[:-1])), axis=-1)

    def heads(self, x: jax.Array) -> jax.Array:
        """[..., heads h] -> [..., heads, h]"""
        return x.reshape(*x.shape[:-1], -1, self._config.head_dim)

    def rotate(self, x: jax.Array) -> jax.Array:
        return apply_rope(x, *self._rotation)


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
    layer, rotation = FAMILIES[config.family].layer, rope_tables(config, positions)
    # Gathered in float32 first, so that its cotangent is summed in float32.
    x = constrain(precision.cast(params["embed"][tokens]), mesh, ROWS, None, None)

    attend = functools.partial(
        packed_attention, segment_ids=segment_ids, max_segment=max_segment, precision=precision.dot
    )  # fmt: skip

    def block(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        x = layer(Layer(weights, config, rotation, precision), x, attend)
        return constrain(x, mesh, ROWS, None, None), None

    x, _ = jax.lax.scan(jax.checkpoint(block) if remat else block, x, params["layers"])
    return rms_norm(x, params["final_norm"], config.norm_epsilon, precision)

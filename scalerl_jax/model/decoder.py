"""The policy: a decoder as one parameter tree and pure functions over it.

    x = embed[token]
    each layer:  x = layer(weights, x, attend)                 of its family, in families/
    hidden = rms_norm(x)                                       logits = head(hidden), in head.py

Legend of shapes: D width, H query heads, K key/value heads, h head size, V vocabulary. Weights are stored [in, out]
and stacked over layers, so one compiled block serves all of them.

Precision. Masters are float32. Each use rounds a weight to the sync dtype, the policy that the generators run, and
then casts to the compute dtype; the rounding is straight-through. `project` returns weight cotangents in float32
whatever the compute dtype: a bf16 cotangent summed over chunks loses about 1 % of dW.

Left out on purpose: sliding windows, dropout, and any state (caches live with the engine that decodes).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from scalerl_jax.model import row_blocks
from scalerl_jax.model.attention import BLOCKS, Backend, packed_attention
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.experts import ROUTERS, Routing, expert_mlp, moved, sharded_expert_mlp, tokens_of
from scalerl_jax.model.families import FAMILIES
from scalerl_jax.model.families.dense import WeightRow
from scalerl_jax.model.lora import LowRank, split
from scalerl_jax.model.precision import Precision, named
from scalerl_jax.model.remat import BLOCK, INPUT, PRODUCT, scan_blocks
from scalerl_jax.model.sharding import ROWS, abstract_weight, axes_of, constrain, spec
from scalerl_jax.model.tensor_layout import rows, sizes

Params = Mapping[str, Any]
Rotation = tuple[jax.Array, ...]  # cos, sin [..., h/2] float32; for llama4 also the factor of global queries [...]


def param_tree(config: DecoderConfig, make: Callable[[WeightRow, tuple[int, ...]], Any]) -> dict[str, Any]:
    """The parameter tree with make(row, shape) at its leaves."""
    size = sizes(config)
    tree: dict[str, Any] = {"layers": {}}
    for row in rows(config).values():
        place = tree["layers"] if row.layered else tree
        place[row.leaf] = make(row, tuple(size[dimension] for dimension in row.tree_dimensions))
    return tree


def init_params(config: DecoderConfig, key: jax.Array, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> Params:
    """Fresh parameters, created sharded: no device ever holds a whole weight that the mesh cuts."""
    std = 1 / math.sqrt(config.hidden_size)
    # Residual branches start smaller by the number of branches that are summed (GPT-2, section 2.3).
    scales = {"normal": std, "residual": std / math.sqrt(2 * config.layers)}

    def value(row: WeightRow, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        if row.initial in ("ones", "zeros"):
            return lambda key: jnp.full(shape, float(row.initial == "ones"))
        return lambda key: jax.random.normal(key, shape, jnp.float32) * scales[row.initial]

    def fill(tree: Mapping[str, Any], key: jax.Array) -> Params:
        parts = zip(jax.random.split(key, len(tree)), sorted(tree.items()), strict=True)
        return {
            name: fill(make, part) if isinstance(make, dict) else make(part).astype(dtype)
            for part, (name, make) in parts
        }

    make = functools.partial(fill, param_tree(config, value))
    return jax.jit(make, out_shardings=None if mesh is None else param_shardings(config, mesh))(key)


def abstract_params(config: DecoderConfig, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> Params:
    """ShapeDtypeStructs of the parameters, with shardings if there is a mesh: a checkpoint is restored into them."""
    return param_tree(config, lambda row, shape: abstract_weight(shape, row.tree_dimensions, mesh, dtype))


def param_shardings(config: DecoderConfig, mesh: Mesh) -> Params:
    return jax.tree.map(lambda weight: weight.sharding, abstract_params(config, mesh))


def product(a: jax.Array, b: jax.Array, contract: tuple[Any, Any], precision: Precision) -> jax.Array:
    """a times b, contracted over these dimensions of each, summed in float32 and rounded once, to the compute dtype.

    XLA for CPUs has a kernel for bfloat16 operands (AMX, AVX512) only with a float32 result; with a bfloat16 result it
    is six times slower. Compilers for accelerators sum in float32 whatever the result is, and a float32 result would
    cost them traffic: of memory where the cast is not fused, and between devices where partial sums are added.
    """

    def dot(a: jax.Array, b: jax.Array, result: Any) -> jax.Array:
        return jax.lax.dot_general(
            a, b, (contract, ((), ())), precision=precision.dot, preferred_element_type=result
        ).astype(a.dtype)

    if precision.compute == "float32":
        return dot(a, b, jnp.float32)
    return jax.lax.platform_dependent(
        a, b, cpu=functools.partial(dot, result=jnp.float32), default=functools.partial(dot, result=a.dtype)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: jax.Array, weight: Any, precision: Precision) -> jax.Array:
    """x [..., in] in the compute dtype times a float32 master [in, out], or a LowRank. The weight's cotangent is
    float32; that of a LowRank is computed through its rank."""
    return product(x, precision.cast(weight), ((x.ndim - 1,), (0,)), precision)


def _project_forward(x: jax.Array, weight: Any, precision: Precision) -> tuple[jax.Array, Any]:
    return project(x, weight, precision), (x, weight)


def _project_backward(precision: Precision, saved: Any, g: jax.Array) -> tuple[jax.Array, Any]:
    x, weight = saved
    dx = product(g, precision.cast(weight), ((g.ndim - 1,), (1,)), precision)
    tokens = tuple(range(x.ndim - 1))

    def outer(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x, g, ((tokens, tokens), ((), ())), precision=precision.dot, preferred_element_type=jnp.float32
        )

    if not isinstance(weight, LowRank):
        return dx, outer(x, g).astype(weight.dtype)
    last, (left, right) = x.ndim - 1, weight.factors(x.dtype)
    inner, back = product(x, left, ((last,), (0,)), precision), product(g, right, ((last,), (1,)), precision)
    return dx, weight.of_factors(outer(x, back), outer(inner, g))


project.defvjp(_project_forward, _project_backward)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, precision: Precision = Precision()) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (normed * precision.cast(scale, "float32")).astype(x.dtype)


def rope_tables(config: DecoderConfig, positions: jax.Array) -> Rotation:
    """(cos, sin) [..., h/2] float32 of the rotation at each position, with Llama 3.1's rescaling if the config has
    it."""
    angle = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    if not config.nope_interval:
        return jnp.cos(angle), jnp.sin(angle)
    factor = jnp.ones(positions.shape, jnp.float32)
    if config.temperature_tuning:
        factor += jnp.log1p((positions + 1) // config.floor_scale) * config.attn_scale
    return jnp.cos(angle), jnp.sin(angle), factor


def rope_frequencies(config: DecoderConfig) -> np.ndarray:
    """[h/2] float32, radians a position: rounded in each step as in torch, so nearly all bits match the generators'.

    At position 16,384 the last bit of a frequency near 1 is a thousandth of a radian.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    power = (config.rope_theta ** exponent.astype(np.float64)).astype(np.float32)  # one rounding, as a good powf has
    frequency = np.float32(1) / power
    if config.rope_scaling is not None:
        factor, low, high, original = np.array(config.rope_scaling, np.float32)
        wavelength = np.float32(2 * math.pi) / frequency
        if high == low:
            return np.where(wavelength > original / low, frequency / factor, frequency)
        smooth = np.clip((original / wavelength - low) / (high - low), np.float32(0), np.float32(1))
        frequency = (1 - smooth) * frequency / factor + smooth * frequency
    return frequency


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [..., heads, h], halves paired as in Hugging Face; cos and sin are [..., h/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Layer:
    """The weights of one layer, with the operations that a family's `layer` uses (families/dense.py).

    weights: from the parameter tree, without the layers' dimension; or a generator's, where the weights of one fused
    parameter of vLLM are concatenated in one array, under their leaves' names joined by "_".
    """

    scope = staticmethod(jax.named_scope)
    silu = staticmethod(jax.nn.silu)

    def __init__(
        self,
        weights: Params,
        config: DecoderConfig,
        rotation: Rotation,
        precision: Precision,
        *,
        mesh: Mesh | None = None,
        real: jax.Array | None = None,
        given: jax.Array | None = None,
    ):
        """real: [...] bool, the tokens that are routed to experts; None: all. given: [..., experts per token] int, as
        for ROUTERS."""
        self._weights, self._config, self._rotation, self._precision = weights, config, rotation, precision
        self._mesh, self._real, self._given = mesh, real, given
        self.chosen: jax.Array | None = None  # [..., experts per token] int32: the experts of each token, once routed
        self.moved: jax.Array | None = None  # like it, bool: given, and not among the router's own choices

    def norm(self, x: jax.Array, leaf: str) -> jax.Array:
        return rms_norm(x, self._weights[leaf], self._config.norm_epsilon, self._precision)

    def project(self, x: jax.Array, *leaves: str) -> Any:
        """x [..., in] times each of these matrices: [..., out], a list of them for several leaves."""
        return self._each(leaves, lambda weight: named(project(x, weight, self._precision), PRODUCT))

    def add(self, outputs: list[jax.Array], *leaves: str) -> list[jax.Array]:
        """Adds to each output [..., out] its bias, in float32, so that the bias's cotangent is summed in float32."""
        biases = self._each(leaves, lambda bias: self._precision.cast(bias, "float32"))
        return [(y.astype(jnp.float32) + bias).astype(y.dtype) for y, bias in zip(outputs, biases, strict=True)]

    def _each(self, leaves: tuple[str, ...], use: Callable[[jax.Array], jax.Array]) -> Any:
        if (joined := "_".join(leaves)) not in self._weights:
            return [use(self._weights[leaf]) for leaf in leaves]
        used = use(self._weights[joined])
        if len(leaves) == 1:
            return used
        size, own = sizes(self._config), rows(self._config)
        widths = [size[own[leaf].tree_dimensions[own[leaf].side]] for leaf in leaves]
        return jnp.split(used, list(itertools.accumulate(widths[:-1])), axis=-1)

    def route(self, x: jax.Array, leaf: str, how: str) -> Routing:
        """The experts of each token of x [..., width], by one of ROUTERS; all of it in float32."""
        precision = dataclasses.replace(self._precision, compute="float32")
        logits = named(project(x.astype(jnp.float32), self._weights[leaf], precision), PRODUCT)
        config = self._config
        routing = ROUTERS[how](logits, config.experts_per_token, normalize=config.norm_topk_prob, given=self._given)
        if self._given is not None:
            self.moved = moved(logits, routing.experts)
        if self._real is not None:
            routing = routing._replace(experts=jnp.where(self._real[..., None], routing.experts, config.experts))
        self.chosen = routing.experts
        return routing

    def experts(self, x: jax.Array, routing: Routing, leaves: tuple[str, str, str]) -> jax.Array:
        """Applies the experts to x [..., width]; leaves: their gate, up and down [experts, out, in]."""
        into, weights = leaves[:2], self._weights
        joined = "_".join(into)
        gate_up = (weights[joined],) if joined in weights else tuple(weights[leaf] for leaf in into)
        each = [split(weight) for weight in (*gate_up, weights[leaves[2]])]
        if self._mesh is None or self._mesh.size == 1:
            return expert_mlp(x, routing, each, precision=self._precision)
        own = [rows(self._config)[leaf].dimensions for leaf in leaves]
        return sharded_expert_mlp(x, routing, each, own, precision=self._precision, mesh=self._mesh)

    def heads(self, x: jax.Array) -> jax.Array:
        """[..., heads h] -> [..., heads, h]"""
        return x.reshape(*x.shape[:-1], -1, self._config.head_dim)

    def rotate(self, x: jax.Array) -> jax.Array:
        return apply_rope(x, *self._rotation[:2])

    @property
    def local(self) -> jax.Array | bool:
        """Whether the layer is local, in a family with local and global layers."""
        return self._weights["local"]

    def placed_key(self, x: jax.Array) -> jax.Array:
        """x [..., heads, h], rotated to its position if the layer is local.

        RoPE pairs neighbors here, but `rotate` pairs halves: so neighbors are moved to halves, rotated and moved back.
        """
        halves = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        turned = jnp.stack(jnp.split(self.rotate(halves), 2, axis=-1), axis=-1).reshape(x.shape)
        if self._config.head_l2_norm:
            turned = rms_norm(turned, jnp.ones(x.shape[-1]), self._config.norm_epsilon)
        return jnp.where(self.local, turned, x)

    def placed_query(self, x: jax.Array) -> jax.Array:
        """As placed_key; in a global layer multiplied by the factor of its position."""
        factor = jnp.where(self.local, 1.0, self._rotation[2])[..., None, None]
        return (self.placed_key(x) * factor).astype(x.dtype)


class RowLayer(Layer):
    """A layer whose stages are computed in blocks of rows (row_blocks.py)."""

    @property
    def _lead(self) -> int:
        return self._rotation[0].ndim - 1

    def norm(self, x: jax.Array, leaf: str) -> jax.Array:
        return _norm_rows(x, self._weights[leaf], self._config, self._precision, self._lead, self._mesh)

    def project(self, x: jax.Array, *leaves: str) -> Any:
        weights = tuple(self._weights[leaf] for leaf in leaves)
        out = project_rows(x, weights, self._precision, self._lead, self._mesh)
        products = [named(y, PRODUCT) for y in out]
        return products if len(leaves) > 1 else products[0]

    def rotate(self, x: jax.Array) -> jax.Array:
        return row_blocks.staged(_rotate_rows, (x, *self._rotation[:2]), (), self._lead, self._mesh)

    def silu(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return row_blocks.staged(_silu_rows, (x,), (), self._lead, self._mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def project_rows(
    x: jax.Array, weights: tuple[jax.Array, ...], precision: Precision, lead: int, mesh: Mesh | None
) -> list[jax.Array]:
    """As `project`, in blocks of rows, by several weights concatenated, as the generators hold them."""
    joined = jnp.concatenate([precision.cast(weight).T for weight in weights])
    out = row_blocks.product(x, joined, precision.dot, lead=lead, mesh=mesh).astype(x.dtype)
    return jnp.split(out, list(itertools.accumulate(weight.shape[1] for weight in weights[:-1])), axis=-1)


def _project_rows_backward(precision: Precision, lead: int, mesh: Mesh | None, saved: Any, g: list[jax.Array]) -> Any:
    x, weights = saved
    parts = [_project_backward(precision, (x, weight), one) for weight, one in zip(weights, g, strict=True)]
    return functools.reduce(jnp.add, [dx for dx, _ in parts]), tuple(dw for _, dw in parts)


project_rows.defvjp(
    lambda x, weights, precision, lead, mesh: (project_rows(x, weights, precision, lead, mesh), (x, weights)),
    _project_rows_backward,
)


def _norm_rows(
    x: jax.Array, scale: jax.Array, config: DecoderConfig, precision: Precision, lead: int, mesh: Mesh | None
) -> jax.Array:
    def stage(rows: Any, shared: Any) -> jax.Array:
        return rms_norm(*rows, *shared, config.norm_epsilon)

    return row_blocks.staged(stage, (x,), (precision.cast(scale, "float32"),), lead, mesh)


def _rotate_rows(rows: Any, shared: Any) -> jax.Array:
    return apply_rope(*rows)


def _silu_rows(rows: Any, shared: Any) -> jax.Array:
    return jax.nn.silu(rows[0])


def final_norm(
    x: jax.Array, scale: jax.Array, config: DecoderConfig, precision: Precision, *, lead: int, mesh: Mesh | None = None
) -> jax.Array:
    """The final norm; lead: leading dimensions of x that are tokens."""
    if precision.bitwise:
        return _norm_rows(x, scale, config, precision, lead, mesh)
    return rms_norm(x, scale, config.norm_epsilon, precision)


def rotation_of(
    config: DecoderConfig, positions: jax.Array, precision: Precision, *, mesh: Mesh | None = None
) -> Rotation:
    """rope_tables, computed as the numerics require."""
    if not precision.bitwise:
        return rope_tables(config, positions)

    def stage(rows: Any, shared: Any) -> Rotation:
        return rope_tables(config, *rows)

    return row_blocks.in_blocks(stage, (positions,), lead=positions.ndim, mesh=mesh)


def chunk_ids(segment_ids: jax.Array, positions: jax.Array, chunk: int) -> jax.Array:
    """[rows, length] int32: a separate id for each part of a segment in one chunk of positions; padding stays 0."""
    part = positions // chunk
    begins = (segment_ids[:, 1:] != segment_ids[:, :-1]) | (part[:, 1:] != part[:, :-1])
    ids = 1 + jnp.pad(jnp.cumsum(begins, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    return jnp.where(segment_ids == 0, 0, ids)


def _embedded(table: Any, tokens: jax.Array, config: DecoderConfig, mesh: Mesh | None) -> jax.Array:
    """The rows of `table` [V, D] for tokens [rows, length]. They are sharded first as the table's width, then as the
    rows, in steps of one exchange each: in a single step the partitioner would place all of it on every device."""
    x = table.merged_rows(tokens) if isinstance(table, LowRank) else table[tokens]
    if mesh is None:
        return x
    axes = axes_of(spec(table.shape, rows(config)["embed"].tree_dimensions, mesh), -1)
    if mesh.shape["replica"] > 1:  # else the compiler finds this step by itself, and a constraint hinders it
        x = constrain(x, mesh, "replica", None, axes)
    return constrain(x, mesh, ROWS, None, tuple(axis for axis in axes if axis not in ROWS))


def forward(
    params: Params,
    config: DecoderConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    precision: Precision = Precision(),
    max_segment: int | None = None,
    remat: str = BLOCK,
    mesh: Mesh | None = None,
    attention: Backend = BLOCKS,
    experts: jax.Array | None = None,
    counted: bool = False,
) -> Any:
    """The final hidden states of packed rows.

    Args:
      tokens, positions, segment_ids: [rows, length] int32. A token attends to itself and to earlier tokens with its
        segment id; positions start at 0 in each segment. Segment 0 is padding.
      max_segment: upper bound of the segments' lengths; a smaller one makes attention cheaper. None: the row's length.
      remat: what is kept for the backward pass, see remat.py.
      mesh: rows are sharded over replica, fsdp and expert, their positions over context.
      attention: the backend, as returned by attention.choose.
      experts: [rows, length, layers, experts per token] int, the experts of each token; OWN, or None: the router's.
      counted: also return counts of routed tokens, without padding.

    Returns: [rows, length, width] in the compute dtype, for head.token_logprobs. With counted, a pair of it and a dict,
    float32: for a family with experts expert_tokens [layers, experts], the tokens of each, and if experts are given
    moved_pairs [layers], the pairs (token, expert) that the router itself would not have made.
    """
    layer, rotation = FAMILIES[config.family].layer, rotation_of(config, positions, precision, mesh=mesh)
    # Gathered in float32 first, so that its cotangent is summed in float32.
    x = constrain(precision.cast(_embedded(params["embed"], tokens, config, mesh)), mesh, ROWS, "context", None)

    if attention.segments and config.attention_chunk:  # each part of a segment is a separate one there
        parts = tokens.shape[1] // config.attention_chunk
        attention = dataclasses.replace(attention, segments=attention.segments + parts)
    attend = functools.partial(
        packed_attention, segment_ids=segment_ids, max_segment=max_segment, precision=precision.dot, mesh=mesh,
        backend=attention,
    )  # fmt: skip

    layers = params["layers"]
    if experts is not None:
        layers = {**layers, "given": jnp.moveaxis(experts, 2, 0).astype(jnp.int32)}
    if local := config.local_layers():
        chunks, attend_segment = chunk_ids(segment_ids, positions, config.attention_chunk), attend
        layers = {**layers, "local": jnp.array(local)}

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, local: jax.Array) -> jax.Array:
            return attend_segment(q, k, v, segment_ids=jnp.where(local, chunks, segment_ids))

    def block(x: jax.Array, weights: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
        kind = RowLayer if precision.bitwise else Layer
        own = kind(weights, config, rotation, precision, mesh=mesh, real=segment_ids > 0, given=weights.get("given"))
        x = layer(own, named(x, INPUT), attend)
        counts = {}
        if own.chosen is not None:
            counts["expert_tokens"] = tokens_of(own.chosen, config.experts)
        if own.moved is not None:
            counts["moved_pairs"] = jnp.sum(own.moved & (segment_ids > 0)[..., None], dtype=jnp.float32)
        return constrain(x, mesh, ROWS, "context", None), counts

    x, counts = scan_blocks(block, x, layers, remat)
    hidden = final_norm(x, params["final_norm"], config, precision, lead=2, mesh=mesh)
    return (hidden, counts) if counted else hidden

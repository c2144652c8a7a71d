"""Stages computed for a fixed number of rows, so that a token has the same bits at any place: config.numerics=bitwise.

A product of 3 rows is summed in another order than one of 3,000, and so is a norm or a softmax: a compiler chooses the
kernel by the shape, and by what it fuses with it. So here every stage that works on tokens one by one is a function of
exactly ROWS tokens between barriers, in the trainer, where tokens are positions of packed rows, as in the generator,
where they are slots. The inputs of a stage always have the same shape and nothing to be fused with, so it is the same
machine code; padding fills the last block. Attention is in attention/tiles.py.

Separate sums, products and roundings need none of this: one operation of IEEE 754 has one result.

The backward pass is that of the other numerics, over all tokens at once. No other side computes it.
"""

import functools
import hashlib
import math
import os
import pathlib
import platform as machine
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.precision import Precision
from scalerl_jax.model.sharding import ROWS as ROW_AXES

ROWS = 64  # tokens of a block; a multiple of 8, in which kernels of products treat all rows alike
_NO_MATTER = ("--xla_force_host_platform_device_count", "--xla_dump")  # options of XLA that change no bits
QUERIES, TILE = 4, 32  # of attention: queries of a block, keys of a tile; segments start at multiples of a tile

Stage = Callable[[Sequence[Any], Sequence[Any]], Any]  # of arrays [ROWS, ...] and of arguments that all blocks share

barrier = jax.lax.optimization_barrier


def alignment(precision: Precision, decoder: DecoderConfig, seq_len: int) -> int:
    """The segments of packed rows start at multiples of this. Raises ValueError if numerics=bitwise does not support
    this decoder or length of rows."""
    if not precision.bitwise:
        return 1
    if fault := unfit(decoder):
        raise ValueError(f"config.numerics=bitwise: {fault}")
    if seq_len % TILE:
        raise ValueError(f"config.learner.seq_len={seq_len}: config.numerics=bitwise requires a multiple of {TILE}")
    return TILE


def unfit(decoder: DecoderConfig) -> str:
    """Why numerics=bitwise does not support a decoder; "" if it does."""
    if decoder.experts:
        return f"not with experts, and the model has {decoder.experts}: their tokens are sorted"
    return "not with attention in chunks" if decoder.attention_chunk else ""


def in_blocks(stage: Stage, rows: Sequence[Any], shared: Sequence[Any] = (), *, lead: int, mesh: Mesh | None = None):
    """stage(rows, shared), ROWS tokens at a time.

    rows: arrays whose first `lead` dimensions are the tokens. mesh: the first of them is sharded over the axes of rows.
    Not differentiable.
    """
    local = functools.partial(_in_blocks, stage, lead)
    if mesh is None or mesh.size == 1:
        return local(rows, shared)
    cut, whole = PartitionSpec(ROW_AXES), PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=(cut, whole), out_specs=cut, check_vma=False)(rows, shared)


def _in_blocks(stage: Stage, lead: int, rows: Sequence[Any], shared: Sequence[Any]) -> Any:
    tokens = rows[0].shape[:lead]
    count = math.prod(tokens)

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(count, *x.shape[lead:])
        return jnp.pad(x, ((0, -count % ROWS), *((0, 0),) * (x.ndim - 1))).reshape(-1, ROWS, *x.shape[1:])

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])[:count].reshape(*tokens, *x.shape[2:])

    return jax.tree.map(join, in_a_loop(stage, tuple(map(cut, rows)), tuple(shared)))


def in_a_loop(stage: Stage, blocks: Sequence[jax.Array], shared: Sequence[Any]) -> Any:
    """As jax.lax.map of the stage over the blocks [n, ...], with a trip count unknown to the compiler, which else
    unrolls a loop of one iteration, and lays out its operands to suit the surrounding code."""

    def turn(number: Any, carry: Any) -> Any:
        out, blocks, shared = carry
        own = [jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for x in blocks]
        new = barrier(stage(*barrier((own, shared))))
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, number, 0), out, new), blocks, shared

    own = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in blocks]
    like = jax.eval_shape(stage, own, shared)
    out = jax.tree.map(lambda x: jnp.zeros((len(blocks[0]), *x.shape), x.dtype), like)
    return jax.lax.fori_loop(0, barrier(jnp.int32(len(blocks[0]))), turn, (out, *barrier((tuple(blocks), shared))))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def staged(stage: Stage, rows: tuple[Any, ...], shared: tuple[Any, ...], lead: int, mesh: Mesh | None = None) -> Any:
    """As in_blocks, with the gradient of the stage over all tokens at once."""
    return in_blocks(stage, rows, shared, lead=lead, mesh=mesh)


staged.defvjp(
    lambda stage, rows, shared, lead, mesh: (staged(stage, rows, shared, lead, mesh), (rows, shared)),
    lambda stage, lead, mesh, saved, g: jax.vjp(stage, *saved)[1](g),
)


def product(x: jax.Array, weight: jax.Array, dot: Any, *, lead: int, mesh: Mesh | None = None) -> jax.Array:
    """x [..., in] times weight [out, in] of its dtype -> [..., out] float32. Not differentiable."""
    return in_blocks(functools.partial(_product, dot), (x,), (weight,), lead=lead, mesh=mesh)


def _product(dot: Any, rows: Sequence[Any], shared: Sequence[Any]) -> jax.Array:
    (x,), (weight,) = rows, shared
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=dot, preferred_element_type=jnp.float32)


def log_sum(shifted: jax.Array, *, lead: int) -> jax.Array:
    """log of the sum of exp(shifted) over the last axis, whose largest value is 0."""
    return staged(_log_sum, (shifted,), (), lead)


def _log_sum(rows: Sequence[Any], shared: Sequence[Any]) -> jax.Array:
    return jnp.log(jnp.sum(jnp.exp(rows[0]), axis=-1))


@functools.cache
def fingerprint() -> str:
    """The properties that two sides must share besides weights and dtypes. One line."""
    options = [one for one in os.environ.get("XLA_FLAGS", "").split() if not one.startswith(_NO_MATTER)]
    return (
        f"rows {ROWS}, tiles {QUERIES}x{TILE}, jax {jax.__version__}, jaxlib {metadata.version('jaxlib')}, "
        f"{jax.local_devices()[0].device_kind} {_processor()}, XLA_FLAGS {' '.join(sorted(options)) or 'none'}"
    )


def _processor() -> str:
    """What XLA chooses machine code by. Not the number of threads: products are split along dimensions that are not
    summed."""
    if jax.local_devices()[0].platform != "cpu":
        return machine.machine()
    info = pathlib.Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else machine.processor()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = hashlib.sha256(found[1].encode() if found else text.encode()).hexdigest()[:8]
    return f"{machine.machine()} {flags}"

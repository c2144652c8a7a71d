"""The dtypes of a forward pass, and the only way in which a weight is used: rounded to what the generators run.

weight in use = compute dtype of (sync dtype of (float32 master)),  straight-through
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from scalerl_jax.model.lora import merged


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of one forward pass, by name so that it can be a static argument."""

    compute: str = "float32"
    sync: str = "float32"  # weights are rounded to it before every use
    # default: operands in the compute dtype | highest: float32 operands | bfloat16: as default, logits rounded to it
    head: str = "default"
    numerics: str = "fast"  # or bitwise: a token has the same bits at any position (row_blocks.py)

    @property
    def dot(self) -> jax.lax.Precision:
        # On TPU and recent GPUs a float32 product is done in bf16 or TF32 passes by default.
        return jax.lax.Precision.HIGHEST if self.compute == "float32" else jax.lax.Precision.DEFAULT

    @property
    def bitwise(self) -> bool:
        return self.numerics == "bitwise"

    def cast(self, weight: Any, dtype: str | None = None) -> jax.Array:
        """The weight (array or LowRank) as the policy uses it: rounded to the sync dtype, then cast to `dtype`
        (default: compute)."""
        return rounded(merged(weight), self.sync).astype(dtype or self.compute)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded(weight: jax.Array, dtype: str) -> jax.Array:
    """`weight` rounded to the values of `dtype`, in its own dtype; straight-through.

    Not two casts: the compiler may drop such a pair, and the cotangent would be rounded too.
    """
    if dtype == "float32":
        return weight
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(weight, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


rounded.defvjp(lambda weight, dtype: (rounded(weight, dtype), None), lambda dtype, _, g: (g,))


def kept(x: jax.Array, name: str) -> jax.Array:
    """`x`, under a name by which a remat policy may keep it (jax.ad_checkpoint). Not differentiable: for use inside the
    forward rule of a custom derivative.

    bfloat16 is kept as bits: XLA for CPUs writes to and reads from a stack of bfloat16 by way of a float32 copy of all
    of it.
    """
    if x.dtype != jnp.bfloat16:
        return checkpoint_name(x, name)
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint16), name)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def named(x: jax.Array, name: str) -> jax.Array:
    """As `kept`, differentiable."""
    return kept(x, name)


named.defvjp(lambda x, name: (kept(x, name), None), lambda name, _, g: (g,))

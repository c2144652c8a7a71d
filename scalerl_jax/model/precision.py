"""The dtypes of a forward pass, and the only way in which a weight is used: rounded to what the generators run.

weight in use = compute dtype of (sync dtype of (float32 master)),  straight-through
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

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

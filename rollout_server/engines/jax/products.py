"""The products of a decode step: few rows, one for each slot, times weights [out, in] as the files hold them.

    y = x W'        x [rows, in], W [out, in]

XLA for CPUs rearranges the right operand of a product in every call, which at few rows costs several times the product
itself. So there W is the left operand, y' = W x', and only the rows are rearranged, which are small. Without a barrier
behind it the compiler would turn the product round again, to save the transposition of its result.
"""

import jax
import jax.numpy as jnp

from scalerl_jax.model.decoder import Layer, Precision
from scalerl_jax.model.families.rows import WeightRow
from scalerl_jax.model.tensor_layout import rows

MOST_ROWS = 64  # of a product with few: with more of them, rearranging the weights costs less than turning the result
_LEAST_ROWS = 2  # for one row alone XLA widens bfloat16 weights, all of them


def lies_as_in_files(row: WeightRow) -> bool:
    """Whether a decode weight is [out, in], unlike the trainer's. Routers are used as there."""
    return row.transposed and "router" not in row.dimensions


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] of its dtype, summed and returned in float32: [..., out]."""
    dot = Precision(str(x.dtype)).dot
    count = x.size // x.shape[-1]
    if jax.default_backend() != "cpu" or count > MOST_ROWS:
        return jax.lax.dot_general(
            x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=dot, preferred_element_type=jnp.float32
        )
    few = x.reshape(count, -1)
    few = jnp.pad(few, ((0, max(0, _LEAST_ROWS - count)), (0, 0)))
    turned = jax.lax.dot_general(
        weight, few, (((1,), (1,)), ((), ())), precision=dot, preferred_element_type=jnp.float32
    )
    return jax.lax.optimization_barrier(turned).T[:count].reshape(*x.shape[:-1], -1)


class DecodeLayer(Layer):
    """A layer on decode weights (weights.py)."""

    def project(self, x: jax.Array, *leaves: str) -> object:
        return self._each(leaves, lambda weight: product(x, weight).astype(x.dtype), -1)

    def weight(self, *leaves: str) -> object:
        if not lies_as_in_files(rows(self._config)[leaves[0]]):
            return super().weight(*leaves)
        return self._each(leaves, lambda weight: self._precision.cast(weight).T, -1)

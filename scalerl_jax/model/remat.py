"""What the forward pass over the blocks keeps for the backward pass, and what is recomputed there.

                   kept                                                    recomputed
    none           all that a gradient needs                               nothing
    save_products  as save_attention, and every product with a weight      operations between products: norms, rotations
    save_attention each block's input, attention's output and its sums     each block, but not attention's scores
    block          each block's input                                      each block
    full           the input of every n-th block, n about sqrt(blocks)     each block twice

In this order memory falls and time rises; on CPUs, where memory traffic is expensive, `block` may be the faster one.
The values are the same in all of them, and the gradients to rounding.
"""

from collections.abc import Callable
from typing import Any

import jax

from scalerl_jax.model.attention import SAVED

NONE, SAVE_PRODUCTS, SAVE_ATTENTION, BLOCK, FULL = "none", "save_products", "save_attention", "block", "full"
REMATS = (NONE, SAVE_PRODUCTS, SAVE_ATTENTION, BLOCK, FULL)  # each takes less memory than those before
PRODUCTS_AGAIN, ATTENTION_AGAIN = (SAVE_ATTENTION, BLOCK, FULL), (BLOCK, FULL)  # where these are recomputed
INPUT, PRODUCT = "input", "product"  # the names of a block's input and of a product with a weight (precision.named)

Block = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def scan_blocks(block: Block, x: jax.Array, weights: Any, remat: str) -> tuple[jax.Array, Any]:
    """`x` through every block, and their other outputs, stacked. weights: stacked over blocks. As jax.lax.scan. A block
    names its input INPUT."""
    if remat == NONE:
        return jax.lax.scan(block, x, weights)
    if remat in _POLICIES:
        return jax.lax.scan(jax.checkpoint(block, policy=_POLICIES[remat]), x, weights)
    assert remat == FULL, remat
    count = len(jax.tree.leaves(weights)[0])
    several = group_size(count)
    groups = jax.tree.map(lambda leaf: leaf.reshape(count // several, several, *leaf.shape[1:]), weights)

    @jax.checkpoint
    def group(x: jax.Array, own: Any) -> tuple[jax.Array, Any]:
        return jax.lax.scan(jax.checkpoint(block), x, own)

    x, beside = jax.lax.scan(group, x, groups)
    return x, jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), beside)


def group_size(count: int) -> int:
    """Blocks of a group: the divisor of `count` that keeps the fewest inputs, of groups and of the blocks of one."""
    return min((n for n in range(1, count + 1) if count % n == 0), key=lambda n: (count // n + n, n))


def _keeps(*names: str) -> Callable[..., bool]:
    """A policy that keeps values of these names (blocks, splash), and all results of cuDNN's call, which is one
    operation."""
    named = jax.checkpoint_policies.save_only_these_names(*names)

    def policy(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        return primitive.name == _CUDNN or bool(named(primitive, *arguments, **parameters))

    return policy


_CUDNN = "dot_product_attention_fwd_wrapper"
_POLICIES = {
    BLOCK: jax.checkpoint_policies.save_only_these_names(INPUT),
    SAVE_ATTENTION: _keeps(INPUT, SAVED),
    SAVE_PRODUCTS: _keeps(INPUT, SAVED, PRODUCT),
}

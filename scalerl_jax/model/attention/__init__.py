"""Attention: one function and the choice of its backend, and one file per backend."""

from scalerl_jax.model.attention.blocks import SAVED
from scalerl_jax.model.attention.packed import BLOCKS, TILES, Backend, Shapes, choose, packed_attention, plain_on

__all__ = ["BLOCKS", "SAVED", "TILES", "Backend", "Shapes", "choose", "packed_attention", "plain_on"]

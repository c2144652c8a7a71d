"""Attention: one function and the choice of its backend, and one file per backend."""

from scalerl_jax.model.attention.blocks import SAVED
from scalerl_jax.model.attention.packed import BLOCKS, TILES, Backend, Shapes, blocks_on, choose, packed_attention

__all__ = ["BLOCKS", "SAVED", "TILES", "Backend", "Shapes", "blocks_on", "choose", "packed_attention"]

"""Attention: one function, one file per backend, and the choice among them."""

from scalerl_jax.model.attention.backend import BLOCKS, SAVED, TILES, Backend
from scalerl_jax.model.attention.choose import Shapes, choose
from scalerl_jax.model.attention.packed import packed_attention

__all__ = ["BLOCKS", "SAVED", "TILES", "Backend", "Shapes", "choose", "packed_attention"]

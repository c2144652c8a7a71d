"""Where prompts come from, the order they are drawn in, and what an answer is worth."""

from scalerl_jax.environments.base import Environment, Row, Score

__all__ = ["Environment", "Row", "Score"]

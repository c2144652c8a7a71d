"""Where prompts come from, the order they are drawn in, and what an answer is worth."""

from scalerl_jax.environments.base import Completion, Environment, Row, Score

__all__ = ["Completion", "Environment", "Row", "Score"]

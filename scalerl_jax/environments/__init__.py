"""Environments: prompts, the order in which they are sampled, and the scoring of answers."""

from scalerl_jax.environments.base import Completion, Environment, Row, Score

__all__ = ["Completion", "Environment", "Row", "Score"]

"""The objective: advantages, token weights, losses. Pure functions of arrays."""

from scalerl_jax.objective.advantages import advantages, token_weights, turn_advantages
from scalerl_jax.objective.losses import LOSSES, policy_loss

__all__ = ["LOSSES", "advantages", "policy_loss", "token_weights", "turn_advantages"]

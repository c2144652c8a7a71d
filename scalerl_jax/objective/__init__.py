"""The objective: advantages, token weights, losses. Pure functions of arrays."""

from scalerl_jax.objective.advantages import advantages
from scalerl_jax.objective.losses import LOSSES, policy_loss
from scalerl_jax.objective.token_weights import token_weights

__all__ = ["LOSSES", "advantages", "policy_loss", "token_weights"]

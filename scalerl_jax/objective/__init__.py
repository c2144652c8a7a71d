"""The objective: advantages, token weights, surrogate losses. Pure functions of arrays."""

from scalerl_jax.objective.advantages import advantages
from scalerl_jax.objective.losses import policy_loss
from scalerl_jax.objective.token_weights import token_weights

__all__ = ["advantages", "policy_loss", "token_weights"]

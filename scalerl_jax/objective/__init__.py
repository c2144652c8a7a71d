"""The objective: advantages, token weights, surrogate losses. Pure functions of arrays."""

from scalerl_jax.objective.advantage import advantages
from scalerl_jax.objective.surrogate import policy_loss
from scalerl_jax.objective.weighting import token_weights

__all__ = ["advantages", "policy_loss", "token_weights"]

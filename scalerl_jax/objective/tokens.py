"""What losses and masks are functions of."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Tokens:
    """[rows, length] each. Where there is no loss token, all floats are 0 (rho: 1)."""

    logp_train: jax.Array
    log_ratio: jax.Array  # logp_train - logp_gen, clipped where it is broken
    ratio: jax.Array  # rho, without a gradient
    moved: jax.Array  # pi_train - pi_gen of the token, without a gradient
    advantages: jax.Array
    loss_token: jax.Array  # bool
    segment_ids: jax.Array  # int32, 1.. in each row; 0 is padding

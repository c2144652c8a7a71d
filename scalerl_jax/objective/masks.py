"""Which loss tokens have a part in the loss. All masks are off by default; a token must pass each that is on.

    rho = pi / mu,  D = |pi - mu|       pi, mu: the probability of the sampled token by the trainer and its generator

    IcePop    low <= rho <= high
    DPPO      D <= threshold, or the advantage pushes the token back:  A (rho - 1) <= 0
    CPPO      Z_t <= c_t, or the advantage pushes the token back, over the T loss tokens of a completion:

        w_t = 1 - (1 - w_min) (t - 1) / max(T - 1, 1)       Z_t = w_t D_t
        c_t = min(delta, delta + b W_{t-1} - S_{t-1})       W, S: the sums of w and Z up to t, masked tokens included
        b   = budget, or the 90th percentile of the completion's D, clipped to [budget, 2 budget]

So CPPO allows a token near the end more than one near the beginning, and less wherever the tokens before it have used
up more than b each.

Left out on purpose: divergences over the whole vocabulary or its top k; a generator sends the sampled token's
probability alone.
Sources: IcePop, ringtech.notion.site/icepop; DPPO, arXiv 2602.04879, binary total variation; CPPO, arXiv 2606.10968.
"""

import jax
import jax.numpy as jnp

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.objective import within_segments
from scalerl_jax.objective.tokens import Tokens

_PERCENTILE = 0.9  # of a completion's D


def kept(tokens: Tokens, objective: ObjectiveConfig) -> jax.Array:
    """[rows, length] bool: the loss tokens that no mask takes out."""
    keep = tokens.loss_token
    # The sign of rho - 1, and no product: |pi - mu| of a rare token is 0 in float32, and so may a small product be.
    back = jnp.sign(tokens.log_ratio) * jnp.sign(tokens.advantages) <= 0
    if objective.icepop_high > 0:
        keep &= (tokens.ratio >= objective.icepop_low) & (tokens.ratio <= objective.icepop_high)
    if objective.dppo_tv_threshold > 0:
        keep &= back | (jnp.abs(tokens.moved) <= objective.dppo_tv_threshold)
    if objective.cppo_threshold > 0:
        keep &= back | _within_budget(tokens, objective)
    return keep


def _within_budget(tokens: Tokens, objective: ObjectiveConfig) -> jax.Array:
    ids, counted = tokens.segment_ids, tokens.loss_token.astype(jnp.float32)
    place, length = within_segments.before(counted, ids), within_segments.total(counted, ids)
    weight = counted * (1 - (1 - objective.cppo_least_weight) * place / jnp.maximum(length - 1, 1))
    moved = jnp.abs(tokens.moved)
    used = weight * moved
    budget: jax.Array | float = objective.cppo_budget
    if objective.cppo_budget_by_completion:
        own = within_segments.quantile(moved, tokens.loss_token, ids, _PERCENTILE)
        budget = jnp.clip(own, objective.cppo_budget, 2 * objective.cppo_budget)
    left = budget * within_segments.before(weight, ids) - within_segments.before(used, ids)
    return used <= objective.cppo_threshold + jnp.minimum(0.0, left)

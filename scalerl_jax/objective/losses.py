"""The surrogate losses, per token and already weighted.

    rho_t = exp(logp_train_t - logp_gen_t)          logp_gen: the generator's own, whatever version sampled the token
    cispo   - sum w_t sg(min(rho_t, cap)) A_t logp_train_t                      cap on rho itself, no floor
    clip    - sum w_t min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t)        GRPO .2/.2, DAPO .2/.26
    gspo    - sum w_t min(s A_t, clip(s, 1 - low, 1 + high) A_t)                s = exp(mean log rho of a completion)
    cross_entropy   - sum w_t logp_train_t                                      supervised warm start

Every token's gradient is that of its own log-prob: where s is differentiated it is sg(s) pi_t / sg(pi_t) (GSPO-token),
which is the same for the equal weights and advantages of a completion, and leaves a masked token none.

Truncated importance sampling, off by default: min(rho, tis_cap) or min(s, tis_cap) takes the place of rho or
s, in value and gradient. The ratio is against the generator's own log-probs, so it is in the loss already, and what
truncates is a cap on it, never a second factor. cispo has that cap: `cap`.
Masks, off by default: the IcePop band on rho, and DPPO's binary total variation |p_train - p_gen| of the sampled token,
where the advantage pushes further out. A masked token has no part in the loss and none in the gradient; the weights of
the others stay as they are.
Sources: arXiv 2510.13786 eq. 2-4; GSPO arXiv 2507.18071; DPPO arXiv 2602.04879.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# exp(20) is far beyond every cap; it keeps a broken log-prob from turning the ratio into infinity.
_MAXIMUM_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """What the loss is; the fields mean what the config's `objective` says of them."""

    kind: str = "cispo"  # cispo | clip | gspo | cross_entropy
    cap: float = 5.0
    clip_low: float = 0.2
    clip_high: float = 0.26
    tis_cap: float = 0.0
    icepop_low: float = 0.0
    icepop_high: float = 0.0
    dppo_tv_threshold: float = 0.0


def policy_loss(
    logp_train: jax.Array,
    logp_gen: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    segment_ids: jax.Array,
    surrogate: Surrogate,
) -> tuple[jax.Array, dict[str, Any]]:
    """The loss of one micro-batch and sums for the metrics.

    Args:
      logp_train, logp_gen, advantages, weights: [rows, length] float32, at the position that predicts each token;
        weights are 0 wherever there is no loss token, and whatever else stands there has no part in anything.
      segment_ids: [rows, length] int32, 1.. in each row; 0 is padding.
      surrogate: static.

    Returns: (loss, float32 scalar: a sum, to be added over micro-batches; sums: dict of scalars, `max_*` to be
    combined by maximum and the others by addition).
    Raises ValueError on a surrogate of another kind, and on tis_cap where no ratio is differentiated.
    """
    if surrogate.tis_cap > 0 and surrogate.kind not in ("clip", "gspo"):
        raise ValueError(f"tis_cap does not go with {surrogate.kind}")
    loss_token = weights > 0
    logp_train, logp_gen, advantages = (jnp.where(loss_token, x, 0.0) for x in (logp_train, logp_gen, advantages))
    difference = logp_train - logp_gen
    log_ratio = jnp.clip(difference, -_MAXIMUM_LOG_RATIO, _MAXIMUM_LOG_RATIO)
    fixed = jax.lax.stop_gradient(jnp.exp(log_ratio))
    low, high = 1 - surrogate.clip_low, 1 + surrogate.clip_high
    keep = loss_token

    def truncated(ratio: jax.Array) -> jax.Array:
        return jnp.minimum(ratio, surrogate.tis_cap) if surrogate.tis_cap > 0 else ratio

    # 1; its derivative is that of the log-prob. A broken log-prob has none, unless its ratio is capped.
    differentiated = logp_train if surrogate.tis_cap > 0 else log_ratio
    own = jnp.exp(differentiated - jax.lax.stop_gradient(differentiated))
    if surrogate.kind == "cispo":
        objective = jnp.minimum(fixed, surrogate.cap) * advantages * logp_train
        clipped = fixed > surrogate.cap
    elif surrogate.kind == "clip":
        capped = truncated(fixed)
        ratio = capped * own
        objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
        clipped = ((capped < low) & (advantages < 0)) | ((capped > high) & (advantages > 0))
    elif surrogate.kind == "gspo":
        capped = truncated(_sequence_ratio(jax.lax.stop_gradient(log_ratio), loss_token, segment_ids))
        ratio = capped * own
        objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
        clipped = ((capped < low) & (advantages < 0)) | ((capped > high) & (advantages > 0))
    elif surrogate.kind == "cross_entropy":
        objective = logp_train
        clipped = jnp.zeros_like(loss_token)
    else:
        raise ValueError(f"surrogate {surrogate.kind!r} is not cispo, clip, gspo or cross_entropy")

    if surrogate.icepop_high > 0:
        keep = keep & (fixed >= surrogate.icepop_low) & (fixed <= surrogate.icepop_high)
    if surrogate.dppo_tv_threshold > 0:
        moved = jnp.exp(jax.lax.stop_gradient(logp_train)) - jnp.exp(logp_gen)
        keep = keep & ~((jnp.abs(moved) > surrogate.dppo_tv_threshold) & (moved * advantages > 0))

    loss = -jnp.sum(jnp.where(keep, weights * objective, 0.0))
    count = loss_token.astype(jnp.float32)
    exact = jax.lax.stop_gradient(difference)
    sums = {
        "tokens": jnp.sum(count),
        "nats": -jnp.sum(jax.lax.stop_gradient(logp_train)),
        "mismatch": jnp.sum(jnp.abs(exact) * count),
        "ratio": jnp.sum(fixed * count),
        "ratio_squared": jnp.sum(fixed**2 * count),
        "kl": jnp.sum((fixed - 1 - jax.lax.stop_gradient(log_ratio)) * count),
        "clipped": jnp.sum(clipped * count),
        "masked": jnp.sum(loss_token & ~keep),
        "max_mismatch": jnp.max(jnp.abs(exact)),
        "max_ratio": jnp.max(jnp.where(loss_token, fixed, 0.0)),
    }
    return loss, sums


def _sequence_ratio(log_ratio: jax.Array, loss_token: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """exp(mean log-ratio over the loss tokens of a segment), at each of its tokens. log_ratio is 0 at the others."""
    segments = segment_ids.shape[1] + 1  # as many as a row has positions, and padding

    def mean(log_ratio: jax.Array, loss_token: jax.Array, segment_ids: jax.Array) -> jax.Array:
        total = jax.ops.segment_sum(log_ratio, segment_ids, num_segments=segments)
        count = jax.ops.segment_sum(loss_token.astype(log_ratio.dtype), segment_ids, num_segments=segments)
        return (total / jnp.maximum(count, 1.0))[segment_ids]

    return jnp.exp(jax.vmap(mean)(log_ratio, loss_token, segment_ids))

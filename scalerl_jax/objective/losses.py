"""The losses, per token and already weighted.

    rho_t = exp(logp_train_t - logp_gen_t)          logp_gen: the generator's own, from whichever version sampled it
    cispo       - sum w_t sg(clip(rho_t, min_ratio, max_ratio)) A_t logp_train_t    on rho itself; no floor by default
    clip        - sum w_t min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t)    GRPO .2/.2, DAPO .2/.26
    gspo        - sum w_t min(s A_t, clip(s, 1 - low, 1 + high) A_t)            s = exp(mean log rho of a completion)
    reinforce   - sum w_t A_t logp_train_t                                      as if the tokens were the policy's own
    dro         - sum w_t (A_t logp_train_t - dro_beta / 2 (log rho_t)^2)       no ratio as a weight; a penalty on it
    cross_entropy   - sum w_t logp_train_t                                      supervised warm start

Every token's gradient is that of its own log-prob: where s is differentiated it is sg(s) pi_t / sg(pi_t) (GSPO-token),
which is the same for the equal weights and advantages of a completion, and gives a masked token no gradient.

Truncated importance sampling, off by default: min(rho, tis_cap) or min(s, tis_cap) replaces rho or s, in value and
gradient. The ratio is against the generator's own log-probs, so it is in the loss already, and truncation is a cap on
it, never a second factor. cispo has that cap: `max_ratio`; reinforce has no ratio, and is weighted by
sg(min(rho, tis_cap)), which makes it cispo.
Masks (below), off by default: a masked token has no part in the terms above and none in their gradient; the weights
of the others do not change.

Added to any of them over all loss tokens, masked or not, off by default:

    + reference_kl sum w_t (exp(d_t) - 1 - d_t)     d_t = logp_reference_t - logp_train_t: the k3 estimate, as in GRPO
    - entropy_bonus sum w_t H_t                     H_t: entropy of the policy where the token was sampled, nats
    + distill_weight sum w_t D_t                    D_t: the divergence from a teacher, over its k ids i

    topk_forward    D = sum_i p_T,i (log p_T,i - log p_S,i) + q_T (log q_T - log q_S)    S: the policy, T: the teacher
    student_topk    D = sum_i p_S,i (log p_S,i - log p_T,i) + q_S (log q_S - log q_T)    q = 1 - sum_i p_i, of each side

D is the KL of the distributions over the k ids and one bucket of all other tokens, so at most that over the vocabulary,
and equal to it if the ids are the whole vocabulary. Its gradient is of log p_S,i alone, q_S being a function of them:

    dD / dlog p_S,i = - p_T,i + p_S,i q_T / q_S     and    p_S,i (log p_S,i - log p_T,i - log q_S + log q_T)

The third form of distillation, `sampled`, is an advantage, computed with the others (learner/batch.py). `soft_targets`,
not for RL, has the teacher's weights of the ids in place of log-probs: D = - sum_i weight_i log p_S,i, its ids need not
differ.

Adding one: a function of (Tokens, ObjectiveConfig) and its row in LOSSES; the config's `objective.loss` names it.
A compiled program fits every objective of one form: which loss, and which of its numbers are on (not 0). The numbers
themselves are arguments of the program (`form_of`, `numbers_of`).
Sources: arXiv 2510.13786 eq. 2-4; GRPO arXiv 2402.03300 eq. 4; GSPO arXiv 2507.18071; DRO arXiv 2405.19107, of tokens
in place of completions, with an advantage in place of reward less value, as Tinker has it.

Masks: the loss tokens that take part in the loss. All are off by default; a token must pass each one that is on.

    rho = pi / mu,  D = |pi - mu|       pi, mu: the probability of the sampled token by the trainer and its generator

    IcePop    low <= rho <= high
    DPPO      D <= threshold, or the advantage pushes the token back:  A (rho - 1) <= 0
    CPPO      Z_t <= c_t, or the advantage pushes the token back, over the T loss tokens of a completion:

        w_t = 1 - (1 - w_min) (t - 1) / max(T - 1, 1)       Z_t = w_t D_t
        c_t = min(delta, delta + b W_{t-1} - S_{t-1})       W, S: the sums of w and Z up to t, masked tokens included
        b   = budget, or the 90th percentile of the completion's D, clipped to [budget, 2 budget]

So CPPO allows more change to a token near the end than near the beginning, and less wherever the tokens before it have
used more than b each.

Left out on purpose: masks by divergences over the whole vocabulary or its top k; a generator sends only the sampled
token's probability.
Sources: IcePop, ringtech.notion.site/icepop; DPPO, arXiv 2602.04879, binary total variation; CPPO, arXiv 2606.10968.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.config import ObjectiveConfig


def total(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The sum over each position's segment."""
    return jnp.take_along_axis(sums(values, segment_ids), segment_ids, axis=1)


def sums(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """[rows, length + 1]: the sum over each segment, at its number."""
    segments = segment_ids.shape[1] + 1  # one for each position of a row, and one for padding
    return jax.vmap(lambda v, ids: jax.ops.segment_sum(v, ids, num_segments=segments))(values, segment_ids)


def before(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """For each position, the sum over the earlier positions of its segment."""
    previous = jnp.roll(segment_ids, 1, axis=1).at[:, 0].set(-1)
    first = segment_ids != previous

    def add(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    through, _ = jax.lax.associative_scan(add, (values, first), axis=1)
    return jnp.where(first, 0.0, jnp.roll(through, 1, axis=1))


def quantile(values: jax.Array, loss_token: jax.Array, segment_ids: jax.Array, share: float) -> jax.Array:
    """The quantile over the loss tokens of each position's segment, linear between the two nearest; 0 without loss
    tokens."""
    length = segment_ids.shape[1]
    key = jnp.where(loss_token, segment_ids, length + 1)  # the others come last
    _, ordered = jax.lax.sort((key, values), dimension=1, num_keys=2)
    count = sums(loss_token.astype(jnp.int32), segment_ids)
    start = jnp.cumsum(count, axis=1) - count
    count, start = (jnp.take_along_axis(x, segment_ids, axis=1) for x in (count, start))
    place = share * jnp.maximum(count - 1, 0).astype(jnp.float32)
    lower = jnp.floor(place).astype(jnp.int32)
    upper = jnp.minimum(lower + 1, jnp.maximum(count - 1, 0))
    low, high = (jnp.take_along_axis(ordered, jnp.minimum(start + x, length - 1), axis=1) for x in (lower, upper))
    return jnp.where(count > 0, low + (place - lower) * (high - low), 0.0)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """[rows, length] each. Where there is no loss token, all floats are 0 (rho: 1)."""

    logp_train: jax.Array
    log_ratio: jax.Array  # logp_train - logp_gen, clipped to +-20
    ratio: jax.Array  # rho, without a gradient
    moved: jax.Array  # pi_train - pi_gen of the token, without a gradient
    advantages: jax.Array
    loss_token: jax.Array  # bool
    segment_ids: jax.Array  # int32, 1.. in each row; 0 is padding


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_of(objective: ObjectiveConfig) -> dict[str, float]:
    """The numbers that are on (not 0), by their field's name: the arguments of a compiled program."""
    fields = dataclasses.asdict(objective).items()
    return {name: float(value) for name, value in fields if _is_number(value) and value != 0}


@dataclasses.dataclass(frozen=True)
class Form:
    """The part of an objective that is compiled into a program: all but the values of the numbers that are on."""

    fields: tuple[tuple[str, Any], ...]  # (name, value); value None for a number that is on

    @property
    def on(self) -> list[str]:
        return [name for name, value in self.fields if value is None]

    def objective(self, numbers: Mapping[str, Any]) -> ObjectiveConfig:
        """The objective with these numbers, which may be traced."""
        return ObjectiveConfig(**{name: numbers[name] if value is None else value for name, value in self.fields})


def form_of(objective: ObjectiveConfig) -> Form:
    on = numbers_of(objective)
    fields = dataclasses.asdict(objective).items()
    return Form(tuple((name, None if name in on else value) for name, value in fields))


def _on(number: jax.Array | float) -> bool:
    """Whether a number is on. A traced one always is: `numbers_of` leaves the others out."""
    return isinstance(number, jax.Array) or number > 0


_PERCENTILE = 0.9  # of a completion's D


def kept(tokens: Tokens, objective: ObjectiveConfig) -> jax.Array:
    """[rows, length] bool: the loss tokens that no mask takes out."""
    keep = tokens.loss_token
    # The sign of rho - 1, and no product: |pi - mu| of a rare token is 0 in float32, and so may a small product be.
    back = jnp.sign(tokens.log_ratio) * jnp.sign(tokens.advantages) <= 0
    if _on(objective.icepop_high):
        keep &= (tokens.ratio >= objective.icepop_low) & (tokens.ratio <= objective.icepop_high)
    if _on(objective.dppo_tv_threshold):
        keep &= back | (jnp.abs(tokens.moved) <= objective.dppo_tv_threshold)
    if _on(objective.cppo_threshold):
        keep &= back | _within_budget(tokens, objective)
    return keep


def _within_budget(tokens: Tokens, objective: ObjectiveConfig) -> jax.Array:
    ids, counted = tokens.segment_ids, tokens.loss_token.astype(jnp.float32)
    place, length = before(counted, ids), total(counted, ids)
    weight = counted * (1 - (1 - objective.cppo_least_weight) * place / jnp.maximum(length - 1, 1))
    moved = jnp.abs(tokens.moved)
    used = weight * moved
    budget: jax.Array | float = objective.cppo_budget
    if objective.cppo_budget_by_completion:
        own = quantile(moved, tokens.loss_token, ids, _PERCENTILE)
        budget = jnp.clip(own, objective.cppo_budget, 2 * objective.cppo_budget)
    left = budget * before(weight, ids) - before(used, ids)
    return used <= objective.cppo_threshold + jnp.minimum(0.0, left)


# exp(20) is far beyond every cap; it keeps a broken log-prob from turning the ratio into infinity.
MAXIMUM_LOG_RATIO = 20.0


Terms = tuple[jax.Array, jax.Array]  # of each token: what is maximized, and whether its ratio is clipped (a metric)


def cispo(tokens: Tokens, objective: ObjectiveConfig) -> Terms:
    """The truncated ratio weighs the gradient of the log-prob."""
    return _weighed(tokens, objective.max_ratio, floor=objective.min_ratio)


def clip(tokens: Tokens, objective: ObjectiveConfig) -> Terms:
    """Two-sided clip of each token's ratio."""
    return _clipped(tokens.ratio, tokens, objective)


def gspo(tokens: Tokens, objective: ObjectiveConfig) -> Terms:
    """Two-sided clip of each completion's length-normalized ratio."""
    log_ratio = jax.lax.stop_gradient(tokens.log_ratio)
    return _clipped(_sequence_ratio(log_ratio, tokens.loss_token, tokens.segment_ids), tokens, objective)


def reinforce(tokens: Tokens, objective: ObjectiveConfig) -> Terms:
    """The log-prob's gradient, weighted by no ratio, or by the truncated one."""
    if _on(objective.tis_cap):
        return _weighed(tokens, objective.tis_cap)
    return tokens.advantages * tokens.logp_train, jnp.zeros_like(tokens.loss_token)


def dro(tokens: Tokens, objective: ObjectiveConfig) -> Terms:
    """The log-prob's gradient, and a square that keeps it close to its generator's."""
    away = objective.dro_beta / 2 * jnp.square(tokens.log_ratio)
    return tokens.advantages * tokens.logp_train - away, jnp.zeros_like(tokens.loss_token)


def cross_entropy(tokens: Tokens, objective: ObjectiveConfig) -> Terms:
    """The log-prob of a supervised example: it was not sampled, and has no advantage."""
    del objective
    return tokens.logp_train, jnp.zeros_like(tokens.loss_token)


LOSSES: dict[str, Callable[[Tokens, ObjectiveConfig], Terms]] = {
    "cispo": cispo,
    "clip": clip,
    "gspo": gspo,
    "reinforce": reinforce,
    "dro": dro,
}
_TERMS = {**LOSSES, "cross_entropy": cross_entropy}  # cross_entropy is not for RL


def _weighed(tokens: Tokens, cap: float, floor: float = 0.0) -> Terms:
    truncated, clipped = jnp.minimum(tokens.ratio, cap), tokens.ratio > cap
    if _on(floor):
        truncated, clipped = jnp.maximum(truncated, floor), clipped | (tokens.ratio < floor)
    return truncated * tokens.advantages * tokens.logp_train, clipped


def _clipped(ratio: jax.Array, tokens: Tokens, objective: ObjectiveConfig) -> Terms:
    """ratio: without a gradient; each token has that of its own log-prob."""
    low, high, advantages = 1 - objective.clip_low, 1 + objective.clip_high, tokens.advantages
    truncated = _on(objective.tis_cap)
    capped = jnp.minimum(ratio, objective.tis_cap) if truncated else ratio
    # 1; its derivative is that of the log-prob. A broken log-prob has none, unless its ratio is capped.
    differentiated = tokens.logp_train if truncated else tokens.log_ratio
    own = capped * jnp.exp(differentiated - jax.lax.stop_gradient(differentiated))
    clipped = ((capped < low) & (advantages < 0)) | ((capped > high) & (advantages > 0))
    return jnp.minimum(own * advantages, jnp.clip(own, low, high) * advantages), clipped


def _sequence_ratio(log_ratio: jax.Array, loss_token: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """exp(mean log-ratio over the loss tokens of a segment), at each of its tokens. log_ratio is 0 at the others."""
    count = total(loss_token.astype(log_ratio.dtype), segment_ids)
    return jnp.exp(total(log_ratio, segment_ids) / jnp.maximum(count, 1.0))


# Rounding error of 1 - sum p in float32 where nothing is left. A tail as small as that counts as none.
_EMPTY = 1e-6


@dataclasses.dataclass(frozen=True)
class Compared:
    """[rows, length, k] each, of the tokens that are compared at each position."""

    ids: jax.Array  # int32, each once; -1: none
    student: jax.Array  # log-probs by the policy, differentiated
    teacher: jax.Array  # and by the teacher

    def probabilities(self, side: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(p [rows, length, k], 0 where there is no id; q [rows, length], the remaining probability: _EMPTY or more)"""
        p = jnp.where(self.ids >= 0, jnp.exp(jax.lax.stop_gradient(side)), 0.0)
        return p, jnp.maximum(1.0 - jnp.sum(p, axis=-1), _EMPTY)

    def log_ratios(self) -> jax.Array:
        """log p_S - log p_T, without a gradient; 0 where there is no id."""
        difference = jnp.clip(self.student - self.teacher, -MAXIMUM_LOG_RATIO, MAXIMUM_LOG_RATIO)
        return jax.lax.stop_gradient(jnp.where(self.ids >= 0, difference, 0.0))

    def differentiated(self, value: jax.Array, slope: jax.Array) -> jax.Array:
        """`value` [rows, length], with `slope` [rows, length, k] as its derivative by the student's log-probs."""
        student = jnp.where(self.ids >= 0, self.student, 0.0)
        return value + jnp.sum(slope * (student - jax.lax.stop_gradient(student)), axis=-1)


_Divergence = tuple[jax.Array, jax.Array]  # [rows, length] for each token: nats, and the tail of the teacher


def topk_forward(compared: Compared) -> _Divergence:
    """KL from the teacher to the policy: makes the policy cover what the teacher does."""
    (student, rest), (teacher, tail) = (
        compared.probabilities(compared.student),
        compared.probabilities(compared.teacher),
    )
    tail = jnp.where(tail > _EMPTY, tail, 0.0)
    away = jnp.log(jnp.maximum(tail, _EMPTY) / rest)
    value = tail * away - jnp.sum(teacher * compared.log_ratios(), axis=-1)
    return compared.differentiated(value, (tail / rest)[..., None] * student - teacher), tail


def student_topk(compared: Compared) -> _Divergence:
    """KL from the policy to the teacher: makes the policy do only what the teacher does."""
    (student, rest), (_, tail) = compared.probabilities(compared.student), compared.probabilities(compared.teacher)
    away = jnp.where(rest > _EMPTY, jnp.log(rest / tail), 0.0)
    ratios = compared.log_ratios()
    value = rest * away + jnp.sum(student * ratios, axis=-1)
    return compared.differentiated(value, student * (ratios - away[..., None])), jnp.where(tail > _EMPTY, tail, 0.0)


def soft_targets(compared: Compared) -> _Divergence:
    """The cross-entropy of several targets, whose weights are where a teacher's log-probs otherwise are."""
    slope = jnp.where(compared.ids >= 0, -compared.teacher, 0.0)
    value = jnp.sum(slope * jax.lax.stop_gradient(compared.student), axis=-1)
    return compared.differentiated(value, slope), jnp.zeros_like(value)


SOFT_TARGETS = "soft_targets"
DIVERGENCES: dict[str, Callable[[Compared], _Divergence]] = {"topk_forward": topk_forward, "student_topk": student_topk}
OVER_IDS = {**DIVERGENCES, SOFT_TARGETS: soft_targets}  # all that need a teacher's ids
# The bounds of the ratio, which a batch may have for each token in place of the objective's (learner/packing.py).
THRESHOLDS = {
    "cispo": ("min_ratio", "max_ratio"),
    "clip": ("clip_low", "clip_high"),
    "gspo": ("clip_low", "clip_high"),
}


def policy_loss(
    logp_train: jax.Array,
    logp_gen: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    segment_ids: jax.Array,
    objective: ObjectiveConfig,
    *,
    reference: jax.Array | None = None,
    entropy: jax.Array | None = None,
    compared: Compared | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """The loss of one micro-batch and sums for the metrics.

    Args:
      logp_train, logp_gen, advantages, weights: [rows, length] float32, at the position that predicts each token;
        weights are 0 wherever there is no loss token, and other values there have no effect.
      segment_ids: [rows, length] int32, 1.. in each row; 0 is padding.
      objective: of one form, static; its numbers may be traced.
      reference: the reference policy's log-probs, if there is a KL to it.
      entropy: of the policy at each position, nats, if there is a bonus on it; differentiated.
      compared: log-probs by policy and teacher of the compared tokens, if the form of distillation needs them.

    Returns: (loss, float32 scalar: a sum, to be added over micro-batches; sums: dict of scalars, `max_*` to be
    combined by maximum and the others by addition).
    Raises ValueError on an unknown loss, and on tis_cap with cispo or dro.
    """
    if objective.loss not in _TERMS:
        raise ValueError(f"loss {objective.loss!r} is not one of {', '.join(LOSSES)}")
    if _on(objective.tis_cap) and objective.loss in ("cispo", "dro"):
        raise ValueError(f"tis_cap does not go with {objective.loss}")
    loss_token = weights > 0
    logp_train, logp_gen, advantages = (jnp.where(loss_token, x, 0.0) for x in (logp_train, logp_gen, advantages))
    difference = logp_train - logp_gen
    log_ratio = jnp.clip(difference, -MAXIMUM_LOG_RATIO, MAXIMUM_LOG_RATIO)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    moved = jnp.exp(jax.lax.stop_gradient(logp_train)) - jnp.exp(logp_gen)
    tokens = Tokens(logp_train, log_ratio, ratio, moved, advantages, loss_token, segment_ids)
    maximized, clipped = _TERMS[objective.loss](tokens, objective)
    keep = kept(tokens, objective)

    loss = -jnp.sum(jnp.where(keep, weights * maximized, 0.0))
    count = loss_token.astype(jnp.float32)
    exact = jax.lax.stop_gradient(difference)
    sums = {
        "tokens": jnp.sum(count),
        "nll": -jnp.sum(jax.lax.stop_gradient(logp_train)),
        "mismatch": jnp.sum(jnp.abs(exact) * count),
        "other_bits": jnp.sum(exact != 0, dtype=jnp.float32),
        "ratio": jnp.sum(ratio * count),
        "ratio_squared": jnp.sum(ratio**2 * count),
        "kl": jnp.sum(_kl_estimate(jax.lax.stop_gradient(log_ratio)) * count),
        "clipped": jnp.sum(clipped * count),
        "masked": jnp.sum(loss_token & ~keep),
        "max_mismatch": jnp.max(jnp.abs(exact)),
        "max_ratio": jnp.max(jnp.where(loss_token, ratio, 0.0)),
    }
    if _on(objective.reference_kl):
        assert reference is not None
        reference = jnp.where(loss_token, jax.lax.stop_gradient(reference), 0.0)
        away = jnp.clip(reference - logp_train, -MAXIMUM_LOG_RATIO, MAXIMUM_LOG_RATIO)
        divergence = _kl_estimate(away)
        loss += objective.reference_kl * jnp.sum(jnp.where(loss_token, weights * divergence, 0.0))
        sums["reference_kl"] = jax.lax.stop_gradient(jnp.sum(divergence * count))
    if _on(objective.entropy_bonus):
        assert entropy is not None
        loss -= objective.entropy_bonus * jnp.sum(jnp.where(loss_token, weights * entropy, 0.0))
    if objective.distill in OVER_IDS:
        assert compared is not None
        divergence, tail = OVER_IDS[objective.distill](compared)
        loss += objective.distill_weight * jnp.sum(jnp.where(loss_token, weights * divergence, 0.0))
        known = loss_token & jnp.any(compared.ids >= 0, axis=-1)
        sums["compared"] = jnp.sum(known.astype(jnp.float32))
        sums["teacher_divergence"] = jax.lax.stop_gradient(jnp.sum(jnp.where(known, divergence, 0.0)))
        sums["teacher_tail"] = jnp.sum(jnp.where(known, tail, 0.0))
    return loss, sums


def _kl_estimate(log_ratio: jax.Array) -> jax.Array:
    """rho - 1 - log rho of each token, at least 0: the k3 estimate of the KL from generator to trainer.

    Near rho = 1, where healthy tokens are, the three terms cancel to rounding errors; there the series is used:
    d^2/2 + d^3/6 + d^4/24 + ...
    """
    near = jnp.clip(log_ratio, -0.1, 0.1)
    series = near**2 / 2 * (1 + near / 3 * (1 + near / 4 * (1 + near / 5)))
    return jnp.where(log_ratio == near, series, jnp.expm1(log_ratio) - log_ratio)

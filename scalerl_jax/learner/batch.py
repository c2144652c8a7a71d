"""From a batch of finished groups to what the update trains on.

    r = the score's reward;  cut by the token budget: exclude (leaves mean, std, weights and G) or penalize (r = -1)
    advantages, then one weight per loss token (objective/), then one segment per counted completion

Loss tokens are the sampled ones: the forced interruption phrase is context, never trained on.
The staleness of a token is the number of the batch it is trained in minus the policy step that sampled it.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments.base import Row, Score
from scalerl_jax.learner.expert_load import expert_load
from scalerl_jax.learner.packing import Segment
from scalerl_jax.learner.repetition import repetition_metrics
from scalerl_jax.objective import advantages, token_weights


class Group(Protocol):
    """The completions of one prompt, and what each is worth."""

    @property
    def row(self) -> Row: ...

    @property
    def completions(self) -> Sequence[Completion]: ...

    @property
    def scores(self) -> Sequence[Score]: ...


@dataclasses.dataclass(frozen=True)
class Batch:
    """One update's input and what there is to say of it."""

    segments: list[Segment]  # empty: no prompt survives, the optimizer does not step
    origins: list[tuple[int, int]]  # of each segment: (group, completion), as places in the batch
    outcomes: list[tuple[int, int, int]]  # (prompt index, correct, completions) for the curriculum
    metrics: dict[str, float]
    lags: Counter  # staleness -> loss tokens, of every sampled token, trained on or not
    rewards: np.ndarray  # [prompts, group] float64
    prompt_tokens: int  # of the segments, prompts and forced tokens included: what the trainer computes


def build(
    groups: Sequence[Group], objective: ObjectiveConfig, *, number: int, end_of_thinking: Sequence[int] = ()
) -> Batch:
    """Batch `number` from its groups, all of one size.

    end_of_thinking: the token ids that the thinking ends with; how many completions lack them is measured.
    """
    completions = [list(group.completions) for group in groups]
    truncated = np.array([[c.finish_reason == "length" for c in row] for row in completions])
    correct = np.array([[score.correct for score in group.scores] for group in groups], bool) & ~truncated
    counted = np.ones_like(correct) if objective.truncated == "penalize" else ~truncated
    rewards = np.where(truncated, -1.0, [[score.reward for score in group.scores] for group in groups])
    sampled = [[c.sampled() for c in row] for row in completions]
    loss_tokens = np.array([[int(mask.sum()) for mask in row] for row in sampled])

    advantage, survives = advantages(
        rewards, correct, counted, normalization=objective.advantage_normalization,
        filter_zero_variance=objective.filter_zero_variance,
    )  # fmt: skip
    weight = token_weights(loss_tokens, counted, survives, objective.aggregation)

    segments, origins = [], []
    lags: Counter = Counter()
    for p, group in enumerate(groups):
        prompt = np.asarray(group.row.token_ids, np.int32)
        blank = np.zeros(len(prompt), np.float32)
        for i, completion in enumerate(completions[p]):
            lag, count = np.unique(number - completion.token_steps()[sampled[p][i]], return_counts=True)
            lags.update(dict(zip(lag.tolist(), count.tolist())))
            if weight[p, i] == 0:
                continue
            mask = sampled[p][i].astype(np.float32)
            origins.append((p, i))
            segments.append(
                Segment(
                    tokens=np.concatenate([prompt, completion.token_ids]),
                    weights=np.concatenate([blank, mask * np.float32(weight[p, i])]),
                    advantages=np.concatenate([blank, np.full(len(mask), advantage[p, i], np.float32)]),
                    generator_logprobs=np.concatenate([blank, completion.logprobs]),
                    experts=completion.experts,
                )
            )

    lengths = loss_tokens.ravel()
    interrupted = np.mean([[bool(c.forced) for c in row] for row in completions])
    metrics = {
        "pass_rate": float(correct.mean()),
        "reward": float(rewards.mean()),
        "prompts": float(len(groups)),
        "prompts_surviving": float(survives.sum()),
        "completions_counted": float((counted & survives[:, None]).sum()),
        "truncated": float(truncated.mean()),
        "interrupted": float(interrupted),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        **repetition_metrics(
            [c.token_ids[sampled[p][i]] for p, row in enumerate(completions) for i, c in enumerate(row)]
        ),
        "lag_mean": float(sum(lag * count for lag, count in lags.items()) / max(1, lags.total())),
        "lag_max": float(max(lags, default=0)),
        "loss_tokens": float(sum(int((s.weights > 0).sum()) for s in segments)),
    }
    if end_of_thinking:
        # Sampled or forced: without it a completion has no answer.
        ended = [[_contains(c.token_ids, end_of_thinking) for c in row] for row in completions]
        metrics["no_end_of_thinking"] = 1.0 - float(np.mean(ended))
    for name in sorted({name for group in groups for score in group.scores for name in score.metrics}):
        said = [score.metrics[name] for group in groups for score in group.scores if name in score.metrics]
        metrics[f"score/{name}"] = float(np.mean(said))
    outcomes = [(int(g.row.index), int(correct[p].sum()), correct.shape[1]) for p, g in enumerate(groups)]
    return Batch(
        segments=segments,
        origins=origins,
        outcomes=outcomes,
        metrics=metrics,
        lags=lags,
        rewards=rewards,
        prompt_tokens=sum(len(s.tokens) for s in segments),
    )


def _contains(tokens: np.ndarray, wanted: Sequence[int]) -> bool:
    """Whether `wanted` stands somewhere in tokens [t], on end."""
    if len(tokens) < len(wanted):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
    return bool((windows == np.asarray(wanted)).all(axis=1).any())


def per_token(sums: dict[str, Any]) -> dict[str, Any]:
    """The learner's sums as means over loss tokens, under the names the metrics use.

    d = logp_train - logp_gen, rho = exp(d): mismatch is the mean of |d|, ratio that of rho, and kl (the mismatch KL)
    that of rho - 1 - d, the k3 estimator of KL(generators || trainer): never negative, of small variance, and unbiased,
    since the generators sampled the tokens.
    """
    tokens = max(1.0, sums["tokens"])
    return {
        **{name: sums[name] for name in ("loss", "gradient_norm", "micro_batches", "row_use")},
        **(expert_load(sums["expert_tokens"], sums.get("moved_pairs")) if "expert_tokens" in sums else {}),
        **{name: sums[name] / tokens for name in ("entropy", "mismatch", "kl", "ratio", "clipped", "masked")},
        "mismatch_max": sums["max_mismatch"],
        "ratio_max": sums["max_ratio"],
        # Kish's effective sample size of the importance ratios, as a share of the tokens.
        "effective_sample_size": sums["ratio"] ** 2 / max(1e-30, sums["ratio_squared"] * tokens),
        **({"reference_kl": sums["reference_kl"] / tokens} if "reference_kl" in sums else {}),
    }

"""From a batch of finished groups to the segments that the update trains on, with metrics of the batch.

    r = the score's reward;  cut by the token budget: exclude (leaves mean, std, weights and G) or penalize (r = -1)
    advantages, then one weight per loss token (objective/), then one segment per counted completion

With a teacher (`objective.distill`), every prompt that has one is trained on, whatever its rewards; where these have no
variance, or are not to be learned from, the prompt has only the teacher's term:

    A_t = reward_weight Ahat - distill_weight (logp_gen_t - logp_teacher_t)     `sampled`; of the other forms without
                                                                                the second term: theirs is in the loss
The second term is not normalized: it is in nats, and belongs to each token alone.

Loss tokens are the sampled ones: the forced interruption phrase is context, never trained on.
The staleness of a token is the number of the batch it is trained in minus the policy step that sampled it.

How evenly the router spreads tokens over experts: numbers of one step, for metrics.jsonl.

Per layer, with n_e the tokens routed to expert e (padding left out):

    load   = max_e n_e / mean_e n_e          1: all alike; E / k: k experts get everything
    unused = share of the experts with n_e = 0
    moved  = share of the pairs (token, expert) of router replay that the router itself would not have made

An expert without tokens no longer learns; a rising load means that the router collapses, and on a mesh whose axis
`expert` is above 1 it sets the time of the fullest device. Nothing here acts on the router.

Whether completions repeat themselves, from the sampled tokens.

    repeated(y)   = 1 - (distinct 4-grams of y) / (4-grams of y)      seq-rep-4 of Welleck et al. (arXiv 1908.04319)
    repetition    = mean over completions of repeated(y)
    repetitive    = share of completions whose last 512 tokens have repeated > 1/2: they end in a loop

Ordinary text has some of its 4-grams twice (the quickstart's chains of sums a tenth, and no completion a half); a loop
has nothing else within a few rounds. Only the end is checked, since loops are there: a completion in a loop continues
it until the budget cuts it.

4-grams are compared by a 64-bit hash, sorted: that two of a completion hash alike and differ has a chance below 1e-11.

How far the trained policy is from those that sampled the batch, from the log-probs of its loss tokens.

    d_t = logp_train_t - logp_gen_t,  rho_t = exp(d_t)                      of loss token t of completion i
    mismatch_p99                      99th percentile of |d_t| over all loss tokens, exact
    effective_sample_size_sequence    ESS of the N weights w_i = prod_t rho_t, which importance sampling of whole
                                      completions would give them
    effective_sample_size_geometric   ESS of the N weights w_i = exp(mean_t d_t), GSPO's ratio
    ESS(w) = (sum w)^2 / (N sum w^2)  Kish's, as a share of the N completions: from 1/N to 1, 1 if all weights are equal

The variance of log prod rho grows with the length, so the first ESS falls to a few completions even in a healthy run
with long reasoning; the second one has no such slope. Weights are compared as logarithms, less the largest one: a
product of ten thousand ratios fits no float.

All similar metrics are sums that come with the gradient (objective/losses.py). These are not sums: a percentile needs
the tokens, a completion's product its whole row. The log-probs are on the host in any case, since servers are judged by
them before the update is applied; so the device computes nothing more, and the packing of the batch has no effect.
"""

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.contract.codec import Completion, TeacherScores
from scalerl_jax.environments.base import Row, Score
from scalerl_jax.learner.packing import Segment
from scalerl_jax.objective import advantages, token_weights, turn_advantages
from scalerl_jax.objective.losses import MAXIMUM_LOG_RATIO


class Group(Protocol):
    """The completions of one prompt, with their scores."""

    @property
    def row(self) -> Row: ...

    @property
    def completions(self) -> Sequence[Completion]: ...

    @property
    def scores(self) -> Sequence[Score]: ...

    @property
    def teachers(self) -> Sequence[Sequence[TeacherScores]] | None:
        """For each completion, the scores of its branches, each over the branch's prompt and tokens. None: no
        teacher."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """One update's input, and its metrics."""

    segments: list[Segment]  # empty: no prompt survives, the optimizer does not step
    origins: list[tuple[int, int, int]]  # of each segment: indices of (group, completion, branch) in the batch
    outcomes: list[tuple[int, int, int]]  # (prompt index, correct, completions) for the curriculum
    metrics: dict[str, float]
    lags: Counter  # staleness -> loss tokens, of every sampled token, trained on or not
    rewards: np.ndarray  # [prompts, group] float64
    prompt_tokens: int  # of the segments, prompts and forced tokens included: all tokens that the trainer computes


def build(
    groups: Sequence[Group], objective: ObjectiveConfig, *, number: int, end_of_thinking: Sequence[int] = ()
) -> Batch:
    """Batch `number` from its groups, all of one size.

    end_of_thinking: the token ids of the end of thinking; the share of completions without them is measured.
    """
    completions = [list(group.completions) for group in groups]
    truncated = np.array([[c.finish_reason == "length" for c in row] for row in completions])
    correct = np.array([[score.correct for score in group.scores] for group in groups], bool) & ~truncated
    counted = np.ones_like(correct) if objective.truncated == "penalize" else ~truncated
    counted &= ~np.array([[score.excluded for score in group.scores] for group in groups], bool)
    rewards = np.where(truncated, -1.0, [[score.reward for score in group.scores] for group in groups])
    sampled = [[[branch.sampled() for branch in c.branches] for c in row] for row in completions]
    loss_tokens = np.array([[sum(int(mask.sum()) for mask in masks) for masks in row] for row in sampled])

    advantage, survives = advantages(
        rewards, correct, counted, normalization=objective.advantage_normalization,
        filter_zero_variance=objective.filter_zero_variance,
    )  # fmt: skip
    by_turn = None
    if objective.credit == "turn":
        turns = [[_turn_numbers(completion) for completion in row] for row in completions]
        returns, has = _returns(groups, turns, rewards, truncated)
        normalization = objective.advantage_normalization
        by_turn = turn_advantages(returns, has & counted[:, :, None], survives, normalization=normalization)
    taught = np.array([objective.distill != "none" and group.teachers is not None for group in groups])
    survives = (survives & (objective.reward_weight > 0)) | (taught & counted.any(axis=1))
    weight = token_weights(loss_tokens, counted, survives, objective.aggregation)

    segments, origins, divergences = [], [], []
    lags: Counter = Counter()
    for p, group in enumerate(groups):
        every = ((i, b, branch) for i, c in enumerate(completions[p]) for b, branch in enumerate(c.branches))
        for i, b, branch in every:
            prompt, mask = prompt_of(branch, group.row), sampled[p][i][b]
            lag, count = np.unique(number - branch.token_steps()[mask], return_counts=True)
            lags.update(dict(zip(lag.tolist(), count.tolist())))
            if weight[p, i] == 0 or not mask.any():
                continue
            blank = np.zeros(len(prompt), np.float32)
            worth = np.full(len(mask), advantage[p, i]) if by_turn is None else by_turn[p, i][turns[p][i][b]]
            worth = objective.reward_weight * worth
            teacher = None
            if taught[p] and group.teachers is not None:
                teacher = group.teachers[i][b]
                difference = branch.logprobs - teacher.logprobs[len(prompt) :]
                difference = np.clip(difference, -MAXIMUM_LOG_RATIO, MAXIMUM_LOG_RATIO).astype(np.float64)
                divergences.append(difference[mask])
                if objective.distill == "sampled":
                    worth = worth - objective.distill_weight * difference
                    teacher = None  # the advantage has all of it
            origins.append((p, i, b))
            segments.append(
                Segment(
                    tokens=np.concatenate([prompt, branch.token_ids]),
                    weights=np.concatenate([blank, mask.astype(np.float32) * np.float32(weight[p, i])]),
                    advantages=np.concatenate([blank, worth.astype(np.float32)]),
                    generator_logprobs=np.concatenate([blank, branch.logprobs]),
                    experts=branch.experts,
                    teacher=teacher,
                )
            )

    lengths = loss_tokens.ravel()
    interrupted = np.mean([[c.interrupted for c in row] for row in completions])
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
        **repetition_metrics([c.sampled_ids() for row in completions for c in row]),
        "lag_mean": float(sum(lag * count for lag, count in lags.items()) / max(1, lags.total())),
        "lag_max": float(max(lags, default=0)),
        "loss_tokens": float(sum(int((s.weights > 0).sum()) for s in segments)),
    }
    if end_of_thinking:
        # Sampled or forced: without it a completion has no answer.
        ended = [
            [any(_contains(branch.token_ids, end_of_thinking) for branch in c.branches) for c in row]
            for row in completions
        ]
        metrics["no_end_of_thinking"] = 1.0 - float(np.mean(ended))
    if divergences:
        metrics["teacher_kl"] = float(np.concatenate(divergences).mean())
    for name in sorted({name for group in groups for score in group.scores for name in score.metrics}):
        metric_values = [score.metrics[name] for group in groups for score in group.scores if name in score.metrics]
        metrics[f"score/{name}"] = float(np.mean(metric_values))
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


def _turn_numbers(completion: Completion) -> list[np.ndarray]:
    """The turn in which each token of each branch was sampled: [tokens] int. All of an agent's run are one turn, since
    they need not follow each other."""
    found, before = [], 0
    for branch in completion.branches:
        starts = [start for start, _ in branch.replies] if completion.prompt is None else []
        found.append(before + np.searchsorted(starts, np.arange(len(branch.token_ids)), side="right"))
        before += 1 + len(starts) if completion.prompt is None else 0
    return found


def _returns(
    groups: Sequence[Group], turns: list[list[list[np.ndarray]]], rewards: np.ndarray, truncated: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The return of each turn, itself included, and whether there is such a turn: [prompts, group, turns].

    turns: `_turn_numbers` of each completion.
    """
    counts = np.array([[1 + max(n.max(initial=0) for n in branches) for branches in row] for row in turns])
    has = np.arange(counts.max()) < counts[:, :, None]
    returns = np.repeat(rewards[:, :, None], counts.max(), axis=2)
    for p, group in enumerate(groups):
        for i, score in enumerate(group.scores):
            if score.turns and not truncated[p, i]:
                before = np.cumsum([0.0, *score.turns[:-1]])
                returns[p, i, : len(before)] -= before
    return returns, has


def prompt_of(branch: Completion, row: Row) -> np.ndarray:
    """The tokens of a branch's prompt, [tokens] int32."""
    return np.asarray(row.token_ids if branch.prompt is None else branch.prompt, np.int32)


def _contains(tokens: np.ndarray, wanted: Sequence[int]) -> bool:
    """Whether `wanted` occurs contiguously in tokens [t]."""
    if len(tokens) < len(wanted):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
    return bool((windows == np.asarray(wanted)).all(axis=1).any())


def per_token(sums: dict[str, Any]) -> dict[str, Any]:
    """The trainer's sums as means over loss tokens, under the names of the metrics.

    d = logp_train - logp_gen, rho = exp(d): mismatch is the mean of |d|, ratio that of rho, and kl (the mismatch KL)
    that of rho - 1 - d, the k3 estimator of KL(generators || trainer): never negative, of small variance, and unbiased,
    since the generators sampled the tokens.
    """
    tokens = max(1.0, sums["tokens"])
    return {
        **{name: sums[name] for name in ("loss", "gradient_norm", "micro_batches", "row_use")},
        **(expert_load(sums["expert_tokens"], sums.get("moved_pairs")) if "expert_tokens" in sums else {}),
        **{
            name: sums[name] / tokens
            for name in ("entropy", "mismatch", "other_bits", "kl", "ratio", "clipped", "masked")
        },
        "mismatch_max": sums["max_mismatch"],
        "ratio_max": sums["max_ratio"],
        "effective_sample_size": effective_size(sums["ratio"], sums["ratio_squared"], tokens),
        **({"reference_kl": sums["reference_kl"] / tokens} if "reference_kl" in sums else {}),
        **{
            name: sums[name] / max(1.0, sums["compared"])
            for name in ("teacher_divergence", "teacher_tail")
            if name in sums
        },
    }


_MOST_LISTED = 4096  # counts in a row of metrics.jsonl; of larger models only each layer's load is listed


def expert_load(tokens: np.ndarray, moved: np.ndarray | None = None) -> dict[str, Any]:
    """The metrics of expert load: numbers, and lists by layer.

    tokens: [layers, experts], of one step. moved: [layers] pairs, or None without router replay.
    """
    mean = np.maximum(tokens.mean(axis=1), 1e-9)
    load = tokens.max(axis=1) / mean
    out: dict[str, Any] = {
        "expert_load": float(load.mean()),
        "expert_load_max": float(load.max()),
        "experts_unused": float((tokens == 0).mean()),
        "expert_load_by_layer": [round(float(value), 4) for value in load],
    }
    if moved is not None:
        out["experts_moved"] = float(moved.sum() / max(1.0, tokens.sum()))
    if tokens.size <= _MOST_LISTED:
        out["expert_tokens"] = tokens.astype(np.int64).tolist()
    return out


NGRAM = 4
TAIL = 512  # tokens
LIMIT = 0.5
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits well mixed


def repetition_metrics(completions: Sequence[np.ndarray]) -> dict[str, float]:
    """completions: the sampled tokens of each, [tokens] int32."""
    whole = [repeated(tokens) for tokens in completions]
    ends = [repeated(tokens[-TAIL:]) if len(tokens) > TAIL else share for tokens, share in zip(completions, whole)]
    return {"repetition": float(np.mean(whole)), "repetitive": float(np.mean(np.array(ends) > LIMIT))}


def repeated(tokens: np.ndarray) -> float:
    """Share of the 4-grams that have occurred before; 0 without any."""
    count = len(tokens) - NGRAM + 1
    if count < 1:
        return 0.0
    wide = tokens.astype(np.uint64)
    hashes = np.zeros(count, np.uint64)
    for place in range(NGRAM):
        hashes = (hashes + wide[place : place + count]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(32)
    hashes.sort()
    return float(np.count_nonzero(hashes[1:] == hashes[:-1]) / count)


def off_policy_metrics(
    segments: Sequence[Segment], logprobs: Sequence[np.ndarray], origins: Sequence[tuple[int, int, int]]
) -> dict[str, float]:
    """Off-policy metrics of the completions that are trained on; {} without any.

    Args:
        logprobs: the trainer's, of each segment's tokens: [t] float32; entries beyond the segments are ignored.
        origins: of each segment, as in Batch: the branches of a completion have one weight together.
    """
    differences = [
        (ours - segment.generator_logprobs)[segment.weights > 0]  # [loss tokens] float32
        for segment, ours in zip(segments, logprobs, strict=False)
    ]
    assert len(differences) == len(segments) and all(map(len, differences)), "a segment has a loss token"
    if not differences:
        return {}
    # As in the losses: a token that one side finds impossible is one bad token, and must not overflow the rest.
    clipped = [np.clip(part, -MAXIMUM_LOG_RATIO, MAXIMUM_LOG_RATIO) for part in differences]
    _, owners = np.unique([origin[:2] for origin in origins], axis=0, return_inverse=True)
    totals = np.bincount(owners, weights=[part.sum(dtype=np.float64) for part in clipped])
    tokens = np.bincount(owners, weights=[len(part) for part in clipped])
    return {
        "mismatch_p99": float(np.quantile(np.abs(np.concatenate(differences)), 0.99)),
        "effective_sample_size_sequence": effective_share(totals),
        "effective_sample_size_geometric": effective_share(totals / tokens),
    }


def effective_share(log_weights: np.ndarray) -> float:
    """Kish's effective sample size of weights given by their logarithms, [n] float64, as a share of their number."""
    weights = np.exp(log_weights - log_weights.max())
    return effective_size(float(weights.sum()), float((weights**2).sum()), len(weights))


def effective_size(total: float, squared: float, count: float) -> float:
    """Kish's effective sample size of `count` weights, by their sum and that of their squares, as a share of them."""
    return total**2 / max(1e-30, squared * count)


RATIO_CAP = 20.0  # on rho: bounds the effect of one token on a mean


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over sampled tokens of completions, with d = logp_train - logp_gen, rho = min(exp(d), RATIO_CAP). They add
    up."""

    tokens: int = 0
    difference: float = 0.0  # of |d|
    ratio: float = 0.0  # of rho
    squared: float = 0.0  # of rho^2

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    @property
    def mean_difference(self) -> float:
        return self.difference / max(1, self.tokens)

    @property
    def mean_ratio(self) -> float:
        return self.ratio / max(1, self.tokens)

    @property
    def effective(self) -> float:
        """Kish's effective sample size, as a share of the tokens."""
        return effective_size(self.ratio, self.squared, self.tokens)

    @property
    def errors(self) -> float:
        """How many standard errors the mean of rho is away from 1."""
        spread = self.squared - 2 * self.ratio + self.tokens  # sum of (rho - 1)^2
        return abs(self.ratio - self.tokens) / math.sqrt(spread) if spread > 0 else 0.0


def sums_of(completion: Completion, logprobs: np.ndarray, start: int = 0, end: int | None = None) -> Sums:
    """The sums over its tokens from `start` to `end`. logprobs: the trainer's, of all tokens: [tokens] float32."""
    sampled = completion.sampled()[start:end]
    difference = (np.asarray(logprobs, np.float64) - completion.logprobs)[start:end][sampled]
    ratio = np.exp(np.minimum(difference, math.log(RATIO_CAP)))
    return Sums(len(difference), float(np.abs(difference).sum()), float(ratio.sum()), float((ratio**2).sum()))

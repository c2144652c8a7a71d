"""The published formulas as plain float64 loops, token by token: what scalerl_jax.objective is compared with.

Nothing is shared with the package. A batch here is a list of prompts, a prompt a list of completions, a completion
the lists of its tokens' log-probs.
Sources: ScaleRL (arXiv 2510.13786) section 2, equations 2-4, 7, 8 and J_ScaleRL; GSPO (arXiv 2507.18071);
truncated importance sampling and IcePop as their authors give them; DPPO (arXiv 2602.04879), its binary variant;
CPPO (arXiv 2606.10968), binary too; MaxRL (arXiv 2602.02710).
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Completion:
    reward: float
    right: bool
    excluded: bool
    train: list[float]  # log-prob of each token by the trainer
    gen: list[float]  # by the generator
    sampled: list[bool]  # False: forced, no loss token


Batch = list[list[Completion]]


# ---- Which completions count, and their advantages -----------------------------------------------------------------


def counted(group: list[Completion], *, filtered: bool = True) -> list[int]:
    """Which completions of a prompt count; none where the prompt is dropped."""
    kept = [i for i, y in enumerate(group) if not y.excluded]
    right = sum(group[i].right for i in kept)
    return kept if not filtered or (len(kept) >= 2 and 0 < right < len(kept)) else []


def advantages(batch: Batch, normalization: str, *, filtered: bool = True) -> list[list[float]]:
    """Ahat of each completion; 0 where it does not count."""
    out = [[0.0] * len(group) for group in batch]
    squares, count = 0.0, 0
    for p, group in enumerate(batch):
        kept = counted(group, filtered=filtered)
        worth = [float(y.right) if normalization == "maxrl" else y.reward for y in group]
        mean = sum(worth[i] for i in kept) / max(1, len(kept))
        for i in kept:
            out[p][i] = worth[i] - mean
            squares, count = squares + out[p][i] ** 2, count + 1
        if normalization == "prompt" and kept:
            deviation = math.sqrt(sum(out[p][i] ** 2 for i in kept) / len(kept))
            out[p] = [a / (deviation + 1e-6) for a in out[p]]
        if normalization == "maxrl" and mean > 0:
            out[p] = [a / mean for a in out[p]]
    if normalization == "batch" and squares > 0:
        out = [[a / math.sqrt(squares / count) for a in group] for group in out]
    return out


# ---- The losses ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Term:
    """One loss token's part of the objective."""

    value: float
    own: float  # its derivative by the token's own log-prob
    clipped: bool
    masked: bool


def terms(train: list[float], gen: list[float], advantage: list[float], options) -> list[Term]:
    """The loss tokens of one completion."""
    sequence = math.exp(sum(x - y for x, y in zip(train, gen, strict=True)) / max(1, len(train)))
    columns = zip(train, gen, advantage, allowances(train, gen, options), strict=True)
    return [_term(x, y, a, sequence, allowed, options) for x, y, a, allowed in columns]


def allowances(train: list[float], gen: list[float], options) -> list[bool]:
    """CPPO: whether each token's Z_t is within c_t, what its advantage says left out."""
    out, length = [], len(train)
    if options.cppo_threshold == 0:
        return [True] * length
    moved = [abs(math.exp(x) - math.exp(y)) for x, y in zip(train, gen, strict=True)]
    b = options.cppo_budget
    if options.cppo_budget_by_completion and moved:
        b = min(max(float(np.quantile(moved, 0.9)), b), 2 * b)
    weights, used = 0.0, 0.0  # W_{t-1}, S_{t-1}
    for t in range(1, length + 1):
        w = 1 - (1 - options.cppo_least_weight) * (t - 1) / max(length - 1, 1)
        z = w * moved[t - 1]
        out.append(z <= min(options.cppo_threshold, options.cppo_threshold + b * weights - used))
        weights, used = weights + w, used + z
    return out


def _term(train: float, gen: float, a: float, sequence: float, allowed: bool, options) -> Term:
    rho = math.exp(train - gen)
    # Truncated importance sampling: E_gen[min(pi / pi_gen, C) A grad log pi], so C bounds the one ratio there is.
    most = options.tis_cap or math.inf
    low, high = 1 - options.clip_low, 1 + options.clip_high
    own = 0.0
    if options.loss == "cispo":
        # Under stop-gradient: only log pi is differentiated.
        own = min(max(rho, options.min_ratio), options.max_ratio) * a
        value, clipped = own * train, not options.min_ratio <= rho <= options.max_ratio
    elif options.loss in ("clip", "gspo"):
        ratio = min(rho if options.loss == "clip" else sequence, most)
        value = min(ratio * a, min(max(ratio, low), high) * a)
        clipped = (a > 0 and ratio > high) or (a < 0 and ratio < low)
        # d ratio / d log pi = ratio, also of a capped one, and of GSPO-token's sg(s) pi / sg(pi).
        own = 0.0 if clipped else ratio * a
    elif options.loss == "reinforce":
        own = (min(rho, most) if options.tis_cap else 1.0) * a
        value, clipped = own * train, rho > most
    elif options.loss == "dro":
        value, own = a * train - options.dro_beta / 2 * (train - gen) ** 2, a - options.dro_beta * (train - gen)
        clipped = False
    else:
        value, own, clipped = train, 1.0, False
    masked = options.icepop_high > 0 and not options.icepop_low <= rho <= options.icepop_high
    if options.dppo_tv_threshold > 0 and abs(math.exp(train) - math.exp(gen)) > options.dppo_tv_threshold:
        masked = masked or (a > 0 and rho > 1) or (a < 0 and rho < 1)
    masked = masked or (not allowed and a * (rho - 1) > 0)
    return Term(0.0, 0.0, clipped, True) if masked else Term(value, own, clipped, False)


# ---- The loss ------------------------------------------------------------------------------------------------------


def rows_loss(rows: dict[str, np.ndarray], options) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, d loss / d logp_train and the sums, of packed rows [rows, length] as policy_loss takes them."""
    rows = {name: np.asarray(value, np.float64) for name, value in rows.items()}
    train, gen, weights = rows["logp_train"], rows["logp_gen"], rows["weights"]
    loss, gradient = 0.0, np.zeros_like(train)
    sums = dict.fromkeys(
        "tokens nll mismatch other_bits ratio ratio_squared kl clipped masked max_mismatch max_ratio".split(), 0
    )
    for r, ids in enumerate(rows["segment_ids"]):
        for segment in set(ids.tolist()) - {0}:
            at = [t for t in range(len(ids)) if ids[t] == segment and weights[r, t] > 0]
            columns = (rows[name][r, at].tolist() for name in ("logp_train", "logp_gen", "advantages"))
            for t, term in zip(at, terms(*columns, options), strict=True):
                w = weights[r, t]
                loss -= w * term.value
                gradient[r, t] -= w * term.own
                if "reference" in rows:
                    away = rows["reference"][r, t] - train[r, t]
                    loss += options.reference_kl * w * (math.exp(away) - 1 - away)
                    gradient[r, t] -= options.reference_kl * w * (math.exp(away) - 1)
                    sums["reference_kl"] = sums.get("reference_kl", 0) + math.exp(away) - 1 - away
                if "entropy" in rows:
                    loss -= options.entropy_bonus * w * rows["entropy"][r, t]
                difference = train[r, t] - gen[r, t]
                rho = math.exp(difference)
                sums["tokens"] += 1
                sums["nll"] -= train[r, t]
                sums["mismatch"] += abs(difference)
                sums["other_bits"] += difference != 0
                sums["ratio"] += rho
                sums["ratio_squared"] += rho**2
                sums["kl"] += rho - 1 - difference
                sums["clipped"] += term.clipped
                sums["masked"] += term.masked
                sums["max_mismatch"] = max(sums["max_mismatch"], abs(difference))
                sums["max_ratio"] = max(sums["max_ratio"], rho)
    return loss, gradient, sums


def batch_loss(
    batch: Batch, options, *, aggregation: str, normalization: str, filtered: bool = True
) -> tuple[float, list[list[list[float]]]]:
    """- J and d(- J) / d log pi of every token, as the paper writes it: averages inside averages, no weights."""
    ahat = advantages(batch, normalization, filtered=filtered)
    gradient = [[[0.0] * len(y.train) for y in group] for group in batch]
    kept = [counted(group, filtered=filtered) for group in batch]
    survivors = [p for p in range(len(batch)) if kept[p]]
    length = [[sum(y.sampled) for y in group] for group in batch]
    everything = sum(length[p][i] for p in survivors for i in kept[p])
    loss = 0.0
    for p in survivors:
        tokens_of_prompt = sum(length[p][i] for i in kept[p])
        for i in kept[p]:
            y = batch[p][i]
            share = {
                "prompt": lambda p=p, t=tokens_of_prompt: len(survivors) * t,
                "sample": lambda p=p, i=i: len(survivors) * len(kept[p]) * length[p][i],
                "token": lambda: everything,
            }[aggregation]()
            at = [t for t in range(len(y.train)) if y.sampled[t]]
            train, gen = [y.train[t] for t in at], [y.gen[t] for t in at]
            for t, term in zip(at, terms(train, gen, [ahat[p][i]] * len(at), options), strict=True):
                loss -= term.value / share
                gradient[p][i][t] -= term.own / share
    return loss, gradient

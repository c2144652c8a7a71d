"""Metrics of an evaluation, and their table for people.

For P prompts with n completions each, c of them correct, k of them considered:

    mean@n        mean over prompts of c / n
    pass@k        mean over prompts of 1 - C(n - c, k) / C(n, k)           (Chen et al. 2021, unbiased)
    majority@k    mean over prompts of the probability that the answer named most often by k of them is correct; tied
                  answers are equally probable, and without any answer it is wrong
    95 %          Wilson's interval at the effective number of prompts p (1 - p) / (s^2 / P), s the standard deviation
                  over prompts, with Student's t for P - 1 degrees of freedom (Dean and Pagano 2015); if all prompts
                  have the same rate, each counts as one trial

The prompts are the sample, not the completions: an interval says what other prompts of the kind would give.
majority@1 and majority@n are exact; between them it is a mean over SUBSETS subsets, the same ones each time.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from scipy import stats

from scalerl_jax.rollouts.group_buffer import FinishedGroup

SUBSETS = 200  # of a prompt's completions
_LEVEL = 0.95
_SHOWN = 3  # values of k with a column of the table, the largest


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of `values`, one in [0, 1] for each prompt."""
    p, count = float(np.mean(values)), len(values)
    if count < 2:
        return 0.0, 1.0
    variance = float(np.var(values, ddof=1)) / count  # of the mean
    effective = min(p * (1 - p) / variance, 1e12) if variance > 0 else count
    t = float(stats.t.ppf((1 + _LEVEL) / 2, count - 1))
    middle = (p + t * t / (2 * effective)) / (1 + t * t / effective)
    half = t / (1 + t * t / effective) * math.sqrt(p * (1 - p) / effective + t * t / (4 * effective * effective))
    return max(0.0, middle - half), min(1.0, middle + half)


def pass_at(correct: int, samples: int, k: int) -> float:
    """pass@k of one prompt."""
    if samples - correct < k:
        return 1.0
    return -math.expm1(float(np.log1p(-k / np.arange(samples - correct + 1, samples + 1)).sum()))


def majority_at(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """majority@k of one prompt. An answer is correct if a completion that gives it is."""
    names = sorted({answer for answer in answers if answer is not None})
    if not names:
        return 0.0
    right = {answer for answer, is_right in zip(answers, correct) if is_right}
    code = {name: i for i, name in enumerate(names)}
    # Completions without an answer get a code after those of all names; its votes do not count.
    codes = np.asarray([len(names) if answer is None else code[answer] for answer in answers])
    subsets = _subsets(len(answers), k)
    which = codes[subsets] + (len(names) + 1) * np.arange(len(subsets))[:, None]
    votes = np.bincount(which.ravel(), minlength=len(subsets) * (len(names) + 1)).reshape(len(subsets), -1)[:, :-1]
    best = (votes == votes.max(1, keepdims=True)) & (votes > 0)  # [subsets, names]
    among_best = (best & [name in right for name in names]).sum(1)
    return float(np.mean(among_best / np.maximum(best.sum(1), 1)))


@functools.lru_cache(maxsize=16)
def _subsets(n: int, k: int) -> np.ndarray:
    """[subsets, k]: the indices of k of n completions."""
    if k >= n:
        return np.arange(n)[None]
    if k == 1:
        return np.arange(n)[:, None]
    rng = np.random.default_rng(k)
    return np.stack([rng.permutation(n)[:k] for _ in range(SUBSETS)])


def subset_sizes(samples: int) -> list[int]:
    """The k of pass@k and majority@k: the powers of two, and the number of samples."""
    return sorted({*(2**i for i in range(samples.bit_length()) if 2**i <= samples), samples})


@dataclasses.dataclass(frozen=True)
class Sample:
    """The values of a completion that the metrics need."""

    correct: bool
    reward: float
    voted: str | None  # the answer found in it; None: no vote
    tokens: int  # sampled
    truncated: bool
    interrupted: bool
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Prompt:
    environment: str
    task: str
    samples: tuple[Sample, ...]  # by number


def of_groups(groups: Sequence[FinishedGroup]) -> list[Prompt]:
    return [
        Prompt(
            group.row.environment,
            group.row.task,
            tuple(
                Sample(
                    correct=score.correct,
                    reward=score.reward,
                    voted=score.answer,
                    tokens=len(completion.sampled_ids()),
                    truncated=completion.finish_reason == "length",
                    interrupted=completion.interrupted,
                    metrics=score.metrics,
                )
                for score, completion in zip(group.scores, group.completions, strict=True)
            ),
        )
        for group in groups
    ]


def evaluation_row(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The numbers of an evaluation, of all prompts and of each part of a mixture."""
    tasks = {
        name: {"prompts": len(part), "pass_rate": _pass_rate(part)} for name, part in by_part(prompts, "task").items()
    }
    environments = {name: numbers(part) for name, part in by_part(prompts, "environment").items()}
    return {**numbers(prompts), "tasks": tasks, "environments": environments}


def _pass_rate(prompts: Sequence[Prompt]) -> float:
    return float(np.mean([np.mean([sample.correct for sample in prompt.samples]) for prompt in prompts]))


def numbers(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The metrics of prompts with the same number of samples. Lengths are in sampled tokens; shares are of completions.

    majority_at is empty if none of the completions names an answer to vote for.
    """
    count = len(prompts[0].samples)
    correct = [[sample.correct for sample in prompt.samples] for prompt in prompts]
    answers = [[sample.voted for sample in prompt.samples] for prompt in prompts]
    rates = [sum(row) / count for row in correct]
    samples = [sample for prompt in prompts for sample in prompt.samples]
    low, high = interval(rates)
    out: dict[str, Any] = {
        "prompts": len(prompts),
        "samples": count,
        "pass_rate": float(np.mean(rates)),
        "pass_rate_low": low,
        "pass_rate_high": high,
        "passes": [sum(row) for row in correct],
        "pass_at": {},
        "majority_at": {},
        "reward": float(np.mean([sample.reward for sample in samples])),
        "truncated": float(np.mean([sample.truncated for sample in samples])),
        "interrupted": float(np.mean([sample.interrupted for sample in samples])),
        "length_mean": float(np.mean([sample.tokens for sample in samples])),
        "length_max": max(sample.tokens for sample in samples),
    }
    votes = any(answer is not None for row in answers for answer in row)
    for k in subset_sizes(count):
        values = [pass_at(sum(row), count, k) for row in correct]
        out["pass_at"][str(k)] = [float(np.mean(values)), *interval(values)]
        if votes:
            values = [majority_at(*row, k) for row in zip(answers, correct)]
            out["majority_at"][str(k)] = [float(np.mean(values)), *interval(values)]
    for name in sorted({name for sample in samples for name in sample.metrics}):
        metric_values = [sample.metrics[name] for sample in samples if name in sample.metrics]
        out[f"score/{name}"] = float(np.mean(metric_values))
    return out


def by_part(prompts: Sequence[Prompt], part: str) -> dict[str, list[Prompt]]:
    """The prompts of each environment, or of each task ("environment" | "task"), by name; {} if there is only one.

    Those without a name are "(none)".
    """
    parts: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        parts.setdefault(getattr(prompt, part) or "(none)", []).append(prompt)
    return {name: parts[name] for name in sorted(parts)} if len(parts) > 1 else {}


def evaluation_table(rows: Sequence[Mapping[str, Any]], name: str) -> Table:
    """Per policy a line for each environment and one for all of them.

    rows: of evals.jsonl, by step; the first column names the step if there are several.
    """
    table = Table(title=f"{name}: held-out prompts; in brackets 95 % intervals over prompts", title_justify="left")
    samples = rows[-1]["samples"]
    ks = [k for k in rows[-1]["pass_at"] if int(k) > 1][-_SHOWN:]
    votes = [k for k in ks if any(k in part["majority_at"] for row in rows for part in _parts(row).values())][-1:]
    several = len(rows) > 1
    headings = [*(["step"] if several else []), "environment", "prompts", f"mean@{samples}"]
    headings += [*(f"pass@{k}" for k in ks), *(f"majority@{k}" for k in votes)]
    headings += ["cut", "interrupted", "tokens", "longest"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "environment" else "right")
    for row in rows:
        for part, found in _parts(row).items():
            mean = [found["pass_rate"], found["pass_rate_low"], found["pass_rate_high"]]
            table.add_row(
                *([str(row["step"])] if several else []),
                part,
                str(found["prompts"]),
                _with_interval(mean),
                *(_with_interval(found["pass_at"][k]) for k in ks),
                *(_with_interval(found["majority_at"].get(k)) for k in votes),
                f"{found['truncated']:.1%}",
                f"{found['interrupted']:.1%}",
                f"{found['length_mean']:,.0f}",
                f"{found['length_max']:,}",
            )
        table.add_section()
    return table


def _parts(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {**row["environments"], "all": row}


def _with_interval(value: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    mean, low, high = value
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]".replace("[", "\\[", 1)

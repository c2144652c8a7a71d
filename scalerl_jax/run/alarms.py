"""What is wrong with a run's learning, decided from its rows of metrics.jsonl: the words of its console and its page.

    no gradient    5 updates on end in which no prompt had both right and wrong completions, and why
    truncated      5 % and 10 %: the paper's unstable runs were past the second, its sound ones below the first
    mismatch       what the log-prob comparison at meeting allows the worst percent of tokens
    clipped        1 % of the tokens: CISPO's cap is for outliers
    entropy        a tenth of the first one: what is left to explore is nearly gone
    surviving      a quarter of the prompts: the update stands on few groups
    staleness      k of the pacing: a bound that nothing may cross

The limits of truncation are the paper's and that of staleness is the pacing's; the others are this project's choice.
Pure: nothing is read or written here. Limits are held against the mean of the last 10 updates.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]

WITHOUT_GRADIENT = 5  # updates on end without a gradient, from which on a run is said to learn nothing
RECENT = 10  # updates whose mean is held against a limit
# As rollouts/parity/handshake.py has them for config.parity.p99_limit = 0; that one brings gRPC, which a report
# does without.
_P99_LIMITS = {"float32": 1e-2, "bfloat16": 2e-1}
_TRUNCATED = (0.05, 0.10)
_CLIPPED = 0.01
_ENTROPY_LEFT = 0.1
_SURVIVING_LEFT = 0.25
_MOST = 0.5  # a cause that holds for this share of the completions is named as the cause
_NEARLY_ALL = 0.95

_ADVICE = {
    "truncated": "raise config.rollout.answer_budget (and thinking_budget_max), or see that the policy writes its stop "
    "token",
    "clipped": "the policy is far from the one that sampled: lower the learning rate or "
    "config.pacing.max_off_policy_steps",
    "mismatch": "generator and trainer compute different log-probs: compare their dtypes and head_precision",
    "entropy": "the policy has nearly stopped exploring: lower the learning rate, or stop the run here",
    "surviving": "most prompts are too easy or too hard: other prompts, or more completions of each "
    "(config.rollout.group_size)",
}


@dataclasses.dataclass(frozen=True)
class Limit:
    """Of one column's mean: where it is, why, and on which side trouble is."""

    value: float
    label: str
    trouble: str = "above"  # or "below"
    bound: bool = False  # nothing can cross it; it is shown, and raises no alarm

    def passed_by(self, value: float | None) -> bool:
        if value is None or self.bound:
            return False
        return value > self.value if self.trouble == "above" else value < self.value


@dataclasses.dataclass(frozen=True)
class Alarm:
    chart: str  # key of the page's chart that shows it
    says: str  # what is wrong, with its figures
    advice: str  # what to do

    def __str__(self) -> str:
        return f"{self.says}. What to do: {self.advice}."


def limits(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, list[Limit]]:
    """The limits of each chart, the gravest last. settings: the config's leaves by their dotted names."""
    found: dict[str, list[Limit]] = {
        "lag": [
            Limit(settings["pacing.max_off_policy_steps"], f"k = {settings['pacing.max_off_policy_steps']}", bound=True)
        ],
        "truncated": [Limit(share, f"{share:.0%}") for share in _TRUNCATED],
        "clipped": [Limit(_CLIPPED, f"{_CLIPPED:.0%}")],
    }
    limit = settings["parity.p99_limit"] or _P99_LIMITS[settings["model.compute_dtype"]]
    found["mismatch"] = [Limit(limit, f"{limit:g}: the limit when servers join")]
    entropy = [row["entropy"] for row in rows if row.get("entropy") is not None]
    if entropy:
        found["entropy"] = [Limit(_ENTROPY_LEFT * entropy[0], "a tenth of the first", "below")]
    prompts = [row["prompts"] for row in rows if row.get("prompts")]
    if prompts:
        found["surviving"] = [Limit(_SURVIVING_LEFT * prompts[-1], "a quarter", "below")]
    return found


_COLUMNS = {
    "truncated": ("truncated", "{:.0%} of the completions are cut by the token budget"),
    "clipped": ("clipped", "{:.1%} of the tokens are at the cap of the importance ratio"),
    "mismatch": ("mismatch", "the trainer's log-probs differ from the generators' by {:.2g} on average"),
    "entropy": ("entropy", "the entropy is down to {:.2g} nats"),
    "surviving": ("prompts_surviving", "only {:.1f} prompts of a batch have both right and wrong completions"),
}


def alarms(rows: Sequence[Row], settings: Mapping[str, Any]) -> list[Alarm]:
    """Everything that is wrong at the end of these rows, the gravest first; [] where nothing is."""
    drawn = limits(rows, settings)
    found = []
    nothing = no_gradient(rows[without_gradient(rows) :], settings)
    if nothing is not None:
        found.append(nothing)
    for key, (column, words) in _COLUMNS.items():
        if nothing is not None and key in ("surviving", "truncated"):  # it has been said, with more about it
            continue
        latest = recent_mean(rows, column)
        passed = [limit for limit in drawn.get(key, []) if limit.passed_by(latest)]
        if passed and latest is not None:
            says = f"{words.format(latest)} (mean of the last {RECENT} updates; the limit is {passed[-1].label})"
            found.append(Alarm(key, says, _ADVICE[key]))
    return found


def recent_mean(rows: Sequence[Row], column: str) -> float | None:
    """Over those of the last RECENT rows that have it; None without any."""
    values = [row[column] for row in rows[-RECENT:] if row.get(column) is not None]
    return float(np.mean(values)) if values else None


def has_gradient(row: Row) -> bool:
    """Whether the update of this row moved the policy. A row that does not tell counts as one that did."""
    return row.get("prompts_surviving", 1) > 0 and row.get("gradient_norm", 1) != 0


def without_gradient(rows: Sequence[Row]) -> int:
    """Where the rows without gradient at the end begin; len(rows) where the last one has one."""
    start = len(rows)
    while start > 0 and not has_gradient(rows[start - 1]):
        start -= 1
    return start


def no_gradient(rows: Sequence[Row], settings: Mapping[str, Any]) -> Alarm | None:
    """Of rows on end that all lack a gradient: that nothing is learned, and why; None where they are too few."""
    if len(rows) < WITHOUT_GRADIENT:
        return None
    right, cut, unended = (
        float(np.mean([row.get(name) or 0.0 for row in rows]))
        for name in ("pass_rate", "truncated", "no_end_of_thinking")
    )
    wrong = max(0.0, 1.0 - right - cut)
    marker = settings.get("rollout.end_of_thinking", "</think>")
    shares = [f"{right:.0%} of the completions right, {wrong:.0%} wrong, {cut:.0%} truncated"]
    if unended > 0:
        shares.append(f"{unended:.0%} without the end of thinking ({marker!r})")
    if right >= _NEARLY_ALL:
        why, advice = "all completions are right", "the problems are solved: harder ones, or end the run here"
    elif unended >= _MOST and unended >= cut:
        why = f"no end of thinking in {unended:.0%} of the completions, so they have no answer"
        advice = (
            f"the policy has to write {marker!r} before its answer: warm-start it on traces that do (scalerl-sft), or "
            "set config.rollout.thinking_budget_min and thinking_budget_max to 0 for a policy without thinking"
        )
    elif cut >= _MOST:
        why, advice = f"{cut:.0%} of the completions are truncated", _ADVICE["truncated"]
    elif wrong + cut >= _NEARLY_ALL:
        why = "all completions are wrong"
        advice = (
            "read some of them (rollouts/ in the run folder, or its report.html): either the problems are too hard "
            "for this policy, or right answers are not recognised"
        )
    else:
        why = "of every prompt the completions are all right or all wrong"
        advice = _ADVICE["surviving"]
    first, last = rows[0].get("step"), rows[-1].get("step")
    says = f"nothing is learned, {why}: {len(rows)} updates without a gradient ({first} to {last}; {', '.join(shares)})"
    return Alarm("surviving", says, advice)


class LearningWatch:
    """Follows the rows of a run as they are made; says once when it stops learning, and once when it goes on."""

    def __init__(self, settings: Mapping[str, Any]):
        self._settings = settings
        self._rows: list[Row] = []  # on end without gradient
        self._said = False

    def row(self, row: Row) -> str:
        """The next row. What is to be said of it: a line, or ""."""
        if has_gradient(row):
            count, said, self._rows, self._said = len(self._rows), self._said, [], False
            return f"update {row.get('step')}: learning again, after {count} updates without a gradient" if said else ""
        # Of each row what an alarm needs: an episode may last for the rest of a long run.
        names = ("step", "pass_rate", "truncated", "no_end_of_thinking")
        self._rows.append({name: row[name] for name in names if name in row})
        if self._said or (alarm := no_gradient(self._rows, self._settings)) is None:
            return ""
        self._said = True
        return f"update {row.get('step')}: {alarm}"

"""Alarms about a run's learning, decided from its rows of metrics.jsonl; the console and the page print their texts.

The signs, and when one is an alarm or a warning:

    no gradient    5 consecutive updates in which no prompt had both right and wrong completions, with the cause; an
                   alarm
    truncated      5 % a warning, 10 % an alarm: the paper's unstable runs were above the second, its stable ones below
                   the first
    interrupted    the same limits
    repetitive     the same limits: completions that end in a loop
    failed         the same limits: episodes whose environment failed
    mismatch       the mean of |log ratio|: the limit that a joining server must meet at the 99th percentile of tokens
    mismatch_p99   log 2: the worst percent of tokens has ratios beyond a factor of two
    kl             0.1 nats: reported where generator and trainer route experts differently; dense models stay a hundred
                   times below
    clipped        1 % of the tokens, with CISPO: its cap is for outliers; clipping by clip and gspo has no limit
    ratios         an effective sample size under 90 %, of tokens and of completions (length-normalized)
    entropy        a tenth of the first one: little exploration is left
    surviving      a quarter of the prompts: the update rests on few groups
    staleness      k of the pacing: a bound that cannot be crossed

The truncation limits are the paper's; interruption and repetition use the same ones; the staleness limit is the
pacing's; the others are this project's choice.
Pure: nothing is read or written here. Limits apply to the mean of the last 10 updates; fewer show no trend and raise
nothing.

LearningWatch has the console's lines, as rows are made:

    no gradient   once when it begins, once when it is over
    a limit       once when the mean of the last 10 updates has passed it, again when a warning becomes an alarm, once
                  when it has been within its limits for 10 consecutive updates; an alarm again every 50 updates

A resumed run logs at once what is past its limits: the rows before count, the lines logged about them do not.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

Row = Mapping[str, Any]

WITHOUT_GRADIENT = 5  # consecutive updates without a gradient that raise the alarm
RECENT = 10  # updates whose mean is compared with a limit
# As in rollouts/parity.py for config.parity.p99_limit = 0; that module imports gRPC, which a report does not
# need.
_P99_FLOAT32, _P99_BFLOAT16, _P99_EXPERTS = 1e-2, 2e-1, 6e-1
_WARNING, _ALARM = 0.05, 0.10  # of the completions
_CLIPPED = 0.01
_FACTOR = 2
_KL = 0.1
_EFFECTIVE = 0.9
_ENTROPY_LEFT = 0.1
_SURVIVING_LEFT = 0.25
_MOST = 0.5  # a cause that holds for this share of the completions is named as the cause
_NEARLY_ALL = 0.95
REMIND = 50  # updates


@dataclasses.dataclass(frozen=True)
class Sign:
    """One column of metrics.jsonl that has limits."""

    column: str
    name: str
    message: str  # text for a mean past a limit, with {value}, or {share} in percent
    advice: str  # what to do


SIGNS = {
    "truncated": Sign(
        "truncated", "truncation", "{share} of the completions are cut by the token budget",
        "raise config.rollout.answer_budget (and thinking_budget_max), or see that the policy writes its stop token; "
        "what has cut episodes is in score/ended of metrics.jsonl",
    ),
    "interrupted": Sign(
        "interrupted", "interruption", "{share} of the completions have their thinking cut short",
        "the policy thinks for longer than its budget: raise config.rollout.thinking_budget_min and "
        "thinking_budget_max, and see whether it goes in circles; nothing, where the budget is short on purpose and "
        "the pass rate rises",
    ),
    "repetitive": Sign(
        "repetitive", "repetition", "{share} of the completions end in a loop",
        "read some of them (rollouts/ in the run folder, or its report.html): loops that pay are a fault of the "
        "reward, others of a learning rate that is too high; a checkpoint from before they came is the way back",
    ),
    "failed": Sign(
        "score/ended/failed", "failed episodes", "{share} of the episodes failed, so nothing is learned of them",
        "their environment raised, crashed or took longer than config.environment.turn_seconds: the console has the "
        "first line of each kind; mend it, and the same command goes on",
    ),
    "mismatch": Sign(
        "mismatch", "log-prob mismatch",
        "the trainer's log-probs differ from the generators' by {value:.2g} on average",
        "from the first steps on, generator and trainer compute different log-probs: compare their dtypes and "
        "head_precision; later, the policy outruns its completions: lower the learning rate or "
        "config.pacing.max_off_policy_steps",
    ),
    "mismatch_p99": Sign(
        "mismatch_p99", "log-prob mismatch at p99", "one token in a hundred differs by more than {value:.2g} nats",
        "a few tokens are computed apart: sampling other than at temperature 1 and top-p 1, experts routed otherwise, "
        "or a head of lower precision on one side; else lower config.pacing.max_off_policy_steps",
    ),
    "kl": Sign(
        "kl", "mismatch KL", "generators and trainer are {value:.2g} nats apart (mismatch KL)",
        "mend the log-probs where they differ at staleness 0 too (dtypes, head_precision, experts); else the policy "
        "moves too fast: lower the learning rate or config.pacing.max_off_policy_steps",
    ),
    "clipped": Sign(
        "clipped", "clipping", "{share} of the tokens are at the cap of the importance ratio",
        "the policy is far from the one that sampled: lower the learning rate or config.pacing.max_off_policy_steps",
    ),
    "effective_sample_size": Sign(
        "effective_sample_size", "effective sample size of tokens", "the tokens of a batch count for {share} of their "
        "number (effective sample size)",
        "a few tokens outweigh the others: lower the learning rate or config.pacing.max_off_policy_steps, or mask what "
        "is far off (config.objective.icepop_low and icepop_high)",
    ),
    "effective_sample_size_geometric": Sign(
        "effective_sample_size_geometric", "effective sample size of completions",
        "the completions of a batch count for {share} of their number (effective sample size, length-normalized)",
        "whole completions are off-policy, and not single tokens: look at their staleness and at each server's "
        "mismatch (servers in metrics.jsonl); lower the learning rate or config.pacing.max_off_policy_steps",
    ),
    "entropy": Sign(
        "entropy", "entropy", "the entropy is down to {value:.2g} nats",
        "the policy has nearly stopped exploring: lower the learning rate, or stop the run here",
    ),
    "surviving": Sign(
        "prompts_surviving", "effective batch",
        "only {value:.1f} prompts of a batch have both right and wrong completions",
        "most prompts are too easy or too hard: other prompts, or more completions of each "
        "(config.rollout.group_size)",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit on one column's mean: its value, its label, and the side on which it counts as passed."""

    value: float
    label: str
    trouble: str = "above"  # or "below"
    bound: bool = False  # it cannot be crossed: it is drawn and raises no alarm
    loud: bool = False  # passing it raises an alarm, passing others a warning

    def passed_by(self, value: float | None) -> bool:
        if value is None or self.bound:
            return False
        return value > self.value if self.trouble == "above" else value < self.value


@dataclasses.dataclass(frozen=True)
class Alarm:
    chart: str  # key of the page's chart that shows it
    message: str  # what is wrong, with its figures
    advice: str  # what to do
    loud: bool = False  # else a warning

    def __str__(self) -> str:
        return f"{self.message}. What to do: {self.advice}."


def limits(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, list[Limit]]:
    """The limits of each chart, the most severe last. settings: the config's leaves by their dotted names."""
    shares = [Limit(_WARNING, f"{_WARNING:.0%}"), Limit(_ALARM, f"{_ALARM:.0%}", loud=True)]
    effective = [Limit(_EFFECTIVE, f"{_EFFECTIVE:.0%}", "below")]
    k, mismatch = settings["pacing.max_off_policy_steps"], settings["parity.p99_limit"]
    # The coarser of the two sides; where both are auto the run did not record its choice.
    dtypes = {settings[name] for name in ("model.compute_dtype", "fleet.compute_dtype", "model.head_precision")}
    rounded = "bfloat16" in dtypes or "float32" not in dtypes
    experts = any("expert_load" in row for row in rows)
    mismatch = mismatch or ((_P99_EXPERTS if experts else _P99_BFLOAT16) if rounded else _P99_FLOAT32)
    found: dict[str, list[Limit]] = {
        "lag": [Limit(k, f"k = {k}", bound=True)],
        **dict.fromkeys(("truncated", "interrupted", "repetitive", "failed"), shares),
        **dict.fromkeys(("effective_sample_size", "effective_sample_size_geometric"), effective),
        "mismatch": [Limit(mismatch, f"{mismatch:g}: the limit when servers join")],
        "mismatch_p99": [Limit(math.log(_FACTOR), f"a factor of {_FACTOR}")],
        "kl": [Limit(_KL, f"{_KL:g}")],
    }
    if settings["objective.loss"] == "cispo":
        found["clipped"] = [Limit(_CLIPPED, f"{_CLIPPED:.0%}")]
    entropy = [row["entropy"] for row in rows if row.get("entropy") is not None]
    if entropy and settings["objective.reward_weight"] > 0:  # a student may become as sure as its teacher
        found["entropy"] = [Limit(_ENTROPY_LEFT * entropy[0], "a tenth of the first", "below")]
    prompts = [row["prompts"] for row in rows if row.get("prompts")]
    if prompts:
        found["surviving"] = [Limit(_SURVIVING_LEFT * prompts[-1], "a quarter", "below")]
    return found


def alarms(rows: Sequence[Row], settings: Mapping[str, Any]) -> list[Alarm]:
    """All alarms at the end of these rows, the most severe first; [] if there are none."""
    nothing = no_gradient(rows[without_gradient(rows) :], settings)
    past = past_limits(rows, settings) if enough(rows) else []
    if nothing is None:
        return past
    return [nothing, *(alarm for alarm in past if alarm.chart not in COVERED_BY_NO_GRADIENT)]


def past_limits(rows: Sequence[Row], settings: Mapping[str, Any]) -> list[Alarm]:
    """The signs past a limit, alarms before warnings."""
    drawn = limits(rows, settings)
    found = []
    for key, sign in SIGNS.items():
        latest = recent_mean(rows, sign.column)
        passed = [limit for limit in drawn.get(key, []) if limit.passed_by(latest)]
        if passed and latest is not None:
            text = sign.message.format(value=latest, share=f"{100 * latest:.3g}%")
            what = f"{text} (mean of the last {RECENT} updates; the limit is {passed[-1].label})"
            found.append(Alarm(key, what, sign.advice, passed[-1].loud))
    return sorted(found, key=lambda alarm: not alarm.loud)


def enough(rows: Sized) -> bool:
    """Whether there are enough rows for their mean to be compared with a limit."""
    return len(rows) >= RECENT


def recent_mean(rows: Sequence[Row], column: str) -> float | None:
    """The column's mean over those of the last RECENT rows that have it; None if none has it."""
    values = [row[column] for row in rows[-RECENT:] if row.get(column) is not None]
    return float(np.mean(values)) if values else None


def has_gradient(row: Row) -> bool:
    """Whether the update of this row moved the policy. A row without these columns counts as one that did."""
    return row.get("prompts_surviving", 1) > 0 and row.get("gradient_norm", 1) != 0


def without_gradient(rows: Sequence[Row]) -> int:
    """The index where the trailing rows without gradient begin; len(rows) if the last row has a gradient."""
    start = len(rows)
    while start > 0 and not has_gradient(rows[start - 1]):
        start -= 1
    return start


COVERED_BY_NO_GRADIENT = ("surviving", "truncated", "failed")  # `no_gradient` reports these in more detail


def no_gradient(rows: Sequence[Row], settings: Mapping[str, Any]) -> Alarm | None:
    """The alarm that nothing is learned, and why, for consecutive rows without gradient; None if they are too few."""
    if len(rows) < WITHOUT_GRADIENT:
        return None
    right, cut, unended, failed = (
        float(np.mean([row.get(name) or 0.0 for row in rows]))
        for name in ("pass_rate", "truncated", "no_end_of_thinking", SIGNS["failed"].column)
    )
    wrong = max(0.0, 1.0 - right - cut)
    marker = settings.get("rollout.end_of_thinking", "</think>")
    shares = [f"{right:.0%} of the completions right, {wrong:.0%} wrong, {cut:.0%} truncated"]
    if unended > 0:
        shares.append(f"{unended:.0%} without the end of thinking ({marker!r})")
    if failed > 0:
        shares.append(f"{failed:.0%} of the episodes failed")
    if failed >= _MOST:
        why, advice = SIGNS["failed"].message.format(share=f"{failed:.0%}"), SIGNS["failed"].advice
    elif right >= _NEARLY_ALL:
        why, advice = "all completions are right", "the problems are solved: harder ones, or end the run here"
    elif unended >= _MOST and unended >= cut:
        why = f"no end of thinking in {unended:.0%} of the completions, so they have no answer"
        advice = (
            f"the policy has to write {marker!r} before its answer: warm-start it on traces that do (scalerl-sft), or "
            "set config.rollout.thinking_budget_min and thinking_budget_max to 0 for a policy without thinking"
        )
    elif cut >= _MOST:
        why, advice = f"{cut:.0%} of the completions are truncated", SIGNS["truncated"].advice
    elif wrong + cut >= _NEARLY_ALL:
        why = "all completions are wrong"
        advice = (
            "read some of them (rollouts/ in the run folder, or its report.html): either the problems are too hard "
            "for this policy, or right answers are not recognised"
        )
    else:
        why = "of every prompt the completions are all right or all wrong"
        advice = SIGNS["surviving"].advice
    first, last = rows[0].get("step"), rows[-1].get("step")
    message = (
        f"nothing is learned, {why}: {len(rows)} updates without a gradient ({first} to {last}; {', '.join(shares)})"
    )
    return Alarm("surviving", message, advice, loud=True)


# The columns that the signs need, kept of each row: an episode may last for the rest of a long run.
_NAMES = ("step", "pass_rate", "no_end_of_thinking", "prompts", *(sign.column for sign in SIGNS.values()))


@dataclasses.dataclass
class _Excursion:
    """A period in which one sign is past a limit."""

    updates: int = 0  # its length so far
    within: int = 0  # how many of its last updates are within all limits
    loud: bool = False  # an alarm has been raised
    logged_at: int = 0  # `updates` when it was last logged


class LearningWatch:
    """Follows the rows of a run as they are made."""

    def __init__(self, settings: Mapping[str, Any], earlier: Iterable[Row] = ()):
        """earlier: the rows from before a restart."""
        self._settings = settings
        self._first: list[Row] = []  # at most one: the first row with an entropy
        self._recent: collections.deque[Row] = collections.deque(maxlen=RECENT)
        self._without: list[Row] = []  # consecutive rows without a gradient
        self._warned = False  # whether their alarm has been raised
        self._episodes: dict[str, _Excursion] = {}
        for row in earlier:
            self._remember(_short(row))

    def row(self, row: Row) -> list[str]:
        """Takes the next row; returns the lines to log."""
        short = _short(row)
        self._remember(short)
        # `_gradient` needs the gradient's norm, which `short` lacks.
        lines = [*self._gradient(row, short), *self._limits()]
        return [f"update {row.get('step')}: {line}" for line in lines]

    @property
    def past(self) -> dict[str, bool]:
        """The signs that are past a limit now; True: an alarm has been raised."""
        found = {key: episode.loud for key, episode in self._episodes.items()}
        return {**found, "surviving": True} if self._warned else found

    def _remember(self, row: Row) -> None:
        self._recent.append(row)
        if not self._first and row.get("entropy") is not None:
            self._first = [row]

    def _gradient(self, row: Row, short: Row) -> list[str]:
        if has_gradient(row):
            count, warned, self._without, self._warned = len(self._without), self._warned, [], False
            return [f"learning again, after {count} updates without a gradient"] if warned else []
        self._without.append(short)
        if self._warned or (alarm := no_gradient(self._without, self._settings)) is None:
            return []
        self._warned = True
        return [str(alarm)]

    def _limits(self) -> list[str]:
        if not enough(self._recent):
            return []
        past = {alarm.chart: alarm for alarm in past_limits([*self._first, *self._recent], self._settings)}
        silent = COVERED_BY_NO_GRADIENT if self._warned else ()
        lines = [self._past(key, alarm) for key, alarm in past.items() if key not in silent]
        lines += [self._within(key) for key in [*self._episodes] if key not in past]
        return [line for line in lines if line]

    def _past(self, key: str, alarm: Alarm) -> str:
        begins = key not in self._episodes
        episode = self._episodes.setdefault(key, _Excursion())
        episode.updates, episode.within = episode.updates + 1, 0
        due = alarm.loud and (not episode.loud or episode.updates - episode.logged_at >= REMIND)
        if not begins and not due:
            return ""
        episode.loud, episode.logged_at = episode.loud or alarm.loud, episode.updates
        return f"{'ALARM' if alarm.loud else 'warning'}: {alarm}"

    def _within(self, key: str) -> str:
        episode, sign = self._episodes[key], SIGNS[key]
        latest = recent_mean([*self._recent], sign.column)
        if latest is None:  # updates without a gradient lack the column
            return ""
        episode.updates, episode.within = episode.updates + 1, episode.within + 1
        if episode.within < RECENT:
            return ""
        del self._episodes[key]
        count = episode.updates - RECENT
        past = f"{count} update{'s' if count > 1 else ''} past them"
        return f"{sign.name} is within its limits again ({latest:.2g} in the mean), after {past}"


def _short(row: Row) -> Row:
    """The numbers that the signs need. Rows from before a restart were on a disk, where they may have been edited."""
    return {name: row[name] for name in _NAMES if isinstance(row.get(name), int | float)}

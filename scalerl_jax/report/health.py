"""The health of a run: series of its updates with their limits, and its alarms, which alarms.py decides and words.

Every chart has a line under it: what it means, and what to do when it goes wrong. A sign that no update has recorded,
as in a run of an older version, is still named.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.report.log_rows import Row, five_digits, groups_of, rounded, thinned
from scalerl_jax.run import alarms as alarms_lib
from scalerl_jax.run.collapse import first_collapse

_SHOWN_LAGS = 64  # bars of the histogram; the last one holds all older tokens


@dataclasses.dataclass(frozen=True)
class Chart:
    """One small chart. `columns`: columns of metrics.jsonl, with a name for each if there are two."""

    key: str
    title: str
    what: str
    form: str  # number | share | count
    columns: Mapping[str, str]
    means: str
    wrong: str  # what to do then, in short: an alarm has more
    only_recorded: bool = False  # left out if a run has not recorded it


_SLOWER = "lower the learning rate or config.pacing.max_off_policy_steps"
CHARTS = (
    Chart(
        "loss", "Loss", "negative log-likelihood of a token, nats", "number",
        {"nll": "trained on", "evaluation_loss": "held out"},
        "It falls steeply at first, then levels off.", "it rises or swings: lower config.sft.learning_rate",
        only_recorded=True,
    ),
    Chart(
        "reward", "Reward", "mean over the batch; mostly 1 is right, -1 wrong", "number", {"reward": ""},
        "What the objective sees; it rises with the pass rate.",
        "it rises and the held-out pass rate does not: read completions, it is earned otherwise",
    ),
    Chart(
        "entropy", "Entropy", "of the policy at trained tokens, nats", "number", {"entropy": ""},
        "How much choice the policy leaves open; a slow fall is learning.",
        "it collapses: lower the learning rate, or stop",
    ),
    Chart(
        "lag", "Staleness", "updates, from sampling to training", "number", {"lag_mean": "mean", "lag_max": "most"},
        "0 is on-policy; no token is older than k.",
        "the mean nears k: fewer generators, or a lower config.pacing.max_buffered_batches",
    ),
    Chart(
        "mismatch", "Mismatch", "mean |log ratio|, trainer to generator, nats", "number", {"mismatch": ""},
        "Two programs computing one policy, and what it learned meanwhile.",
        "compare dtypes and head_precision of both sides",
    ),
    Chart(
        "mismatch_p99", "Mismatch, p99", "|log ratio| at the 99th percentile, nats", "number", {"mismatch_p99": ""},
        "The tail that the mean hides; 0.69 is a ratio of two.",
        f"compare sampling, experts and head of both sides; else {_SLOWER}",
    ),
    Chart(
        "kl", "Mismatch KL", "generators to trainer, k3 estimate, nats", "number", {"kl": ""},
        "Mean of rho - 1 - log rho; dense models on-policy stay under 0.001.",
        f"as for the mismatch; else {_SLOWER}",
    ),
    Chart(
        "clipped", "Clipped", "tokens at the loss's cap of the ratio", "share", {"clipped": ""},
        "The cap is for outliers: next to none are at it.", _SLOWER,
    ),
    Chart(
        "effective_sample_size", "ESS, tokens", "effective sample size, of the tokens", "share",
        {"effective_sample_size": ""},
        "100 %: all tokens have the same importance ratio.", f"{_SLOWER}, or mask with config.objective.icepop_high",
    ),
    Chart(
        "effective_sample_size_geometric", "ESS, completions", "by length-normalized ratios", "share",
        {"effective_sample_size_geometric": ""},
        "100 %: no completion is more off-policy than another.", f"look at servers in metrics.jsonl; {_SLOWER}",
    ),
    Chart(
        "effective_sample_size_sequence", "ESS, sequences", "completions by the product of their ratios", "share",
        {"effective_sample_size_sequence": ""},
        "What weighing whole completions would leave; it falls with their length, so there is no limit.",
        f"it falls and the length does not grow: {_SLOWER}",
    ),
    Chart(
        "truncated", "Truncated", "completions cut by the budget", "share", {"truncated": ""},
        "They are never right; runs with more than a tenth of them became unstable.",
        "raise config.rollout.answer_budget, or see that the policy writes its stop token",
    ),
    Chart(
        "interrupted", "Interrupted", "completions whose thinking was cut short", "share", {"interrupted": ""},
        "They go on with the forced phrase and an answer.",
        "raise config.rollout.thinking_budget_max, unless it is short on purpose",
    ),
    Chart(
        "repetitive", "Loops", "completions that end in a loop", "share", {"repetitive": ""},
        "Over half of the 4-grams of their last 512 tokens are repeats.",
        "read some: loops that pay are a fault of the reward, others of the learning rate",
    ),
    Chart(
        "repetition", "Repetition", "repeated 4-grams of a completion, mean", "share", {"repetition": ""},
        "All text has some; it is the rise that tells.",
        "read completions: saying things twice is paid for, or loops are near",
    ),
    Chart(
        "failed", "Failed episodes", "their environment failed", "share", {"score/ended/failed": ""},
        "Nothing is learned of them; an environment that works has none.",
        "the log has the first line of each kind; mend the environment",
        only_recorded=True,
    ),
    Chart(
        "surviving", "Effective batch", "prompts with right and wrong answers", "count",
        {"prompts_surviving": "surviving", "prompts": "in the batch"},
        "The others have no gradient; it shrinks as problems are solved.",
        "other prompts, or a larger config.rollout.group_size",
    ),
    Chart(
        "retired", "Prompts retired", "solved, not drawn again", "count", {"prompts_retired": ""},
        "It grows as the policy learns.", "few prompts are left: bring harder ones",
    ),
    Chart(
        "length", "Length", "sampled tokens of a completion", "count", {"length_mean": "mean", "length_max": "most"},
        "Reasoning mostly grows longer as it learns.",
        "it grows and the pass rate does not: see config.rollout.length_control",
    ),
    Chart(
        "no_end_of_thinking", "No end of thinking", "completions without an answer for it", "share",
        {"no_end_of_thinking": ""},
        "Without it there is no answer to judge.", "warm-start on traces that end their thinking (scalerl-sft)",
        only_recorded=True,
    ),
    Chart(
        "teacher", "Teacher", "from the policy to its teacher, nats", "number",
        {"teacher_kl": "sampled tokens", "teacher_divergence": "top tokens"},
        "How far the policy is from its teacher; it falls towards 0.",
        "it levels off high: a higher config.objective.distill_weight, or a warm start nearer to the teacher",
        only_recorded=True,
    ),
    Chart(
        "experts", "Experts", "of the fullest, over the mean", "number",
        {"expert_load": "mean over layers", "expert_load_max": "worst layer"},
        "1: tokens spread evenly; no token is dropped whatever it is.",
        "it keeps rising: the router collapses; lower the learning rate",
        only_recorded=True,
    ),
    Chart(
        "gradient", "Gradient norm", "of the batch, before the optimizer", "number", {"gradient_norm": ""},
        "Single peaks are harmless.",
        "it keeps growing: lower the learning rate, or set config.optimizer.max_grad_norm",
    ),
)  # fmt: skip


def _charts(settings: Mapping[str, Any]) -> list[Chart]:
    """The charts, in the words of this run's loss."""
    if settings["objective.loss"] == "cispo":
        return [*CHARTS]
    # With the other losses a clipped token is no outlier: its ratio is out of range, and it has no gradient.
    return [
        chart
        if chart.key != "clipped"
        else dataclasses.replace(
            chart,
            what="tokens past the loss's range of the ratio",
            means="They have no gradient; some are expected as the policy moves, so there is no limit.",
            wrong=f"it keeps growing: {_SLOWER}",
        )
        for chart in CHARTS
    ]


def health(
    rows: Sequence[Row], settings: Mapping[str, Any], *, first: Sequence[alarms_lib.Alarm] = ()
) -> dict[str, Any]:
    """The charts with values in the rows of metrics.jsonl, and those of RL that should have some; the alarms, `first`
    before those of the limits."""
    groups = groups_of(len(rows))
    steps = [row["step"] for row in rows]
    drawn = alarms_lib.limits(rows, settings)
    trains = any("prompts" in row for row in rows)  # not a warm start
    enough = alarms_lib.enough(rows)
    charts = []
    for chart in _charts(settings):
        series = [
            {"name": name, **thinned([row.get(column) for row in rows], groups)}
            for column, name in chart.columns.items()
            if any(row.get(column) is not None for row in rows)
        ]
        if not series and (chart.only_recorded or not trains):
            continue
        column = next(iter(chart.columns))
        latest = alarms_lib.recent_mean(rows, column)
        charts.append(
            {
                **{name: getattr(chart, name) for name in ("key", "title", "what", "form", "means", "wrong")},
                "series": series,
                "latest": five_digits(latest),
                "lines": [
                    {
                        **dataclasses.asdict(line),
                        "value": five_digits(line.value),
                        "over": enough and line.passed_by(latest),
                    }
                    for line in drawn.get(chart.key, [])
                ],
            }
        )
    return {
        "step": [steps[group.stop - 1] for group in groups],
        "each": groups[0].stop if groups else 1,  # updates per point
        "recent": alarms_lib.RECENT,
        "charts": charts,
        "staleness": staleness(rows[-alarms_lib.RECENT :]),
        "alarms": [dataclasses.asdict(alarm) for alarm in (*first, *alarms_lib.alarms(rows, settings))],
    }


def staleness(rows: Sequence[Row]) -> dict[str, Any]:
    """Share of the sampled tokens by their staleness, over all these rows; empty if no row has it."""
    counts = collections.Counter[int]()
    for row in rows:
        for lag, count in (row.get("lags") or {}).items():
            counts[min(int(lag), _SHOWN_LAGS)] += count
    total = counts.total()
    if not total:
        return {"lag": [], "share": []}
    lags = range(max(counts) + 1)
    return {"lag": [*lags], "share": rounded(counts[lag] / total for lag in lags)}


def collapses(metrics: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> list[alarms_lib.Alarm]:
    """The first collapse that the rows of a run show, if any."""
    found = first_collapse(metrics, evals)
    if found is None:
        return []
    advice = f"go back to the checkpoint of update {found.last_good} or an earlier one (--from_step), with a lower "
    advice += "learning rate or fresher tokens"
    return [alarms_lib.Alarm("", f"{found} (raised at step {found.step})", advice, loud=True)]

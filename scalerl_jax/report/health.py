"""The health of a run: series of its updates with their limits, and its alarms, which alarms.py decides and words."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.report.log_rows import Row
from scalerl_jax.report.numbers import groups_of, rounded, thinned
from scalerl_jax.run import alarms as alarms_lib


@dataclasses.dataclass(frozen=True)
class Chart:
    """One small chart. `columns`: of metrics.jsonl, with what each is called where there are two."""

    key: str
    title: str
    what: str
    form: str  # number | share | count
    columns: Mapping[str, str]


CHARTS = (
    Chart("loss", "Loss", "negative log-likelihood of a token, nats", "number", {"nll": ""}),
    Chart("reward", "Reward", "mean over the batch, from -1 to 1", "number", {"reward": ""}),
    Chart("entropy", "Entropy", "of the policy at trained tokens, nats", "number", {"entropy": ""}),
    Chart("lag", "Staleness", "updates, from sampling to training", "number", {"lag_mean": "mean", "lag_max": "most"}),
    Chart("mismatch", "Log-prob mismatch", "generator against trainer, mean, nats", "number", {"mismatch": ""}),
    Chart("clipped", "Clipped", "tokens at the loss's cap of the ratio", "share", {"clipped": ""}),
    Chart("truncated", "Truncated", "completions cut by the budget", "share", {"truncated": ""}),
    Chart(
        "surviving", "Effective batch", "prompts with right and wrong answers", "count",
        {"prompts_surviving": "surviving", "prompts": "in the batch"},
    ),
    Chart("retired", "Prompts retired", "solved, not drawn again", "count", {"prompts_retired": ""}),
    Chart("interrupted", "Interrupted", "completions whose thinking was cut short", "share", {"interrupted": ""}),
    Chart("length", "Length", "sampled tokens of a completion", "count", {"length_mean": "mean", "length_max": "most"}),
    Chart(
        "no_end_of_thinking", "No end of thinking", "completions without an answer for it", "share",
        {"no_end_of_thinking": ""},
    ),
    Chart("gradient", "Gradient norm", "of the batch, before the optimizer", "number", {"gradient_norm": ""}),
    Chart(
        "effective_sample_size", "Importance ratios", "effective sample size, of tokens", "share",
        {"effective_sample_size": ""},
    ),
)  # fmt: skip


def health(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every chart of which the rows of metrics.jsonl hold anything."""
    groups = groups_of(len(rows))
    steps = [row["step"] for row in rows]
    drawn = alarms_lib.limits(rows, settings)
    charts = []
    for chart in CHARTS:
        series = [
            {"name": name, **thinned([row.get(column) for row in rows], groups)}
            for column, name in chart.columns.items()
            if any(row.get(column) is not None for row in rows)
        ]
        if not series:
            continue
        column = next(iter(chart.columns))
        latest = alarms_lib.recent_mean(rows, column)
        charts.append(
            {
                **{name: getattr(chart, name) for name in ("key", "title", "what", "form")},
                "series": series,
                "latest": rounded([latest])[0],
                "lines": [
                    {**dataclasses.asdict(line), "value": rounded([line.value])[0], "over": line.passed_by(latest)}
                    for line in drawn.get(chart.key, [])
                ],
            }
        )
    return {
        "step": [steps[group.stop - 1] for group in groups],
        "each": groups[0].stop if groups else 1,  # updates behind a point
        "recent": alarms_lib.RECENT,
        "charts": charts,
        "alarms": [dataclasses.asdict(alarm) for alarm in alarms_lib.alarms(rows, settings)],
    }

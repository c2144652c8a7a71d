"""The health of a run: series of its updates, each with the line beyond which something is wrong.

    lag            k of the pacing: a bound that nothing may cross
    truncated      5 % and 10 %: the paper's unstable runs were past the second, its sound ones below the first
    mismatch       what the probe at meeting allows the worst percent of tokens
    clipped        1 % of the tokens: CISPO's cap is for outliers
    entropy        a tenth of the first one: what is left to explore is nearly gone
    surviving      a quarter of the prompts: the update stands on few groups

The first two lines are the pacing's and the paper's; the others are this project's own choice.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.report_page.numbers import groups_of, rounded, thinned

Row = dict[str, Any]

# As rollouts/probe.py has them for config.probe.p99_limit = 0; that file brings gRPC, which a report does without.
_P99_LIMITS = {"float32": 1e-2, "bfloat16": 2e-1}
_TRUNCATED = (0.05, 0.10)
_CLIPPED = 0.01
_ENTROPY_LEFT = 0.1
_SURVIVING_LEFT = 0.25
_RECENT = 10  # updates whose mean is held against a line


@dataclasses.dataclass(frozen=True)
class Chart:
    """One small chart. `columns`: of metrics.jsonl, with what each is called where there are two."""

    key: str
    title: str
    what: str
    form: str  # number | share | count
    columns: Mapping[str, str]


CHARTS = (
    Chart("reward", "Reward", "mean over the batch, from -1 to 1", "number", {"reward": ""}),
    Chart("entropy", "Entropy", "of the policy at loss tokens, nats", "number", {"entropy": ""}),
    Chart("lag", "Lag", "updates, from sampling to training", "number", {"lag_mean": "mean", "lag_max": "most"}),
    Chart("mismatch", "Mismatch", "|log-prob difference|, mean, nats", "number", {"mismatch": ""}),
    Chart("clipped", "Clipped", "tokens at the surrogate's cap", "share", {"clipped": ""}),
    Chart("truncated", "Truncated", "completions cut by the budget", "share", {"truncated": ""}),
    Chart(
        "surviving", "Effective batch", "prompts with right and wrong", "count",
        {"prompts_surviving": "surviving", "prompts": "in the batch"},
    ),
    Chart("retired", "Prompts retired", "solved, and never drawn again", "count", {"prompts_retired": ""}),
    Chart("interrupted", "Interrupted", "completions told to answer", "share", {"interrupted": ""}),
    Chart("length", "Length", "sampled tokens of a completion", "count", {"length_mean": "mean", "length_max": "most"}),
    Chart("gradient", "Gradient norm", "of the batch, before the optimizer", "number", {"gradient_norm": ""}),
    Chart(
        "effective_sample_size", "Importance ratios", "effective sample size, of tokens", "share",
        {"effective_sample_size": ""},
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Line:
    """An alarm line: where, why, and on which side trouble is."""

    value: float
    label: str
    trouble: str = "above"  # or "below"
    bound: bool = False  # nothing can cross it; it is shown, and raises no alarm


def lines(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, list[Line]]:
    """The lines of each chart, the gravest last. settings: the config's leaves by their dotted names."""
    found: dict[str, list[Line]] = {
        "lag": [Line(settings["pacing.k"], f"k = {settings['pacing.k']}", bound=True)],
        "truncated": [Line(share, f"{share:.0%}") for share in _TRUNCATED],
        "clipped": [Line(_CLIPPED, f"{_CLIPPED:.0%}")],
    }
    limit = settings["probe.p99_limit"] or _P99_LIMITS[settings["model.compute_dtype"]]
    found["mismatch"] = [Line(limit, f"{limit:g}: the probe's limit")]
    entropy = [row["entropy"] for row in rows if row.get("entropy") is not None]
    if entropy:
        found["entropy"] = [Line(_ENTROPY_LEFT * entropy[0], "a tenth of the first", "below")]
    prompts = [row["prompts"] for row in rows if row.get("prompts")]
    if prompts:
        found["surviving"] = [Line(_SURVIVING_LEFT * prompts[-1], "a quarter", "below")]
    return found


def health(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every chart of which the rows of metrics.jsonl hold anything."""
    groups = groups_of(len(rows))
    steps = [row["step"] for row in rows]
    drawn = lines(rows, settings)
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
        recent = [row[column] for row in rows[-_RECENT:] if row.get(column) is not None]
        latest = float(np.mean(recent)) if recent else None
        charts.append(
            {
                **{name: getattr(chart, name) for name in ("key", "title", "what", "form")},
                "series": series,
                "latest": rounded([latest])[0],
                "lines": [
                    {
                        "value": rounded([line.value])[0],
                        "label": line.label,
                        "bound": line.bound,
                        "trouble": line.trouble,
                        "over": latest is not None and not line.bound and beyond(latest, line),
                    }
                    for line in drawn.get(chart.key, [])
                ],
            }
        )
    return {
        "step": [steps[group.stop - 1] for group in groups],
        "each": groups[0].stop if groups else 1,  # updates behind a point
        "recent": _RECENT,
        "charts": charts,
    }


def beyond(value: float, line: Line) -> bool:
    return value > line.value if line.trouble == "above" else value < line.value

"""Evaluations as a table for people: per policy, a line for each environment and one for all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

_SHOWN = 3  # values of k with a column, the largest


def evaluation_table(rows: Sequence[Mapping[str, Any]], name: str) -> Table:
    """rows: of evals.jsonl, by step; the first column names the step if there are several."""
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

"""Excerpts of two runs of the quickstart: as its config says, and at 12 times its learning rate, which collapsed.

Of each row the columns that collapse.py looks at; a run without a gradient has none of its norm and of its ratios.
"""

import json
import os
from typing import Any

Rows = list[dict[str, Any]]


def excerpt(name: str, *, every: int = 1) -> tuple[Rows, Rows]:
    """(rows of metrics.jsonl, rows of evals.jsonl) of "sound" or "collapsed"; every: of which evaluations."""
    with open(os.path.join(os.path.dirname(__file__), "data", f"{name}.json")) as file:
        kept = json.load(file)
    metrics = [
        {column: value for column, value in zip(kept["columns"], values) if value is not None}
        for values in kept["metrics"]
    ]
    evals = [{**row, "passes": [int(digit) for digit in row["passes"]]} for row in kept["evaluations"]]
    return metrics, [row for row in evals if row["step"] % every == 0]

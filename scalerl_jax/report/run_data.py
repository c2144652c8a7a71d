"""The page's data of a run folder."""

import json
import os
from typing import Any

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.environments.user_code import named
from scalerl_jax.report.health import CHARTS, collapses, health
from scalerl_jax.report.log_rows import log_rows
from scalerl_jax.report.samples import PAGE_BYTES, rollouts
from scalerl_jax.report.score import AXES, score
from scalerl_jax.report.time_line import running_seconds, time_line, totals
from scalerl_jax.system.files import read_object


def read_settings(workdir: str) -> dict[str, Any]:
    """The config's leaves by their dotted names; a field that an older run lacks has its default."""
    path = os.path.join(workdir, "config.json")
    try:
        written = read_object(path)
    except FileNotFoundError as error:
        raise ValueError(f"{workdir}: is no run folder: it has no config.json") from error
    settings = config_check.leaves(Config()) | config_check.saved_leaves(written)
    for name, value in settings.items():
        if wrong := config_check.leaf_fault(name, value):
            raise ValueError(f"{path}: {wrong[:200]}")
    return settings


def read_run(workdir: str, *, of: int = 1) -> dict[str, Any]:
    """Everything the page shows of one run. of: the number of runs that share the space for samples.

    Raises ValueError (one line) if the folder holds no run.
    """
    settings = read_settings(workdir)
    drawn = [*(c for chart in CHARTS for c in chart.columns), "waited_seconds", "update_seconds", "optimizer_step"]
    metrics, evals = log_rows(workdir, "metrics.jsonl", drawn), log_rows(workdir, "evals.jsonl", AXES)
    if not metrics and not evals:
        raise ValueError(f"{workdir}: holds no run yet: metrics.jsonl and evals.jsonl have no rows")
    # A warm start's rows have a loss and no rollouts; the row of step 0 has only the held-out loss.
    warm_start = not evals and all(
        ("loss" in row or "evaluation_loss" in row) and "pass_rate" not in row for row in metrics
    )
    if warm_start:
        metrics = [{**row, "nll": row.get("loss")} for row in metrics]
    defaults = config_check.leaves(Config())
    # Paths, and addresses in a network, are not shown to readers of the page.
    changed = {
        name: value for name, value in settings.items() if value != defaults.get(name) and not _is_place(name, value)
    }
    return {
        "name": os.path.basename(os.path.abspath(workdir)),
        "kind": "warm start" if warm_start else "run",
        "updates": metrics[-1]["step"] if metrics else 0,
        "planned": settings["sft.max_steps" if warm_start else "max_steps"],
        "optimizer_steps": metrics[-1].get("optimizer_step") if metrics else 0,
        "seconds": running_seconds((*metrics, *evals)),
        "starts": len({row.get("incarnation") for row in (*metrics, *evals)}),
        "config": [[name, json.dumps(value)] for name, value in sorted(changed.items())],
        "score": score(evals),
        "health": health(metrics, settings, first=() if warm_start else collapses(metrics, evals)),
        "time": time_line([] if warm_start else metrics, evals),
        "totals": totals(metrics, evals),
        "rollouts": rollouts(workdir, settings, page_bytes=PAGE_BYTES // of),
    }


# Leaves that name files, folders or addresses; the others of fleet.tls_* too.
_PLACES = ("train", "validation", "decontaminate", "traces", "template", "cache", "vllm_python", "url")


def _is_place(name: str, value: Any) -> bool:
    leaf = name.rpartition(".")[2]
    if leaf.endswith(("path", "file")) or leaf.startswith("tls_") or leaf in _PLACES:
        return True
    return leaf in ("name", "reward", "rewards") and any(map(named, [value] if isinstance(value, str) else value))

"""A run folder as what the page shows of it."""

import json
import os
from typing import Any

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config
from scalerl_jax.report_page.health import health
from scalerl_jax.report_page.rollouts import PAGE_BYTES, rollouts
from scalerl_jax.report_page.score import score
from scalerl_jax.report_page.time_line import time_line, totals
from scalerl_jax.telemetry import read_rows

Row = dict[str, Any]


def rows(workdir: str, name: str) -> list[Row]:
    path = os.path.join(workdir, name)
    return read_rows(path) if os.path.exists(path) else []


def read_settings(workdir: str) -> dict[str, Any]:
    """The config's leaves by their dotted names; what an older run did not know has its default."""
    path = os.path.join(workdir, "config.json")
    try:
        with open(path, "rb") as file:
            written = json.load(file)
    except FileNotFoundError as error:
        raise ValueError(f"{workdir}: is no run folder: it has no config.json") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(written, dict):
        raise ValueError(f"{path}: is not an object")
    settings = config_lib.leaves(Config())
    _enter(settings, written, "")
    return settings


def _enter(settings: dict[str, Any], values: dict[str, Any], prefix: str) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _enter(settings, value, f"{prefix}{name}.")
        else:
            settings[prefix + name] = value


def read_run(workdir: str, *, of: int = 1) -> dict[str, Any]:
    """Everything the page shows of one run, one `of` so many that share the room for samples.

    Raises ValueError (one line) where the folder holds no run.
    """
    settings = read_settings(workdir)
    metrics, evals = rows(workdir, "metrics.jsonl"), rows(workdir, "evals.jsonl")
    if not metrics and not evals:
        raise ValueError(f"{workdir}: holds no run yet: metrics.jsonl and evals.jsonl have no rows")
    defaults = config_lib.leaves(Config())
    # Where things lie on a machine is nobody's business who gets the page.
    changed = {name: value for name, value in settings.items() if value != defaults.get(name) and not _is_path(name)}
    return {
        "name": os.path.basename(os.path.abspath(workdir)),
        "updates": metrics[-1]["step"] if metrics else 0,
        "planned": settings["updates"],
        "optimizer_steps": metrics[-1].get("optimizer_step") if metrics else 0,
        "began": min(row["time"] for row in (*metrics[:1], *evals[:1])),
        "latest": max(row["time"] for row in (*metrics[-1:], *evals[-1:])),
        "config": [[name, json.dumps(value)] for name, value in sorted(changed.items())],
        "score": score(evals),
        "health": health(metrics, settings),
        "time": time_line(metrics, evals),
        "totals": totals(metrics, evals),
        "rollouts": rollouts(workdir, settings, page_bytes=PAGE_BYTES // of),
    }


def _is_path(name: str) -> bool:
    return name.rpartition(".")[2].endswith(("path", "file"))

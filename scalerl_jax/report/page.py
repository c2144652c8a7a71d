"""The page of runs: its file, its data, and the trainer's thread that writes it.

The file has markup, style, chart library, scripts and data; it is written whole or not at all. Data is one block of
JSON that no browser runs (type application/json), in ASCII and without "<", so that nothing in it can end the block.
The policy in the head allows only scripts and styles with the hashes of the parts below; the page loads and sends
nothing.

A trainer's report is written at each evaluation on a separate thread, so that training does not wait for it. At most
one page is being made; evaluations that come meanwhile request one more, however many they are. A page that cannot be
made (disk, a damaged row, a bug) is logged once, in one line, and training continues; the next page is tried all the
same.
"""

import base64
import contextlib
import hashlib
import html
import importlib.resources
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from absl import logging

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.environments.user_code import named
from scalerl_jax.report.health import CHARTS, collapses, health
from scalerl_jax.report.log_rows import log_rows
from scalerl_jax.report.samples import PAGE_BYTES, rollouts
from scalerl_jax.report.score import AXES, score
from scalerl_jax.report.time_line import running_seconds, time_line, totals
from scalerl_jax.system import files, memory
from scalerl_jax.system.files import read_object, write_whole

FILE = "report.html"
_STYLES = ("uplot/uPlot.min.css", *(f"assets/{name}.css" for name in ("theme", "page", "charts", "reader")))
_LIBRARY = "uplot/uPlot.iife.min.js"  # 1.6.32, by its first line
_LICENSE = "uplot/LICENSE"
_SCRIPTS = ("dom", "charts", "score", "health", "time", "tokens", "reader", "main", "theme")


def write_report(workdirs: Sequence[str], path: str | None = None) -> str:
    """Reads the runs and writes the page. Returns its path; path None: in the folder of the only run.

    Raises ValueError if a folder holds no run or a file in it is damaged, OSError if one cannot be read or the page
    cannot be written.
    """
    if path is None:
        (workdir,) = workdirs
        path = os.path.join(workdir, FILE)
    runs = [read_run(workdir, of=len(workdirs)) for workdir in workdirs]
    _name_apart(runs, workdirs)
    write_whole(path, render({"written": time.time(), "runs": runs}))
    return path


def render(data: dict[str, Any], *, scripts: Sequence[str] = _SCRIPTS) -> str:
    """The page as text, with ASCII data. scripts: names in assets/, in order, of those that draw it from `data`."""
    style = "\n".join(_asset(name) for name in _STYLES)
    # The license requires its text in every copy.
    library = f"/*!\n{_asset(_LICENSE).strip()}\n*/\n{_asset(_LIBRARY)}"
    script = "\n".join(["(() => {", "'use strict';", *(_asset(f"assets/{name}.js") for name in scripts), "})();"])
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = ", ".join(run["name"] for run in data["runs"])
    parts = {
        "policy": html.escape(policy),
        "title": html.escape(title.encode(errors="replace").decode()),
        "style": style,
        "library": library,
        "script": script,
        "data": as_json(data),
    }
    pieces = _asset("assets/page.html").split("@@")  # text, name, text, name, ..., text
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def as_json(data: Any) -> str:
    """JSON for a script element: ASCII (so no U+2028, no lone surrogate as such), and no "<"."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    text = importlib.resources.files(__package__).joinpath(*name.split("/")).read_text(encoding="utf-8")
    assert name.endswith(".html") or not any(end in text.lower() for end in ("</script", "</style")), name
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _name_apart(runs: Sequence[dict[str, Any]], workdirs: Sequence[str]) -> None:
    """Adds the parent folder, or a number, to the names of runs whose folders have the same name."""
    names = [run["name"] for run in runs]
    for run, workdir in zip(runs, workdirs):
        if names.count(run["name"]) > 1:
            run["name"] = os.path.join(os.path.basename(os.path.dirname(os.path.abspath(workdir))), run["name"])
    names = [run["name"] for run in runs]
    for number, run in enumerate(runs, 1):
        if names.count(run["name"]) > 1:
            run["name"] = f"{run['name']} ({number})"


# ---------------------------------------------------------------------- the data


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
        "seconds": max(running_seconds(metrics), running_seconds(evals)),
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


# ---------------------------------------------------------------------- the trainer's thread


class ReportWriter:
    """A context manager; on leaving it waits for the page that is being made, which takes seconds at most."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self._failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report", initializer=_let_training_go_first)
        self._next: Future[None] | None = None

    def request(self) -> None:
        """Requests a page with the latest rows; returns at once."""
        if self._next is not None and not self._next.running() and not self._next.done():
            return  # the page that has not begun shows them as well
        try:
            self._next = self._thread.submit(self._write)
        except RuntimeError as error:  # no further thread can be started
            self._log_once(error)

    def __enter__(self) -> "ReportWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _write(self) -> None:
        try:
            write_report([self._workdir])
            memory.trim()  # a page reads all rows of the run, and fits curves
        except (OSError, ValueError) as error:
            # On a full disk the run ends with its next row, and reports it.
            if getattr(error, "errno", None) not in files.FULL:
                self._log_once(error)
        except Exception as error:  # noqa: BLE001 (a fault of ours must not go unheard)
            self._log_once(f"{type(error).__name__}: {error}")

    def _log_once(self, why: object) -> None:
        if not self._failed:
            logging.warning("no report.html: %s; the training goes on", " ".join(str(why).split()))
        self._failed = True


def _let_training_go_first() -> None:
    with contextlib.suppress(OSError):
        if sys.platform == "linux":  # where a thread has its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)

"""The file: markup, style, chart library, scripts and data put into one, and written whole or not at all.

Data is one block of JSON that no browser runs (type application/json), in ASCII and without "<", so that nothing in it
can end the block. The policy in the head allows only scripts and styles with the hashes of the parts below; the page
loads and sends nothing.
"""

import base64
import hashlib
import html
import importlib.resources
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from scalerl_jax.report.run_data import read_run
from scalerl_jax.system.files import write_whole

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

"""reference/commands.md: every console script with its synopsis and its flags; and the make targets."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from docs.generate import ROOT
from docs.generate.markdown import code, commented, prose, sentence, table

INTRODUCTION = """# Commands

Flags are written `--name=value`; a flag of type *switch* is `--name` or `--noname`. `--help` of a command prints what
stands here. A command that takes `--config` takes [every field of the config](config.md) as a flag too, as in
`--config.rollout.top_p=0.9`. A mistake of yours is one line and exit code 2.

"""
_TYPES = {
    "bool": "switch",
    "int": "integer",
    "float": "number",
    "string": "text",
    "string enum": "",
    "comma separated list of strings": "list, with commas",
    "multi string": "text, any number of times",
}


def scripts() -> dict[str, str]:
    """Console script -> its function in launch/commands.py, as setup.py has them."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    lists = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "entry_points"]
    pairs = [line.split(" = ") for line in ast.literal_eval(lists[0])["console_scripts"]]
    return {name: target.partition(":")[2] for name, target in pairs}


@functools.cache
def described() -> dict[str, dict[str, Any]]:
    """What command_flags.py says of each script."""

    def ask(function: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "docs.generate.command_flags", function]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{function}: {done.stderr}")
        return json.loads(done.stdout)

    found = scripts()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip(found, pool.map(ask, found.values()), strict=True))


def targets() -> dict[str, str]:
    """`make X`, or `make X NAME=value`, -> what the comment at the top of the Makefile says of it."""
    found, name = dict[str, str](), ""
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if new := re.match(r"# (make [a-z-]+(?: [A-Z]+=\S+)*) +(.*)", line):
            name = new[1]
            found[name] = new[2]
        elif name and (more := re.match(r"# {6,}(.*)", line)):
            found[name] += f" {more[1]}"
        else:
            name = ""
        if not line.startswith("#"):
            break
    return found


def page(links: dict[str, str]) -> str:
    """links: field of the config -> where it is on its page."""
    fields = {name: f"config.md{anchor}" for name, anchor in links.items()}
    parts = [INTRODUCTION]
    for name, what in described().items():
        title, *rest = what["docstring"].rstrip().splitlines()
        said = sentence(title.partition(": ")[2])
        parts.append(f"## {name}\n\n{prose(said[0].upper() + said[1:])}\n\n{commented(rest)}\n")
        rows = [_row(flag, fields) for flag in what["flags"]]
        if what["config"]:
            must = "Required." if what["config"] == "required" else ""
            config = "Python file whose `get_config()` returns the run's config; its fields are flags too: see " \
                "[config](config.md)."  # fmt: skip
            rows.append(["`--config`", "file", must and "required", config])
        if rows:
            parts.append(table(["Flag", "Type", "Default", "Meaning"], rows) + "\n")
    parts.append("## make\n\nFrom a clone of the repository. Each does the set-up it needs, and nothing where that is ")
    parts.append("done.\n\n" + table(["Target", "What it does"], [
        [code(name), prose(sentence(said))] for name, said in targets().items()
    ]))  # fmt: skip
    return "".join(parts)


def _row(flag: dict[str, Any], links: dict[str, str]) -> list[str]:
    kind = _TYPES[flag["type"]] or " ".join(map(code, flag["choices"]))
    low, high = flag["low"], flag["high"]
    if low is not None or high is not None:
        bounds = f"{low:g} to {high:g}" if high is not None and low is not None else (
            f"{low:g} or more" if low is not None else f"up to {high:g}"
        )  # fmt: skip
        kind += f"; {bounds}"
    default = "required" if flag["required"] else code(flag["default"] or "")
    return [code(f"--{flag['name']}"), kind, default, prose(flag["help"], links)]

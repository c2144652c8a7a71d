"""Files that scalerl-launch makes from templates/, and their folder, which is written whole or not at all."""

import dataclasses
import os
import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Any

import jinja2
import yaml

from scalerl_jax.system import files

MARK = "rendered-by-scalerl-launch"  # a folder with this file may be replaced


@dataclasses.dataclass(frozen=True)
class RenderedFile:
    name: str
    summary: str  # one line
    text: str
    executable: bool = False


def _yaml(value: Any) -> str:
    """A value as one line of YAML, quoted where necessary."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(
        value, default_flow_style=True, default_style=style, width=float("inf"), sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("...\n").rstrip("\n")


def _command(command: Sequence[str]) -> str:
    """A shell command with one flag a line."""
    return " \\\n    ".join(map(shlex.quote, command))


_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters |= {
    "yaml": _yaml,
    "sh": shlex.quote,
    "command": _command,
    "line": lambda text: " ".join(text.split()),
}


def from_template(template: str, **values: Any) -> RenderedFile:
    """Renders a file of templates/; its first comment line describes it. template: its path there."""
    text = _templates.get_template(template).render(values)
    name = template.rpartition("/")[2]
    if name.endswith(".yaml"):
        text = re.sub(r"^[ \t]+\n", "", text, flags=re.MULTILINE)  # left behind by an omitted part
    summary = next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")
    return RenderedFile(name, summary, text, executable=not name.endswith(".yaml"))


def check_folder(path: str) -> None:
    """Raises ValueError where the folder holds files that scalerl-launch has not written."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is a file")
    if not os.path.isdir(path) or not os.listdir(path):
        return
    mark = os.path.join(path, MARK)
    if not os.path.exists(mark):
        raise ValueError(f"{path} is a folder with other files in it")
    with open(mark, encoding="utf-8") as file:
        known = {MARK, *file.read().splitlines()}
    if others := sorted(set(os.listdir(path)) - known):
        raise ValueError(f"{path} has {others[0]} in it, which was not made by an earlier launch")


def write_folder(path: str, rendered: Sequence[RenderedFile]) -> None:
    """Creates or replaces the folder. Raises WriteError (system/files.py) and then leaves it unchanged."""
    if os.path.isdir(path) and not os.listdir(path):
        os.rmdir(path)
    with files.whole_folder(path, replace=True) as folder:
        listed = "".join(f"{file.name}\n" for file in rendered)
        for file in [*rendered, RenderedFile(MARK, "", listed)]:
            target = os.path.join(folder, file.name)
            files.write_whole(target, file.text)
            os.chmod(target, 0o755 if file.executable else 0o644)

"""Files that scalerl-launch makes: their text, and a folder of them that is there whole or not at all."""

import dataclasses
import inspect
import os
import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from scalerl_jax.system import files

WIDTH = 110  # of comments
MARK = "rendered-by-scalerl-launch"  # a folder with this file may be replaced


@dataclasses.dataclass(frozen=True)
class RenderedFile:
    name: str
    says: str  # what it is, in a line
    text: str
    executable: bool = False


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand as they are; lists are indented under their key; nothing is an alias."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def comment(text: str) -> str:
    """Paragraphs (apart by an empty line) as lines that begin with #."""
    lines = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines += [*textwrap.wrap(" ".join(paragraph.split()), WIDTH, break_on_hyphens=False), ""]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines[:-1])


def manifest(name: str, says: str, *documents: tuple[str, dict[str, Any]]) -> RenderedFile:
    """A YAML file. documents: each with the comment above it; "" for none."""
    parts = [comment(says)]
    for above, document in documents:
        body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=2 * WIDTH, allow_unicode=True)
        parts.append("---\n" + (comment(above) if above else "") + body)
    return RenderedFile(name, " ".join(says.split("\n\n")[0].split()), "".join(parts))


def check_folder(path: str) -> None:
    """Raises ValueError where the folder holds something that is not ours to replace."""
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
    """Creates or replaces the folder. Raises WriteError (system/files.py); then it is as it was."""
    if os.path.isdir(path) and not os.listdir(path):
        os.rmdir(path)
    with files.whole_folder(path, replace=True) as folder:
        listed = "".join(f"{file.name}\n" for file in rendered)
        for file in [*rendered, RenderedFile(MARK, "", listed)]:
            target = os.path.join(folder, file.name)
            files.write_whole(target, file.text)
            os.chmod(target, 0o755 if file.executable else 0o644)

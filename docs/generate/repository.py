"""Links that leave docs/: on a plain checkout they lead to the file; in the site, to the repository.

    ../../scalerl_jax/config.py    REPO_URL/blob/main/scalerl_jax/config.py
    ../../launch                   REPO_URL/tree/main/launch
    ../../configs/quickstart.png   a copy of the picture in the site

A file of docs/ that the site leaves out is in the repository, too. What is in neither stays as it is, and the strict
build names it.
"""

import os
import posixpath
import re
from collections.abc import Callable, Collection

from docs.generate import ROOT

BRANCH = "main"
PICTURES = (".png", ".svg", ".jpg", ".gif")
COPIES = "assets/repository"  # of pictures, in the site

_FENCE = re.compile(r"^ *(`{3,}|~{3,})")
_LINK = re.compile(r"(?P<before>\]\(\s*<?|^\[[^\]]+\]:\s+)(?P<target>[^)\s>]+)", re.MULTILINE)


def pictures() -> list[str]:
    """Those outside docs/ that a page may show, as paths from the root."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").glob("*") if path.suffix in PICTURES)


def rewritten(markdown: str, page: str, *, pages: Collection[str], repo_url: str) -> str:
    """page: its path in docs/. pages: all files of the site by their paths in docs/."""
    return "".join(
        part if fenced else _LINK.sub(lambda link: _link(link, page, pages, repo_url), part)
        for fenced, part in _parts(markdown)
    )


def _link(link: re.Match[str], page: str, pages: Collection[str], repo_url: str) -> str:
    target, hash_, anchor = link["target"].partition("#")
    if not target or ":" in target or target.startswith("/"):
        return link[0]
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    path = posixpath.normpath(posixpath.join("docs", inside))
    if inside in pages or path.startswith("..") or not (ROOT / path).exists():
        return link[0]
    if path in pictures():
        return link["before"] + posixpath.relpath(f"{COPIES}/{path}", posixpath.dirname(page) or ".")
    kind = "tree" if os.path.isdir(ROOT / path) else "blob"
    return f"{link['before']}{repo_url.rstrip('/')}/{kind}/{BRANCH}/{path}{hash_}{anchor}"


def _parts(markdown: str) -> list[tuple[bool, str]]:
    """(whether it is a block of code, text), in order."""
    parts: list[tuple[bool, str]] = []
    fence = ""
    for line in markdown.splitlines(keepends=True):
        mark = _FENCE.match(line)
        fenced = bool(fence or mark)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence[0] * len(line.strip()) and len(line.strip()) >= len(fence):
            fence = ""
        if parts and parts[-1][0] == fenced:
            parts[-1] = (fenced, parts[-1][1] + line)
        else:
            parts.append((fenced, line))
    return parts


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """`change` of what is in no block of code."""
    return "".join(part if fenced else change(part) for fenced, part in _parts(markdown))

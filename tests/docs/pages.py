"""The documentation as its tests read it: pages, blocks of code, links, headings, command lines."""

import dataclasses
import functools
import pathlib
import re
import textwrap
import unicodedata
from collections.abc import Iterator
from typing import Any

import yaml

from docs.generate.repository import outside_code
from tests.support.paths import ROOT

TREE = pathlib.Path(ROOT)
DOCS = TREE / "docs"
README = TREE / "README.md"

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*)(?P<rest>[^`]*)$")
_INLINE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)


def pages() -> list[pathlib.Path]:
    """Those in docs/ that are written by hand."""
    return sorted(DOCS.rglob("*.md"))


def name(page: pathlib.Path) -> str:
    return page.relative_to(TREE).as_posix()


@functools.cache
def text_of(page: pathlib.Path) -> str:
    return page.read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Block:
    line: int  # of its first line of code, from 1
    language: str
    text: str


def blocks(markdown: str) -> list[Block]:
    """Fenced blocks, and those that are indented by four spaces outside of lists."""
    found, lines, at = [], markdown.splitlines(), 0
    in_list = False
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence:
            end = next((i for i in range(at + 1, len(lines)) if _closes(lines[i], fence["ticks"])), len(lines))
            text = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
            found.append(Block(at + 2, fence["language"], text))
            at = end + 1
            continue
        if re.match(r" *([*+-]|\d+\.) ", lines[at]):
            in_list = True
        elif lines[at] and not lines[at].startswith(" "):
            in_list = False
        if not in_list and lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            found.append(Block(at + 1, "", textwrap.dedent("\n".join(lines[at:end])) + "\n"))
            at = end
            continue
        at += 1
    return found


def _closes(line: str, ticks: str) -> bool:
    bare = line.strip()
    return len(bare) >= len(ticks) and set(bare) == {"`"}


def prose(markdown: str) -> str:
    """The page with empty lines in the place of its blocks of code, and its front matter."""
    markdown = re.sub(r"\A---\n.*?\n---\n", lambda found: "\n" * found[0].count("\n"), markdown, flags=re.DOTALL)
    lines = markdown.splitlines()
    for block in blocks(markdown):
        for at in range(block.line - 1, block.line - 1 + block.text.count("\n")):
            if at < len(lines):
                lines[at] = ""
    return "\n".join("" if _FENCE.match(line) else line for line in lines)


def code_spans(markdown: str) -> list[str]:
    return [" ".join(found[2].split()) for found in _INLINE.finditer(prose(markdown))]


def links(markdown: str) -> Iterator[str]:
    for found in _LINK.finditer(_INLINE.sub("", prose(markdown))):
        yield found[1] or found[2]


def anchors(markdown: str, *, github: bool = False) -> set[str]:
    """Of headings and of elements that are given one. github: as GitHub makes them, else as the site does."""
    found: set[str] = set()
    counts: dict[str, int] = {}

    def see(part: str) -> str:
        for heading in re.findall(r"^#{1,6} +(.+?) *#*$", part, flags=re.MULTILINE):
            own = re.search(r"\{ *#([\w.-]+) *\}", heading)
            slug = own[1] if own else _slug(re.sub(r"\{[^}]*\}$", "", heading), github=github)
            count = counts.get(slug, 0)
            counts[slug] = count + 1
            found.add(slug if not count else f"{slug}-{count}" if github else f"{slug}_{count}")
        found.update(re.findall(r"\{ *#([\w.-]+) *\}", part))
        found.update(re.findall(r"<\w+[^>]* id=\"([^\"]+)\"", part))
        return part

    outside_code(markdown, see)
    return found


def _slug(heading: str, *, github: bool) -> str:
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    if github:
        return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    heading = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


class _Loader(yaml.SafeLoader):
    """Takes the tags of mkdocs.yml for what they are of."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def nav() -> list[str]:
    """The pages of mkdocs.yml in order, as paths in docs/."""

    def of(item: Any) -> Iterator[str]:
        if isinstance(item, str):
            yield item
        else:
            for inner in item.values() if isinstance(item, dict) else item:
                yield from of(inner)

    return list(of(yaml.load((TREE / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)["nav"]))


@dataclasses.dataclass(frozen=True)
class CommandLine:
    command: str
    arguments: tuple[str, ...]


_STARTS = re.compile(r"(?:^|(?<=[\s(\"'])|(?<=/bin/))(scalerl-(?!jax\b)[a-z]+)(?=[\s)`\"'$;,.:]|$)")
SHELLS = ("sh", "bash", "console", "")


def command_lines(markdown: str) -> list[CommandLine]:
    """Every command of ours with flags, in blocks of a shell and between backticks."""
    scripts = [block.text for block in blocks(markdown) if block.language in SHELLS]
    found = []
    for script in [*scripts, *code_spans(markdown)]:
        for line in re.sub(r"\\\n\s*", " ", script).splitlines():
            line = re.sub(r"(^|\s)#\s.*$", "", line)  # a comment
            starts = list(_STARTS.finditer(line))
            for start, following in zip(starts, [*starts[1:], None]):
                rest = line[start.end(1) : following.start() if following else None]
                if re.match(r"[.:,]?$|\.\w", rest):
                    rest = ""
                arguments = _arguments(rest)
                found.append(CommandLine(start[1], tuple(arguments)))
    return found


def _arguments(text: str) -> list[str]:
    """Words up to the end of a command; quotes hold one together."""
    words = re.findall(r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+", text)
    end = next((i for i, word in enumerate(words) if re.match(r"(\||&&?|;|>|2>|<$)", word)), len(words))
    return [word.strip("[]();,").replace("'", "").replace('"', "") for word in words[:end]]

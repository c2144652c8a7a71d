"""The site for programs that read: llms.txt (llmstxt.org), llms-full.txt, and each page as Markdown beside its HTML."""

import html
import re
from collections.abc import Mapping, Sequence

_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"[`*]|<[^>]+>|\{[^}]*\}")
_MOST = 160  # characters of a page's line


def summary(markdown: str) -> str:
    """The first sentence of a page's first paragraph, as text."""
    for paragraph in re.split(r"\n\s*\n", markdown):
        if re.match(r"\s*([#|>!<`:]|---|[*+-] |\d+\. )", paragraph) or not paragraph.strip():
            continue
        plain = html.unescape(_MARKS.sub("", _LINK.sub(r"\1", " ".join(paragraph.split()))))
        first = re.match(r".*?[.?!](?=\s|$)", plain)
        said = (first[0] if first else plain).rstrip(":")
        if len(said) <= _MOST:
            return said
        part = re.match(rf".{{40,{_MOST}}}(?=[:;] )", said)
        return f"{part[0]}." if part else said[: _MOST - 3].rsplit(" ", 1)[0] + "..."
    return ""


def index(name: str, says: str, sections: Mapping[str, Sequence[tuple[str, str]]], texts: Mapping[str, str]) -> str:
    """llms.txt. sections: title -> (page's title, its path); texts: path -> Markdown."""
    parts = [f"# {name}\n\n> {says}\n\nAll of it in one file: [llms-full.txt](llms-full.txt)\n"]
    for title, pages in sections.items():
        parts.append(f"\n## {title}\n\n")
        parts += [f"- [{page}]({path}): {summary(texts[path])}\n" for page, path in pages]
    return "".join(parts)


def full(sections: Mapping[str, Sequence[tuple[str, str]]], texts: Mapping[str, str]) -> str:
    """llms-full.txt: the pages in the order of the navigation."""
    pages = [path for pages in sections.values() for _, path in pages]
    return "\n\n".join(f"<!-- {path} -->\n\n{plain(texts[path]).strip()}" for path in pages) + "\n"


def plain(markdown: str) -> str:
    """Without what only the site's theme reads."""
    markdown = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    markdown = re.sub(r"(?<=[`\w]) ?\{ ?#[^}]*\}", "", markdown)
    return html.unescape(
        re.sub(r"<code[^>]*><span>([^<]*)</span><wbr><span>([^<]*)</span></code>", r"`\1\2`", markdown)
    )

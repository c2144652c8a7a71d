"""Text of the source as Markdown: comments and help become prose, names in it code, fields of the config links."""

import re
from collections.abc import Iterable, Mapping, Sequence

# What Markdown, or a table, would take for its own.
_SPECIAL = re.compile(r"[&<>*_`\[\]|$\\~^{}#]")
# Flags, fields of the config, and names with an underscore.
_CODE = re.compile(
    r"(?<![\w/.-])(?:--(?:\[no\])?[a-z_]+(?:\.[a-z_A-Z]+)*(?:=[\w./:,-]*[\w/])?"
    r"|[a-z_]+(?:\.[a-z_]+)+|\w*[a-zA-Z0-9]_\w+)(?![\w/])"
)


def escaped(text: str) -> str:
    """Stands for itself, in a paragraph or a cell."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", text)


def code(text: str) -> str:
    """A code span, also in a cell of a table."""
    if "|" in text or "`" in text:
        return f"<code>{escaped(text)}</code>"
    return f"`{text}`" if text else ""


def prose(text: str, links: Mapping[str, str] | None = None) -> str:
    """A comment as one line: what is between backticks, flags and config fields as code; those in `links` as links."""
    out = []
    for place, part in enumerate(text.split("`")):
        if place % 2:
            out.append(_named(part, links))
            continue
        last = 0
        for found in _CODE.finditer(part):
            out += [escaped(part[last : found.start()]), _named(found[0], links, found=True)]
            last = found.end()
        out.append(escaped(part[last:]))
    return "".join(out)


def _named(text: str, links: Mapping[str, str] | None, *, found: bool = False) -> str:
    """A link to the field it names, else code. found: it stood there without backticks, and may be no name at all."""
    where = (links or {}).get(re.sub(r"^(--)?config\.|=.*$", "", text))
    if where:
        return f"[{code(text)}]({where})"
    named = not found or "_" in text or text.startswith(("--", "config."))
    return code(text) if named else escaped(text)


def sentence(text: str) -> str:
    """With a capital letter where a word comes first that no comma or colon follows, and a full stop."""
    if re.match(r"[a-z]+ ", text):
        text = text[0].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "?", ":")) else f"{text}."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def commented(lines: Sequence[str]) -> str:
    """A comment of several lines: paragraphs, with what is indented as it stands."""
    blocks: list[tuple[bool, list[str]]] = []
    for line in lines:
        indented = line.startswith("  ") and bool(line.strip())
        if not line.strip():
            blocks.append((False, []))
        elif blocks and blocks[-1][0] == indented and blocks[-1][1]:
            blocks[-1][1].append(line)
        else:
            blocks.append((indented, [line]))
    out = []
    for indented, block in blocks:
        if indented:
            least = min(len(line) - len(line.lstrip()) for line in block)
            out.append("```text\n" + "\n".join(line[least:] for line in block) + "\n```")
        elif block:
            out.append(prose(" ".join(line.strip() for line in block)))
    return "\n\n".join(out) + "\n"

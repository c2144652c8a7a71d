"""What a peer says, made fit for a log line: one line, nothing that moves a terminal's cursor, not long."""

LONGEST = 1024  # characters


def told(text: str, limit: int = LONGEST) -> str:
    """`text` with everything that is not printable escaped; beyond `limit` characters it is cut, and that is said."""
    kept = "".join(letter if letter.isprintable() else _escaped(letter) for letter in text[:limit])
    if len(text) <= limit and len(kept) <= limit:
        return kept
    note = f"... ({len(text)} characters)"
    return kept[: limit - len(note)] + note


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")

"""Makes a peer's text fit for a log line or for the details of an error.

printable(text)  for a log: one line, printable, cut; it can neither forge another line nor fill a disk
details(text)    for gRPC: also no longer than DETAIL_BYTES. Details travel in a header, and a header that is too long
                 arrives as RESOURCE_EXHAUSTED, which means something else
LogLimit         how often one thing is logged: a flood of it must not fill a disk either
"""

import collections

LONGEST = 300  # characters of one peer's text in one line of a log, by default
DETAIL_BYTES = 1024  # of UTF-8
LOG_SECONDS = 60.0  # between two lines of one kind


def printable(text: object, *, longest: int = LONGEST) -> str:
    """The text in one line: unprintable characters are escaped, a text that is too long is cut and its length given.

    Only the part that is shown is processed, however long the text is.
    """
    whole = text if isinstance(text, str) else str(text)
    shown = "".join(map(_escaped, whole[:longest]))
    if len(whole) <= longest and len(shown) <= longest:
        return shown
    return f"{shown[:longest]}... ({len(whole)} characters)"


def details(text: object) -> str:
    """The text for an error's details: in one line, at most DETAIL_BYTES of UTF-8."""
    line = printable(text, longest=DETAIL_BYTES - 64)
    data = line.encode()
    if len(data) <= DETAIL_BYTES:
        return line
    return data[: DETAIL_BYTES - 3].decode(errors="ignore") + "..."


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


class LogLimit:
    """Limits how often each kind of event is logged."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}
        self._unlogged: collections.Counter[str] = collections.Counter()

    def happened(self, kind: str, *, now: float) -> int:
        """Counts an event; returns how many to log now, 0 if it is too early. `kind` is our text, not a server's."""
        self._unlogged[kind] += 1
        if now - self._logged_at.get(kind, -LOG_SECONDS) < LOG_SECONDS:
            return 0
        self._logged_at[kind] = now
        return self._unlogged.pop(kind)

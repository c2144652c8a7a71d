"""Rows that cannot be used: counted, named, and skipped up to a limit."""

_NAMED = 3  # number of malformed rows named in messages


class Malformed(ValueError):
    """A row is malformed; the message states what was found and what is required."""


class MalformedRows:
    """The malformed rows of one environment; up to `most` are skipped. `field`: the config field, for messages."""

    def __init__(self, *, field: str, most: int):
        self._field, self._most = field, most
        self._first: list[str] = []
        self.count = 0

    def skip(self, name: str, why: str) -> None:
        """Counts a malformed row. Raises ValueError, one line naming the first ones, if there are more than `most`."""
        self.count += 1
        if len(self._first) < _NAMED:
            self._first.append(f"{name}: {why}")
        if self.count <= self._most:
            return
        if not self._most:
            raise ValueError(f"{self._first[0]} ({self._field} lets such rows be left out)")
        raise ValueError(f"{self._field}={self._most}: there are more malformed rows: {self._named()}")

    def notes(self) -> list[str]:
        """A message on the skipped rows, if there are any."""
        if not self.count:
            return []
        return [f"malformed rows left out: {self.count:,}: {self._named()}"]

    def _named(self) -> str:
        return "; ".join(self._first) + ("; ..." if self.count > len(self._first) else "")

"""Rows that cannot be used: counted, named, and skipped up to a limit."""

_NAMED = 3  # the first ones, in messages


class Malformed(ValueError):
    """Of one row: what was found in it, and what is wanted."""


class MalformedRows:
    """Those of one environment. `field` is the config's, for messages; `most` of them may be skipped."""

    def __init__(self, *, field: str, most: int):
        self._field, self._most = field, most
        self._first: list[str] = []
        self.count = 0

    def skip(self, name: str, why: str) -> None:
        """Counts a row. Raises ValueError, one line with the first ones, where that is one too many."""
        self.count += 1
        if len(self._first) < _NAMED:
            self._first.append(f"{name}: {why}")
        if self.count <= self._most:
            return
        if not self._most:
            raise ValueError(f"{self._first[0]} ({self._field} lets such rows be left out)")
        raise ValueError(f"{self._field}={self._most}: there are more malformed rows: {self._named()}")

    def notes(self) -> list[str]:
        """A line on those that were skipped, if any were."""
        if not self.count:
            return []
        return [f"malformed rows left out: {self.count:,}: {self._named()}"]

    def _named(self) -> str:
        return "; ".join(self._first) + ("; ..." if self.count > len(self._first) else "")

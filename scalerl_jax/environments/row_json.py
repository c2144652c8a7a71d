"""What of a row goes to the processes that score, as JSON, and the digest of that."""

import hashlib
import json
import threading
import weakref
from typing import Any

from scalerl_jax.environments.base import Row, ScorerError

_NOT_JSON = (TypeError, ValueError, RecursionError)


def row_json(row: Row) -> str:
    """Fields of a Row, by their names. Raises ScorerError naming the row and the column that JSON has no form for."""
    fields: dict[str, Any] = {"text": row.text, "answer": row.answer, "task": row.task, "extra": dict(row.extra)}
    fields |= {"source": row.source, "messages": [dict(message) for message in row.messages]}
    try:
        return json.dumps(fields)
    except _NOT_JSON as error:
        name = row.name or repr(row.text[:80])
        for column, value in row.extra.items():
            try:
                json.dumps({column: value})
            except _NOT_JSON as why:
                raise ScorerError(f"{name}: column {column!r}: JSON has no form for it: {why}") from why
        raise ScorerError(f"{name}: JSON has no form for it: {error}") from error


class RowDigests:
    """20 bytes that stand for what a score may look at in a row. From any thread; each row is written out once."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[Row, bytes] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __getitem__(self, row: Row) -> bytes:
        """Raises ScorerError as row_json does."""
        with self._lock:
            digest = self._made.get(row)
        if digest is None:
            digest = hashlib.blake2b(row_json(row).encode(), digest_size=20).digest()
            with self._lock:
                self._made[row] = digest
        return digest

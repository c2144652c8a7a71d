"""Failures of score functions: logged once per kind, for at most KINDS kinds."""

import logging
import threading
from collections.abc import Mapping

from scalerl_jax.environments import parts, user_code
from scalerl_jax.environments.base import ScoreFailed

KINDS = 20  # that are logged
_log = logging.getLogger(__name__)


class Complaints:
    """The failures logged in one run. Thread-safe."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._lock = threading.Lock()

    def say(self, kind: str, line: str) -> None:
        """Logs `line`, unless a failure of the same kind was logged before."""
        with self._lock:
            if kind in self._kinds or len(self._kinds) >= KINDS:
                return
            self._kinds.add(kind)
            last = len(self._kinds) == KINDS
        _log.warning("%s (logged once%s)", line, "; further kinds of failures are not logged" if last else "")


def failure(part: str, error: BaseException) -> tuple[str, str, Mapping[str, float]]:
    """(line, kind, metrics) of an exception that a score function of this part raised."""
    if isinstance(error, ScoreFailed):
        return parts.as_written(part, error.line), f"{part} {error.kind}", error.metrics
    line = f"{parts.field(part, 'name')}: a score failed: {user_code.error_line(error)}; the completion counts as wrong"
    return line, f"{part} {type(error).__name__}", {}

"""Log lines that a client can cause, so many a minute at most: a flood of them must not fill a disk.

quiet.say("refused", logging.WARNING, "weights refused: %s", why)      at most MOST lines of "refused" a minute;
                                                                       the next one that is let through says how
                                                                       many were left out
"""

import logging
import time
from collections.abc import Callable

MOST = 20  # lines of one kind
WINDOW_SECONDS = 60.0


class QuietLog:
    """Lives on one event loop."""

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic):
        self._log, self._clock = log, clock
        self._windows: dict[str, _Window] = {}

    def say(self, kind: str, level: int, text: str, *values: object, exception: bool = False) -> None:
        """kind: one of a few fixed words. exception: the traceback of the one being handled goes with it."""
        now = self._clock()
        window = self._windows.setdefault(kind, _Window(now))
        if now - window.began >= WINDOW_SECONDS:
            if window.left_out:
                self._log.log(level, "%d lines like the next one were left out", window.left_out)
            window = self._windows[kind] = _Window(now)
        if window.said < MOST:
            window.said += 1
            self._log.log(level, text, *values, exc_info=exception)
        else:
            window.left_out += 1


class _Window:
    def __init__(self, began: float):
        self.began, self.said, self.left_out = began, 0, 0

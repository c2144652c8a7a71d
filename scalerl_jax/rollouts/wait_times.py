"""Where the time of a step went: how long the trainer waited, for whom, how long it computed, and on how many cores."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class WaitTimes:
    """Between two rows of metrics. Used by the trainer's thread alone.

    clock: monotonic seconds. processor: seconds that the cores have worked for this process, all of its threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, processor: Callable[[], float] = time.process_time):
        self._clock, self._processor = clock, processor
        self._processed = processor()
        self._waited = self._worked = 0.0
        self._seconds: dict[str, float] = {}
        self._held_by: Sequence[str] = ()
        self._since = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for the fleet."""
        began = self._clock()
        yield
        self.look(())
        self._waited += self._clock() - began

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around the computation of an update."""
        began = self._clock()
        yield
        self._worked += self._clock() - began

    def look(self, held_by: Sequence[str]) -> None:
        """These hold the trainer up now, in equal parts, until the next look; none: it does not wait."""
        now = self._clock()
        for name in self._held_by:
            self._seconds[name] = self._seconds.get(name, 0.0) + (now - self._since) / len(self._held_by)
        self._held_by, self._since = held_by, now

    def take(self) -> dict[str, Any]:
        """Of the time since the last call: waited_seconds, waited_for, update_seconds and cpu_seconds.

        waited_for: (name, seconds), the longest first. cpu_seconds: of the cores of this machine, for everything that
        the trainer's process did; what it has started is not in it.
        """
        self.look(())
        before, self._processed = self._processed, self._processor()
        row = {
            "waited_seconds": self._waited,
            "waited_for": sorted(self._seconds.items(), key=lambda item: -item[1]),
            "update_seconds": self._worked,
            "cpu_seconds": self._processed - before,
        }
        self._waited, self._worked, self._seconds = 0.0, 0.0, {}
        return row

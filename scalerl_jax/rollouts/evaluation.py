"""One version, pinned on some servers until its evaluation is done.

A server that evaluates gets no more training groups, finishes those it has, is brought to the version if it is behind,
answers requests pinned to it, and then catches up with the latest one. When it is lost its unfinished completions go to
another evaluating server, or to any that can still be brought to the version. A server never goes back to an older
version, so with newer ones out everywhere the evaluation may be beyond saving: EvaluationLost.
"""

import concurrent.futures
import time
from collections.abc import Sequence
from typing import Any

from scalerl_jax.rollouts import connection as connection_lib
from scalerl_jax.rollouts.book import Book, FinishedGroup
from scalerl_jax.rollouts.connection import Connection
from scalerl_jax.rollouts.pacing import Pinned
from scalerl_jax.rollouts.requests import Requests


class EvaluationLost(Exception):
    """Every server that evaluated is gone, and the others hold newer weights: evaluate a newer version instead."""


class Evaluation:
    """`samples` completions of each prompt by `version`; `future` gives the FinishedGroups in the order of prompts."""

    def __init__(self, *, version: int, prompts: Sequence[Any], samples: int, servers: int, requests: Requests):
        """servers: how many of the fleet's; 0: all."""
        assert len({prompt.index for prompt in prompts}) == len(prompts) > 0
        self.version, self._servers = version, servers
        self.future: concurrent.futures.Future[list[FinishedGroup]] = concurrent.futures.Future()
        self.asked_at = time.monotonic()
        self.book = Book(
            pacing=Pinned(version=version, groups=len(prompts)),
            open_group=lambda n: requests.evaluation(n, prompts[n], version=version, samples=samples),
            group_size=samples,
            first=0,
            trained=0,
        )
        self._orphaned_at: float | None = None

    def assign(self, connections: Sequence[Connection], *, latest: int) -> list[Connection]:
        """Makes servers evaluate until there are enough; returns those that began."""
        active = [c for c in connections if c.state == connection_lib.ACTIVE]
        for c in active:
            if c.evaluation is self and c.step is not None and c.step > self.version:
                c.evaluation = None  # a newer version was on its way when it was chosen
        working = sum(c.evaluation is self for c in active)
        free = [c for c in active if c.evaluation is None and c.step is not None and c.step <= self.version]
        if self.version != latest:
            # One that is being brought to a newer version now would not stop at ours.
            free = [c for c in free if c.step == self.version]
        wanted = (self._servers or len(active)) - working
        chosen = sorted(free, key=lambda c: c.in_flight)[: max(0, wanted)]
        for c in chosen:
            c.evaluation = self
        return chosen

    def lost(self, connections: Sequence[Connection], *, latest: int, patience: float) -> bool:
        """Whether no server has been left for it for `patience` seconds, and none can come."""
        if latest == self.version or any(c.evaluation is self for c in connections):
            self._orphaned_at = None
            return False
        now = time.monotonic()
        self._orphaned_at = self._orphaned_at or now
        return now - self._orphaned_at >= patience

"""One version, pinned on some servers until its evaluation is done.

A server that evaluates gets no more training groups, finishes those it has, is brought to the version if it is behind,
answers requests pinned to it, and then continues with the next evaluation or catches up with the latest version. If it
is lost, its unfinished completions go to another evaluating server, or to any that can still be brought to the version.
A server never returns to an older version, so once all servers hold newer ones the evaluation cannot be finished:
EvaluationLost.
"""

import collections
import concurrent.futures
import time
from collections.abc import Sequence

from scalerl_jax.environments import Row
from scalerl_jax.rollouts.group_buffer import FinishedGroup, GroupBuffer, finished
from scalerl_jax.rollouts.pacing import Pinned
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers import server_state
from scalerl_jax.rollouts.servers.client import ServerClient


class EvaluationLost(Exception):
    """Every server that evaluated is gone, and the others hold newer weights: evaluate a newer version instead."""


class Evaluation:
    """`samples` completions of each row by `version`; `future` gives the FinishedGroups in the order of rows."""

    def __init__(
        self,
        *,
        version: int,
        rows: Sequence[Row],
        samples: int,
        servers: int,
        requests: Requests,
    ):
        """servers: how many of the fleet's servers evaluate; 0 means all."""
        assert len({row.index for row in rows}) == len(rows) > 0
        self.version, self._servers = version, servers
        self.approved = False  # by the trainer, see Trust; the evaluation does not end before
        self.future: concurrent.futures.Future[list[FinishedGroup]] = concurrent.futures.Future()
        self.asked_at = time.monotonic()
        self.buffer = GroupBuffer(
            pacing=Pinned(version=version, groups=len(rows)),
            open_group=lambda n: requests.evaluation(n, rows[n], version=version, samples=samples),
            group_size=samples,
            trained=0,
            agents=requests.agents,
        )
        self._orphaned_at: float | None = None

    def assign(self, clients: Sequence[ServerClient], *, latest: int, done: Sequence[ServerClient] = ()) -> None:
        """Assigns servers to this evaluation until there are enough.

        done: servers whose evaluation has just ended, so no newer version is on its way to them yet.
        """
        active = [c for c in clients if c.state == server_state.ACTIVE]
        for c in active:
            if c.evaluation is self.buffer and c.step is not None and c.step > self.version:
                c.assign(None)  # a newer version was on its way when it was chosen
        working = sum(c.evaluation is self.buffer for c in active)
        free = [c for c in active if c.evaluation is None and c.step is not None and c.step <= self.version]
        if self.version != latest:
            # A server that is now being brought to a newer version would not stop at this one.
            free = [c for c in free if c.step == self.version or c in done]
        wanted = (self._servers or len(active)) - working
        for c in sorted(free, key=lambda c: c.in_flight)[: max(0, wanted)]:
            c.assign(self.buffer)

    def lost(self, clients: Sequence[ServerClient], *, latest: int, patience: float) -> bool:
        """Whether it has had no server for `patience` seconds and can get none."""
        if latest == self.version or any(c.evaluation is self.buffer for c in clients):
            self._orphaned_at = None
            return False
        now = time.monotonic()
        self._orphaned_at = self._orphaned_at or now
        return now - self._orphaned_at >= patience


class EvaluationQueue:
    """Queue of evaluations, run one after another. Lives on the fleet's event loop."""

    def __init__(self) -> None:
        self._queue: collections.deque[Evaluation] = collections.deque()

    @property
    def current(self) -> Evaluation | None:
        return self._queue[0] if self._queue else None

    def add(self, evaluation: Evaluation) -> None:
        self._queue.append(evaluation)

    def cancel(self) -> None:
        for evaluation in self._queue:
            evaluation.future.cancel()

    def advance(self, clients: Sequence[ServerClient], *, latest: int, patience: float) -> list[Evaluation]:
        """Assigns servers to the current evaluation; ends those that are done or lost, and returns them.

        latest: the version that every server should hold. patience: seconds, see Evaluation.lost.
        """
        ended: list[Evaluation] = []
        done: list[ServerClient] = []
        while self._queue:
            evaluation = self._queue[0]
            whole = evaluation.buffer.is_ready(0)
            groups = evaluation.buffer.pop_batch(0) if whole and evaluation.approved else None
            # Complete but not approved: its servers stay, because completions may have to be requested again.
            if groups is None and (whole or not evaluation.lost(clients, latest=latest, patience=patience)):
                evaluation.assign(clients, latest=latest, done=done)
                break
            ended.append(self._queue.popleft())
            for client in clients:
                if client.evaluation is evaluation.buffer:
                    client.assign(None)
                    done.append(client)
            if groups is not None:
                evaluation.future.set_result([finished(group) for group in groups])
            else:
                evaluation.future.set_exception(
                    EvaluationLost(
                        f"the servers that evaluated version {evaluation.version} are gone, the others are ahead"
                    )
                )
        return ended

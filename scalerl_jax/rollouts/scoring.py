"""Completions on their way to the scorer and their scores on the way back.

`score` is called on a thread of its own, one completion after another, so that it may block for a moment; the scores
are entered on the fleet's event loop.
"""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row, Score
from scalerl_jax.rollouts.group_buffer import GroupBuffer, GroupInFlight

ScoreFuture: TypeAlias = "concurrent.futures.Future[Score]"


class Scoring:
    """Lives on the event loop, except where said.

    Args:
        score: what a completion is worth.
        post: lets the loop run a function soon, from any thread.
        fail: a fault of ours, on the loop.
        finished: a group is finished.
    """

    def __init__(
        self,
        score: Callable[[Row, Completion], ScoreFuture],
        *,
        post: Callable[..., Any],
        fail: Callable[[BaseException], None],
        finished: Callable[[], None],
    ):
        self._score, self._post, self._fail, self._finished = score, post, fail, finished
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fleet-scoring")
        self.waiting = 0  # completions without their score

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def submit(self, buffer: GroupBuffer, group: GroupInFlight, completion: Completion) -> None:
        self.waiting += 1
        self._thread.submit(self._ask, buffer, group, completion)

    def _ask(self, buffer: GroupBuffer, group: GroupInFlight, completion: Completion) -> None:
        try:
            score = self._score(group.row, completion)
        except BaseException as error:  # noqa: BLE001  raised by the trainer's next call
            self._post(self._fail, error)
            return
        score.add_done_callback(lambda done: self._post(self._scored, buffer, group, completion, done))

    def _scored(self, buffer: GroupBuffer, group: GroupInFlight, completion: Completion, score: ScoreFuture) -> None:
        self.waiting -= 1
        error = RuntimeError("a score was cancelled") if score.cancelled() else score.exception()
        if error is not None:
            self._fail(error)
            return
        if buffer.scored(group, completion, score.result(), now=time.monotonic()):
            self._finished()

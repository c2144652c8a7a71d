"""Completions on their way to the judge and their verdicts on the way back.

`judge` is called on a thread of its own, one completion after another, so that it may block for a moment; its verdicts
are entered on the fleet's event loop.
"""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from scalerl_jax.contract import codec
from scalerl_jax.rollouts.group_buffer import GroupBuffer, OpenGroup

Verdict: TypeAlias = "concurrent.futures.Future[bool]"


class Judging:
    """Lives on the event loop, except where said.

    Args:
        judge: whether a completion is right, as a concurrent future.
        post: lets the loop run a function soon, from any thread.
        fail: a fault of ours, on the loop.
        finished: a group is finished.
    """

    def __init__(
        self,
        judge: Callable[[Any, codec.Completion], Verdict],
        *,
        post: Callable[..., Any],
        fail: Callable[[BaseException], None],
        finished: Callable[[], None],
    ):
        self._judge, self._post, self._fail, self._finished = judge, post, fail, finished
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fleet-judging")
        self.waiting = 0  # completions without their verdict

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def submit(self, book: GroupBuffer, group: OpenGroup, completion: codec.Completion) -> None:
        self.waiting += 1
        self._thread.submit(self._ask, book, group, completion)

    def _ask(self, book: GroupBuffer, group: OpenGroup, completion: codec.Completion) -> None:
        try:
            verdict = self._judge(group.prompt, completion)
        except BaseException as error:  # noqa: BLE001  raised by the trainer's next call
            self._post(self._fail, error)
            return
        verdict.add_done_callback(lambda done: self._post(self._judged, book, group, completion, done))

    def _judged(self, book: GroupBuffer, group: OpenGroup, completion: codec.Completion, verdict: Verdict) -> None:
        self.waiting -= 1
        error = RuntimeError("a verdict was cancelled") if verdict.cancelled() else verdict.exception()
        if error is not None:
            self._fail(error)
            return
        if book.judged(group, completion, bool(verdict.result()), now=time.monotonic()):
            self._finished()

"""The trainer's report: written at each evaluation on a separate thread, so that training does not wait for it.

At most one page is being made; evaluations that come meanwhile request one more, however many they are. A page that
cannot be made (disk, a damaged row, a bug) is logged once, in one line, and training continues; the next page is tried
all the same.
"""

import contextlib
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from absl import logging

from scalerl_jax.report.page import write_report
from scalerl_jax.system import files, memory


class ReportWriter:
    """A context manager; on leaving it waits for the page that is being made, which takes seconds at most."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self._failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report", initializer=_let_training_go_first)
        self._next: Future[None] | None = None

    def request(self) -> None:
        """Requests a page with the latest rows; returns at once."""
        if self._next is not None and not self._next.running() and not self._next.done():
            return  # the page that has not begun shows them as well
        try:
            self._next = self._thread.submit(self._write)
        except RuntimeError as error:  # no further thread can be started
            self._say(error)

    def __enter__(self) -> "ReportWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _write(self) -> None:
        try:
            write_report([self._workdir])
            memory.trim()  # a page reads all rows of the run, and fits curves
        except (OSError, ValueError) as error:
            # On a full disk the run ends with its next row, and reports it.
            if getattr(error, "errno", None) not in files.FULL:
                self._say(error)
        except Exception as error:  # noqa: BLE001 (a fault of ours must not go unheard)
            self._say(f"{type(error).__name__}: {error}")

    def _say(self, why: object) -> None:
        if not self._failed:
            logging.warning("no report.html: %s; the training goes on", " ".join(str(why).split()))
        self._failed = True


def _let_training_go_first() -> None:
    with contextlib.suppress(OSError):
        if sys.platform == "linux":  # where a thread has its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)

"""The trainer's report: written at each evaluation by a thread of its own, so that training does not wait for it.

At most one page is being made; evaluations that come meanwhile ask for one more, however many they are. A page that
cannot be written (disk, a damaged row) is said once, in the log, and the training goes on. Any other exception is a
fault of ours: the thread ends with its trace on stderr, and no more pages are made until the run's end.
"""

import os
import sys
import threading
from types import TracebackType

from absl import logging

from scalerl_jax import memory
from scalerl_jax.report_page.page import write_report


class ReportWriter:
    """A context manager; leaving it waits for the page that is being made, which takes seconds at most."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self._wanted = threading.Event()
        self._closing = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def request(self) -> None:
        """There is something new to show; returns at once."""
        self._wanted.set()

    def __enter__(self) -> "ReportWriter":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: training goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closing:
                return
            try:
                write_report([self._workdir])
            except (OSError, ValueError) as error:
                if not self._failed:
                    logging.warning("no report.html: %s; the training goes on", error)
                self._failed = True
            memory.trim()  # a page reads all rows of the run, and fits curves

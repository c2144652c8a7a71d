"""The trainer's report: written at each evaluation by a thread of its own, so that training does not wait for it.

At most one page is being made; evaluations that come meanwhile ask for one more, however many they are. A page that
cannot be made (disk, a damaged row, a fault of ours) is said once, in one line of the log, and the training goes on;
the next one is tried all the same.
"""

import contextlib
import os
import sys
import threading
from types import TracebackType

from absl import logging

from scalerl_jax.report.page import write_report
from scalerl_jax.system import files, memory


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
        try:
            self._thread.start()
        except RuntimeError as error:  # the machine has no room for one more
            self._say(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            if sys.platform == "linux":  # where a thread has a priority of its own: training goes first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closing:
                return
            try:
                write_report([self._workdir])
                memory.trim()  # a page reads all rows of the run, and fits curves
            except (OSError, ValueError) as error:
                # On a full disk the run ends with its next row, and says so.
                if getattr(error, "errno", None) not in files.FULL:
                    self._say(error)
            except Exception as error:  # noqa: BLE001 (a fault of ours must not end this thread unheard)
                self._say(f"{type(error).__name__}: {error}")

    def _say(self, why: object) -> None:
        if not self._failed:
            logging.warning("no report.html: %s; the training goes on", " ".join(str(why).split()))
        self._failed = True

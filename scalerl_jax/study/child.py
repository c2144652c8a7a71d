"""A member or a warm start as a process: the command that a user would type, on its share of the machine.

It runs in a session of its own: Ctrl-C goes to the study alone, which then asks it to stop, once. Its standard input is
a pipe whose other end the study holds, so it saves and leaves however the study ends (--exit_with_parent).
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from scalerl_jax.study.shares import Share

_TAIL = 4096  # bytes of a log that hold its last line


class Child:
    def __init__(self, command: Sequence[str], *, log: str, share: Share, environment: Mapping[str, str]):
        """Starts it; what it says is appended to the file `log`. Raises OSError."""
        self.share = share
        self._log = log
        os.makedirs(os.path.dirname(log), exist_ok=True)
        with open(log, "ab") as output, _on(share.cores):
            self._begin = output.tell()
            self._process = subprocess.Popen(
                [*command, "--exit_with_parent"],
                stdin=subprocess.PIPE,  # the life line: nothing is ever written to it
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **share.environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def ended(self) -> int | None:
        """Its exit code, below 0 for a signal; None: it runs."""
        code = self._process.poll()
        if code is not None and self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def ask_to_stop(self) -> None:
        """It saves, and leaves when it has."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait()

    def last_line(self) -> str:
        """Of what it said since it was started."""
        with open(self._log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, size - _TAIL))
            lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else f"it said nothing (exit code {self._process.poll()})"


@contextlib.contextmanager
def _on(cores: frozenset[int]) -> Iterator[None]:
    """What this thread starts meanwhile begins on these cores."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

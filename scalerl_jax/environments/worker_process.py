"""A worker: a small process without jax that makes environments from the run's config. Both of its sides are here.

    this process                                   the worker
    WorkerProcess(["python", "-m", MODULE])        begin(): a private copy of the connection, and limits
    exchange(first_line(config))                   it makes environments, then ready() or {"error": line}
    exchange(line), ...                            one line in reply to each line
    end()                                          the kernel also kills it with the thread that started it

The connection is a Unix socket, which is the worker's standard input and output. The config goes through it and not
on the command line, which any user can read.
"""

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, TextIO

from scalerl_jax import config_io
from scalerl_jax.config import Config
from scalerl_jax.environments import parts

START_SECONDS = 300.0  # by clock: importing sympy on a busy machine
START_TRIES = 6
ENDING_SECONDS = 10.0  # to wait for a killed process; one that the kernel does not release by then is abandoned
# A worker scores one answer at a time, and threads of loaded libraries count towards its memory limit.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_SAME_ORDER = {"PYTHONHASHSEED": "0"}  # the same order of sets in every worker, for reproducible results
_MOST_SECONDS = 2.0**20  # of a socket's timeout, which the system counts in milliseconds of 31 bits
_PR_SET_PDEATHSIG = 1


# ---- this process


def worker_environment() -> dict[str, str]:
    """Variables of a process that makes environments: it finds this package however the trainer found it."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, **_ONE_THREAD, **_SAME_ORDER, "PYTHONPATH": path}


def first_line(config: Config, **more: Any) -> str:
    """The line that `begin` reads."""
    return json.dumps({"config": config_io.to_json(config), "parent": os.getpid(), **more})


def exchange(connection: socket.socket, line: str, seconds: float) -> bytes:
    """Writes a line and reads one, within `seconds` by clock.

    Raises EOFError at the end of the connection, and OSError: TimeoutError, or ConnectionError if it cannot be written.
    """
    seconds = min(seconds, _MOST_SECONDS)
    end, reply = time.monotonic() + seconds, b""
    connection.settimeout(seconds)
    connection.sendall(line.encode() + b"\n")
    while not reply.endswith(b"\n"):
        connection.settimeout(max(0.01, end - time.monotonic()))
        data = connection.recv(65_536)
        if not data:
            raise EOFError
        reply += data
    return reply


class WorkerDied(Exception):
    """The worker ended without a reply, or is stuck."""

    def __init__(self, *, ended: bool = True):
        super().__init__()
        self.ended = ended


class WorkerProcess:
    """A running worker. Raises OSError if it cannot be started."""

    def __init__(self, command: list[str]):
        self.socket, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end); it writes to it only until it is ready
        try:
            with theirs:
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._errors,
                    env=worker_environment(),
                    start_new_session=True,  # only the trainer gets Ctrl-C; it may still need scores while it saves
                )
        except BaseException:
            self.socket.close()
            self._errors.close()
            raise

    def exchange(self, line: str, seconds: float) -> bytes:
        """Writes a line and reads one; its limit holds for nothing else that is sent through the socket.

        Raises WorkerDied if none arrives within `seconds` by clock.
        """
        try:
            reply = exchange(self.socket, line, seconds)
        except TimeoutError:
            raise WorkerDied(ended=False) from None
        except (EOFError, ConnectionError):
            raise WorkerDied from None
        self.socket.settimeout(None)
        return reply

    def last_stderr_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self) -> None:
        """Kills the process and its children, and ends an exchange of another thread: what a child that has left their
        group keeps open is not waited for."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # it is closed
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self, *, by_itself: bool = False) -> int | None:
        """Kills the process and returns its exit code, or None if it has not ended in time.

        by_itself: the process closed its socket, so first wait for it to exit by itself.
        """
        for killed in (False, True) if by_itself else (True,):
            if killed:
                self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING_SECONDS)
        code = self.process.returncode
        self.socket.close()
        self._errors.close()
        return code


# ---- the worker


def die_with_parent() -> None:
    """The kernel sends SIGKILL when the thread that started this process ends: a thread of the pool, which lives as
    long as the pool. If it ended before this call there is no signal; the caller must check that (getppid)."""
    if sys.platform == "linux":
        died = [ctypes.c_ulong(given) for given in (signal.SIGKILL, 0, 0, 0)]
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, *died):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def memory_bytes(config: Config) -> int:
    """Limit of a worker's address space."""
    return max(of_part.environment.verifier_memory_bytes for of_part in parts.configs(config).values())


def begin() -> tuple[TextIO, TextIO, Config, dict[str, Any]]:
    """(lines to read, lines to write, the run's config, all fields of the first line) of a worker that has started.

    Ends the process if its parent has ended before die_with_parent. A library that reads stdin or prints does not
    interfere with the lines.
    """
    die_with_parent()
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    _silence(0, 1)
    logging.disable(logging.CRITICAL)  # math-verify logs every text it cannot read
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    first = json.loads(questions.readline() or "{}")
    if first.get("parent") != os.getppid():
        os._exit(0)
    config = config_io.from_json(first["config"])
    # Limits the address space, and disables core files; a size that the machine does not accept is skipped.
    for kind, size in ((resource.RLIMIT_AS, memory_bytes(config)), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (size, size))
    return questions, replies, config, first


def ready(replies: TextIO) -> None:
    """Replies to the first line; from here on nothing is written to stderr."""
    replies.write('{"ready": true}\n')
    _silence(2)


def _silence(*descriptors: int) -> None:
    with open(os.devnull, "r+b") as nowhere:
        for descriptor in descriptors:
            os.dup2(nowhere.fileno(), descriptor)

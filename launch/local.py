"""Generators on this machine, as child processes that are kept alive.

Guarantees:
1. `addresses` hold as long as the object lives: a server that dies is restarted on the same port, after a pause that
   doubles with every early death (a server that ran for STEADY_SECONDS restarts after the shortest pause).
2. No server outlives its parent, not even one killed with SIGKILL: each reads a pipe whose only other end the parent
   holds, and exits at end of file (`scalerl-serve --exit_with_parent`). Processes that a server has started (vLLM's
   engine and workers) are gone before its replacement starts.
3. A server's output is appended to <workdir>/logs/server-<i>.log; its port is in <workdir>/servers/<i>.port.
4. A server that fails its first start ends the run, with the last line of its log: that is a mistake to fix (a bad
   model folder), not a fault to survive.

Each server gets `threads` XLA threads, so that the processes of one machine share its cores rather than fight for
them; starting.py decides how they share its GPUs. A server has its own process group: Ctrl-C goes to the trainer
alone, which then stops the servers.

Left out on purpose: this neither speaks gRPC nor knows whether a server is healthy. The trainer's fleet checks that,
as it does for unsupervised servers.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from scalerl_jax.contract import limits

STEADY_SECONDS = 60.0  # a server that ran this long had no start-up fault
LONGEST_PAUSE = 30.0  # seconds before a server that keeps dying is restarted
STOP_SECONDS = 5.0  # from asking a server to stop until it is killed, unless its engine needs longer
MARGIN_SECONDS = 3.0  # added to the time that a server needs to stop
DESCENDANT_SECONDS = 12.0  # for the child processes of a dead server to end (vLLM cleans up for 10)
KILLED_SECONDS = 2.0  # for killed processes to disappear
SPAWN_TRIES = 8  # failed spawns in a row, with doubling pauses, before a server is given up
_POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


class StartError(RuntimeError):
    """A server died or timed out before it first served, or cannot be restarted. The message is one line."""


@dataclasses.dataclass(frozen=True)
class Times:
    """In seconds."""

    start: float = 600.0  # until the slowest server must serve
    first_pause: float = 0.5  # before a server that died is restarted; doubled for each further early death
    stop: float = STOP_SECONDS  # from asking a server to stop until it is killed, see stop_seconds()


def server_environment(threads: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server that computes on `threads` cores (on a CPU; accelerators are not concerned).

    Args:
        threads: at least 1.
        base: the environment to start from; by default this process's.
    """
    environment = dict(os.environ if base is None else base)
    environment["NPROC"] = str(threads)  # the size of XLA's thread pools on a CPU
    for library in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[library] = str(threads)
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise every server is bound to the machine's first cores
    environment["PYTHONUNBUFFERED"] = "1"  # so that the log has its last lines when a server dies
    return environment


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stop_seconds(engine: str) -> float:
    """Seconds from asking a server of this engine to stop until it is killed."""
    return limits.STOP_SECONDS[engine] + MARGIN_SECONDS


class LocalServer:
    """One supervised process. Its thread waits for its end and restarts it."""

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], workdir: str, first_pause: float
    ):
        self.index = index
        self.port_file = os.path.join(workdir, "servers", f"{index}.port")
        self.log_file = os.path.join(workdir, "logs", f"server-{index}.log")
        self.port = 0  # chosen by the system at the first start, kept from then on
        self.starts = 0  # 1 + number of restarts
        self.process: subprocess.Popen[bytes] | None = None  # the current or last one
        self._command = list(command)
        self._environment = dict(environment)
        self._first_pause = first_pause
        self.failure: StartError | None = None  # why supervision ended
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # no process is started once stopping is set
        self._thread = threading.Thread(target=self._supervise, name=f"local-server-{index}", daemon=True)

    def start(self) -> None:
        try:
            os.makedirs(os.path.dirname(self.port_file), exist_ok=True)
            os.makedirs(os.path.dirname(self.log_file), exist_ok=True)
            self._spawn()
        except OSError as error:
            raise StartError(f"local server {self.index} cannot be started: {error}") from error

    def wait_for_port(self, deadline: float, stopping: threading.Event) -> None:
        """Waits for the port that the first process serves on, then starts supervision. Raises StartError."""
        assert self.process is not None
        while not os.path.exists(self.port_file):
            if stopping.is_set():
                raise StartError(f"local server {self.index} was stopped before it served")
            code = self.process.poll()
            if code is not None:
                raise StartError(
                    f"local server {self.index} ended with code {code} before it served: {self._last_line()}"
                )
            if time.monotonic() > deadline:
                raise StartError(f"local server {self.index} does not serve yet, and time is up: see {self.log_file}")
            time.sleep(_POLL_SECONDS)
        with open(self.port_file, encoding="ascii") as file:
            self.port = int(file.read())
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Prevents further starts; sends SIGTERM to the running process and closes the pipe to it."""
        with self._lock:
            self._stopping.set()
        if self.process is not None:
            self.process.terminate()
            assert self.process.stdin is not None
            self.process.stdin.close()

    def stop(self, deadline: float, *, seconds: float) -> None:
        """Waits for the process to end, and kills it at the deadline. seconds: the time it had, for the log."""
        assert self._stopping.is_set()
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("local server %d did not stop within %.0f s: killed", self.index, seconds)
            self.process.kill()
            self.process.wait()
        self._end_descendants(deadline)
        if self._thread.is_alive():
            self._thread.join()

    def _spawn(self) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            if os.path.exists(self.port_file):
                os.remove(self.port_file)
            with open(self.log_file, "ab") as output:
                self.process = subprocess.Popen(
                    [*self._command, f"--port={self.port}", f"--port_file={self.port_file}", "--exit_with_parent"],
                    stdin=subprocess.PIPE,  # never written to; the server exits when it closes
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
            self.starts += 1

    def _end_descendants(self, deadline: float) -> None:
        """Waits for the child processes of the ended process; kills those left at the deadline."""
        assert self.process is not None
        group = self.process.pid  # the process leads its own process group
        with contextlib.suppress(ProcessLookupError):  # no process of the group is left
            _wait_for_group(group, deadline)
            os.killpg(group, signal.SIGKILL)
            log.warning("local server %d ended, and what it had started did not: killed", self.index)
            # A killed process needs a core to end; where no process reaps orphans they stay forever, as zombies.
            _wait_for_group(group, time.monotonic() + KILLED_SECONDS)

    def _supervise(self) -> None:
        """Runs in a thread. Keeps a fatal error for the trainer, which would otherwise wait forever for this server."""
        try:
            self._keep_alive()
        except Exception as error:  # noqa: BLE001 (raised by LocalServers.check)
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self.failure = error if isinstance(error, StartError) else StartError(
                f"local server {self.index} is not kept alive any more: {why}"
            )  # fmt: skip

    def _keep_alive(self) -> None:
        pause, born = self._first_pause, time.monotonic()
        while True:
            assert self.process is not None
            code = self.process.wait()
            if self._stopping.is_set():
                return
            self._end_descendants(time.monotonic() + DESCENDANT_SECONDS)
            if time.monotonic() - born > STEADY_SECONDS:
                pause = self._first_pause
            log.warning(
                "local server %d (127.0.0.1:%d) ended with code %d: started again in %.1f s; its log: %s",
                *(self.index, self.port, code, pause, self.log_file),
            )
            assert self.process.stdin is not None
            self.process.stdin.close()
            for attempt in range(1, SPAWN_TRIES + 1):
                if self._stopping.wait(pause):
                    return
                pause = min(2 * pause, LONGEST_PAUSE)
                try:
                    self._spawn()
                    break
                except OSError as error:  # no memory for another process, a full disk under its log
                    log.warning("local server %d cannot be started again (%s): tried again", self.index, error)
                    if attempt == SPAWN_TRIES:
                        raise StartError(f"local server {self.index} cannot be started again: {error}") from error
            born = time.monotonic()

    def _last_line(self) -> str:
        with open(self.log_file, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4096))
            lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"nothing in {self.log_file}"


def _wait_for_group(group: int, deadline: float) -> None:
    """Waits until the deadline. Raises ProcessLookupError once the process group is empty."""
    while time.monotonic() < deadline:
        os.killpg(group, 0)
        time.sleep(_POLL_SECONDS)


class LocalServers:
    """`count` supervised servers. Use as a context manager, or call close()."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        count: int,
        workdir: str,
        threads: int = 0,
        times: Times = Times(),
        stopping: threading.Event | None = None,
        environments: Sequence[Mapping[str, str]] = (),
    ):
        """Starts all servers at once and returns when each of them serves.

        Args:
            command: the command of one server, see starting.py; --port, --port_file and --exit_with_parent are added.
            count: number of servers, at least 1.
            workdir: the run's folder, which gets logs/ and servers/.
            threads: XLA threads of each server; 0: this machine's cores divided by `count`, at least 1.
            stopping: if another thread sets it, servers that do not serve yet are stopped.
            environments: variables to add to each server's environment (its GPU), in order; may be empty.

        Raises:
            StartError: one of them ended or did not serve in time; all are stopped by then.
        """
        self._times = times
        if count < 1:
            raise ValueError(f"count={count}: at least one local server is needed")
        if threads < 0:
            raise ValueError(f"threads={threads}: must be 0 or more")
        common = server_environment(threads or max(1, cores() // count))
        own = environments or [{}] * count
        self.servers = [
            LocalServer(i, command, {**common, **extra}, os.path.abspath(workdir), times.first_pause)
            for i, extra in zip(range(count), own, strict=True)
        ]
        deadline = time.monotonic() + times.start
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                server.wait_for_port(deadline, stopping or threading.Event())
        except BaseException:  # Ctrl-C during the start too: no server is left behind
            self.close()
            raise

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each server, the same for as long as this object lives."""
        return tuple(f"127.0.0.1:{server.port}" for server in self.servers)

    def check(self) -> None:
        """Raises StartError if a server has ended and will not be restarted."""
        for server in self.servers:
            if server.failure is not None:
                raise server.failure

    def close(self) -> None:
        """Stops every server and waits for it; servers that do not stop in time are killed."""
        deadline = time.monotonic() + self._times.stop
        for server in self.servers:
            server.ask_to_stop()
        for server in self.servers:
            server.stop(deadline, seconds=self._times.stop)

    def __enter__(self) -> "LocalServers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

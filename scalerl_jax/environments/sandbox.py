"""Runs an untrusted program in a sandbox of namespaces (bubblewrap), a system call filter and limits.

    own namespaces    processes, network (none), IPC, host name, cgroups; also user, if this process is not root
    files             Python and the C library, read-only; empty scratch folders /tmp and /dev/shm; no /proc, in /dev
                      only null, zero and urandom. open and os.open map /dev/stdin and similar paths to descriptors
    rights            no capability; no new privileges; as root: a separate user id, unused on this machine, which also
                      makes the namespaces if root may not (in a container)
    system calls      system_calls.py
    limits            wall-clock time, CPU time, memory, processes, open files, output, size and number of files

Programs are Python, run by this process's base interpreter with its standard library and nothing else.

A `Sandbox` is for one program and may run it several times, each time in a fresh process (sandbox_inside.py), with a
standard input or with a function's arguments. Nothing persists between runs: processes that a run started are killed
when it ends, and if it leaves files, the next run gets a new sandbox. With keeps_files only the files persist; a limit
then ends only the run, and the middle of a long output is left out.

Trust: every output of a sandbox is only a claim of the program. Expected results never enter the sandbox; they are
compared outside. So a program that takes over everything inside can claim anything, but gains nothing that it could not
have printed. `check` tries at the start of a run whether sandboxes confine programs on this machine.

Memory: each process has a limit of address space, and the sum over all processes is checked every MEMORY_CHECK_SECONDS:
for that long several processes may use more. Files in the scratch folders are limited in size: /tmp to output_bytes,
/dev/shm to 1 / SHARED_PART of the memory. No cgroup is needed, which a container usually cannot make.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import marshal
import math
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Literal

from scalerl_jax.config import SandboxConfig
from scalerl_jax.environments import sandbox_command
from scalerl_jax.environments.system_calls import filter_program

START_SECONDS = 60.0  # by clock, on a busy machine
START_TRIES = 4
PAUSE_SECONDS = 0.5  # before a start is retried, doubled each time
MEMORY_CHECK_SECONDS = 0.05  # interval between checks of the memory in use
ENDING_SECONDS = 10.0
OPEN_FILES = 64  # each end of a pair of sockets holds 200 KB of kernel memory that no other limit counts
SHARED_PART = 4  # /dev/shm gets 1 / SHARED_PART of the memory, for multiprocessing's locks and shared memory
ENTRIES = 10_000  # as in sandbox_inside.py
SHOWN_BYTES = 2**16  # kept of an output whose middle may be left out

Kind = Literal["ended", "timeout", "memory", "output", "crashed"]


class SandboxLost(Exception):
    """No sandbox can be started any more, which is not a program's fault; the message is one line."""


@dataclasses.dataclass(frozen=True)
class ProgramResult:
    """The result of a run. All fields except `kind` and `why` are claims of the program."""

    kind: Kind
    output: bytes  # standard output
    reply: bytes  # the function's result as JSON; b"" if it did not return
    why: str  # a short reason; "" if the program ended by itself
    exit_code: int | None = None  # negative: number of the signal that ended it; None: a limit ended it


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one run, from SandboxConfig."""

    seconds: float
    memory_bytes: int
    processes: int
    output_bytes: int

    @classmethod
    def of(cls, config: SandboxConfig) -> "Limits":
        return cls(config.seconds, config.memory_bytes, config.processes, config.output_bytes)


class Sandbox:
    """A sandbox for one program. A context manager; nothing remains on the machine when it exits.

    Args:
        program: Python code.
        limits: of each run.
        function: the function to call, also a method of `Solution`; "": the program is a script that reads stdin.
        names: Python code that is executed before it, such as `from typing import List`.
        keeps_files: files persist from run to run, while `running`.
        folders: folders of this machine that it may read.
    """

    def __init__(
        self, program: str, limits: Limits, *, function: str = "", names: str = "", keeps_files: bool = False,
        folders: Sequence[str] = (),
    ):  # fmt: skip
        self._program, self._limits, self._function, self._names = program, limits, function, names
        self._keeps_files, self._folders = keeps_files, folders
        self._running: _RunningProgram | None = None

    @property
    def running(self) -> bool:
        """Whether it is started; with keeps_files, the files of the runs so far exist as long as it is."""
        return self._running is not None

    def run(self, given: bytes, *, seconds: float | None = None, shown: int = SHOWN_BYTES) -> ProgramResult:
        """Runs the program once. given: its standard input, or the function's arguments as a JSON list.

        seconds: wall-clock limit, if lower than the sandbox's. shown: bytes kept of the output, with keeps_files.
        Raises SandboxLost.
        """
        seconds = self._limits.seconds if seconds is None else min(seconds, self._limits.seconds)
        if self._running is None:
            self._running = self._start()
        # Input may use marshal; output may not, since it is not trusted.
        data = marshal.dumps(json.loads(given)) if self._function else given
        outcome, again = self._running.run(data, seconds, self._limits, shown=shown if self._keeps_files else 0)
        if not again:
            self.close()
        return outcome

    def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> "_RunningProgram":
        """Starts the sandbox; retries if that fails, or during a temporary shortage of resources."""
        user = sandbox_command.user()
        setup = {
            "program": self._program,
            "names": self._names,
            "function": self._function,
            "limits": self._limits_inside(user.runs),
            "user": user.runs,
        }
        why = ""
        for attempt in range(START_TRIES):
            if attempt:
                time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                return _RunningProgram(marshal.dumps(setup), limits=self._limits, user=user, folders=self._folders)
            except _NotStarted as error:
                why = str(error)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                    raise
                why = str(error)
        raise SandboxLost(f"bwrap cannot make a sandbox here: {why}{sandbox_command.forbidden()}")

    def _limits_inside(self, user: int) -> dict[str, int]:
        """Limits of each process in the sandbox, by the names of the resource module."""
        limits = {
            "RLIMIT_AS": self._limits.memory_bytes,
            "RLIMIT_CPU": math.ceil(self._limits.seconds) + 1,
            # The scratch folders have separate size limits.
            "RLIMIT_FSIZE": max(self._limits.output_bytes, self._limits.memory_bytes // SHARED_PART),
            "RLIMIT_NOFILE": OPEN_FILES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_NPROC": self._limits.processes + (0 if user else 1),  # without another user, our process counts too
        }
        for name, limit in limits.items():
            _, hard = resource.getrlimit(getattr(resource, name))
            limits[name] = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        return limits


class _NotStarted(Exception):
    """The sandbox did not start; the message is the last line of bwrap's output."""


class _RunningProgram:
    """A started sandbox, controlled over a socket; see sandbox_inside.py."""

    def __init__(self, setup: bytes, *, limits: Limits, user: sandbox_command.User, folders: Sequence[str]):
        self._control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen | None = None
        files = contextlib.ExitStack()
        try:
            files.callback(inside.close)
            setup_file, filter_file = (_sealed(data) for data in (setup, filter_program()))
            files.callback(os.close, setup_file)
            files.callback(os.close, filter_file)
            errors = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            command = sandbox_command.command(
                filter_file,
                scratch_bytes=limits.output_bytes,
                shared_bytes=limits.memory_bytes // SHARED_PART,
                as_root=user.runs != 0,
                folders=folders,
            )
            command += [str(inside.fileno()), str(setup_file)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(inside.fileno(), setup_file, filter_file),
                env={},
                start_new_session=True,
                user=user.makes or None,
                group=user.makes or None,
                extra_groups=() if user.makes else None,
            )
            inside.close()
            self._control.settimeout(START_SECONDS)
            silent = "it ended without a word"
            try:
                ready = self._control.recv(16)
            except TimeoutError:
                ready, silent = b"", f"no answer within {START_SECONDS:g} s"
            if not ready:
                self.end()
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                raise _NotStarted(lines[-1] if lines else silent)
        except BaseException:
            self.end()
            raise
        finally:
            files.close()

    def run(self, given: bytes, seconds: float, limits: Limits, *, shown: int) -> tuple[ProgramResult, bool]:
        """(outcome, whether another run may follow). shown: bytes kept of the output; 0: all, and no files are kept."""
        with contextlib.ExitStack() as files:
            input_file = _sealed(given)
            files.callback(os.close, input_file)
            ends: list[int] = []
            theirs: list[int] = []
            for _ in ("output", "error", "reply"):
                ours, their = os.pipe()
                files.callback(os.close, ours)
                ends.append(ours)
                theirs.append(their)
            try:
                socket.send_fds(self._control, [b"run"], [input_file, *theirs])
            except OSError as error:
                return ProgramResult("crashed", b"", b"", f"the sandbox has ended ({error.strerror})"), False
            finally:
                for their in theirs:
                    os.close(their)
            return self._watch(*ends, seconds=seconds, limits=limits, shown=shown)

    def _watch(
        self, output: int, error: int, reply: int, *, seconds: float, limits: Limits, shown: int
    ) -> tuple[ProgramResult, bool]:
        """Waits until the run has ended and all its output is read, or a limit is reached."""
        read: dict[int, bytearray] = {output: bytearray(), error: bytearray(), reply: bytearray()}
        control = self._control.fileno()
        poll = select.poll()
        for file in (*read, control):
            poll.register(file, select.POLLIN)
        ended = select.poll()
        ended.register(control, select.POLLIN)
        now = time.monotonic()
        end, next_check = now + seconds, now + MEMORY_CHECK_SECONDS
        status: bytes | None = None
        open_files, left_out = set(read), dict.fromkeys(read, 0)

        def outcome(
            kind: Kind, why: str, code: int | None = None, *, again: bool = False
        ) -> tuple[ProgramResult, bool]:
            if shown:
                left_out[output] += _without_middle(read[output], shown)
            if left_out[output]:
                read[output][shown // 2 : shown // 2] = b"\n... (%d bytes are left out) ...\n" % left_out[output]
            return ProgramResult(kind, bytes(read[output]), bytes(read[reply]), why, code), again

        while open_files or status is None:
            for file, _ in poll.poll(max(0.0, min(end, next_check) - time.monotonic()) * 1000 + 1):
                if file == control:
                    poll.unregister(control)
                    status = self._control.recv(64)
                    if not status:
                        return outcome("crashed", "the sandbox has ended")
                    continue
                data = os.read(file, 65_536)
                read[file] += data
                if not data:
                    poll.unregister(file)
                    open_files.discard(file)
                if shown:
                    if len(read[file]) > 2 * shown + 65_536:
                        left_out[file] += _without_middle(read[file], shown)
                elif sum(map(len, read.values())) > limits.output_bytes:
                    return outcome("output", f"more than {limits.output_bytes} bytes of output")
            now = time.monotonic()
            # If this process was stalled, the run may have ended in time unnoticed: that is no timeout.
            if status is None and now >= end and not ended.poll(0):
                return outcome("timeout", f"no end after {seconds:.3g} s", again=shown > 0 and self._stop())
            if status is None and now >= next_check:
                next_check = now + MEMORY_CHECK_SECONDS
                used = self._memory()
                if used > limits.memory_bytes:
                    why = f"more than {limits.memory_bytes} bytes of memory"
                    return outcome("memory", why, again=shown > 0 and self._stop())
        assert status is not None
        code, entries = (int(number) for number in status.split())
        if entries > ENTRIES:
            return outcome("output", f"more than {ENTRIES} files")
        code = os.waitstatus_to_exitcode(code)
        return outcome(*_ending(code, bytes(read[error])), code, again=shown > 0 or not entries)

    def _stop(self) -> bool:
        """Ends the current run. Returns whether another run may follow."""
        with contextlib.suppress(OSError):  # the sandbox has ended, or does not reply
            self._control.settimeout(ENDING_SECONDS)
            self._control.send(b"stop")
            status = self._control.recv(64)
            return bool(status) and int(status.split()[1]) <= ENTRIES
        return False

    def _memory(self) -> int:
        """Sum of the resident bytes of all its processes; shared memory counts once per process."""
        assert self._process is not None
        page, total = os.sysconf("SC_PAGE_SIZE"), 0
        todo = _children(self._process.pid)
        while todo:
            process = todo.pop()
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                with open(f"/proc/{process}/statm", "rb") as file:
                    total += int(file.read().split()[1]) * page
            todo += _children(process)
        return total

    def end(self) -> None:
        """Kills all its processes, and waits until they are gone."""
        self._control.close()
        process, self._process = self._process, None
        if process is None:
            return
        ended = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            # Killing its first process kills all others; bwrap then ends.
            for kill_parent in (False, True):
                end = time.monotonic() + ENDING_SECONDS
                while process.poll() is None and time.monotonic() < end:
                    for child in [process.pid] if kill_parent else _children(process.pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(child, signal.SIGKILL)
                    poll.poll(500)
        finally:
            os.close(ended)


def _ending(code: int, error: bytes) -> tuple[Kind, str]:
    """(kind, why) of an exit code and the standard error."""
    if code == 0:
        return "ended", ""
    lines = error.decode(errors="replace").strip().splitlines()
    last = lines[-1][:200] if lines else ""
    if code == -signal.SIGXCPU:
        return "timeout", "out of CPU time"
    if code < 0:
        return "crashed", f"ended by {signal.Signals(-code).name if -code in set(signal.Signals) else -code}"
    if code == 1 and last.startswith("MemoryError"):
        return "memory", "MemoryError"
    return "crashed", f"{last or 'no message'} (exit code {code})"


def _without_middle(data: bytearray, most: int) -> int:
    """Keeps the first and last bytes of `data`, `most` in all; returns how many were removed."""
    count = max(0, len(data) - most)
    del data[most // 2 : most // 2 + count]
    return count


def _sealed(data: bytes) -> int:
    """A descriptor of a read-only file in memory, positioned at its beginning."""
    file = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(data)
        os.lseek(file, 0, os.SEEK_SET)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(file)
        raise
    return file


def _children(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


# Tries forbidden operations; returns the first that succeeds, or "".
_PROBE = """
import errno, os, socket, time
def probe(processes):
    try:
        socket.socket()
        return "a program may open sockets"
    except PermissionError:
        pass
    if os.path.exists("/etc") or os.path.exists("/proc"):
        return "a program sees the machine's files"
    for started in range(processes + 1):
        try:
            if os.fork() == 0:
                time.sleep(60)
        except BlockingIOError:
            return "" if started or processes == 1 else "a program cannot start processes"
    return "a program may start any number of processes: a user who is not root needs Linux 5.14 or newer"
"""


@functools.cache
def check(limits: Limits) -> None:
    """Raises ValueError, one line, if no sandbox can be made on this machine, or it does not confine programs."""
    if sys.platform != "linux":
        raise ValueError(f"programs are run in a sandbox that needs Linux, this is {sys.platform}")
    filter_program()
    if shutil.which("bwrap") is None:
        raise ValueError(
            "programs are run in a sandbox of bubblewrap, and there is no bwrap on PATH: apt-get install bubblewrap"
        )
    version = sandbox_command.version()
    if version < sandbox_command.OLDEST:
        needed, there = (".".join(map(str, numbers)) for numbers in (sandbox_command.OLDEST, version))
        raise ValueError(f"programs are run in a sandbox of bubblewrap {needed} or newer, this is {there}")
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise ValueError("the sandbox needs /proc/PID/task/TID/children: a kernel with CONFIG_PROC_CHILDREN")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY and limits.memory_bytes > hard:
        raise ValueError(
            f"config.environment.sandbox.memory_bytes={limits.memory_bytes}: this process itself is limited to {hard} "
            "bytes of address space (ulimit -v): lower the first or raise the second"
        )
    patient = dataclasses.replace(limits, seconds=START_SECONDS)
    with Sandbox(_PROBE, patient, function="probe") as sandbox:
        try:
            outcome = sandbox.run(json.dumps([limits.processes]).encode())
        except SandboxLost as lost:
            raise ValueError(str(lost)) from None
    if outcome.kind != "ended":
        raise ValueError(f"the sandbox does not work here: {outcome.why}")
    found = json.loads(outcome.reply)
    if found:
        raise ValueError(f"the sandbox does not hold here: {found}")

"""Starts programs of this tree by fork, from a process that has their imports: those take most of a start.

    start("-m", module, *arguments, stdout=..., ...)   as `python -m module arguments`; a process of its own, with the
    start("-c", program, *arguments, stdout=..., ...)   interface of subprocess.Popen

Each start is a fork of a process that has imported what the commands import and computed nothing: no thread, no device,
no flag. Its environment, folder and standard streams are the caller's. What a fork could not follow (another `JAX_`
variable, a path of packages) is started in the ordinary way, and so is everything where forks cannot be watched.

Protocol, on a Unix socket, a connection a start: a JSON object with the three streams as file descriptors; the answers
are {"pid": n} and, at its end, {"code": n, "cpu_seconds": x}. Closing the connection leaves the process alone, or
kills it where "ends_with_connection" is in the request.

A program that a fork runs, such as a trainer that starts servers, has forked_python.py for its sys.executable.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pathlib
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Self

from tests.support.paths import ROOT

ADDRESS = "TESTS_FORK_SERVER"  # the variable with the path of the socket of the one that is running
SUPPORTED = hasattr(os, "pidfd_open") and hasattr(signal, "SIGCHLD")

# They bring nearly all that commands and tests import. None may define flags, keep the environment or start a thread;
# what an environment lacks is left out.
_IMPORTED_FIRST = (
    "pytest", "hypothesis.strategies", "math_verify", "matplotlib.backends.backend_agg", "rich.progress", "grpc.aio",
    "scalerl_jax.environments.load", "scalerl_jax.hosts.join", "scalerl_jax.learner.trainer",
    "scalerl_jax.report.summary", "scalerl_jax.rollouts.fleet", "scalerl_jax.run.evaluations", "launch.local",
    "scalerl_jax.run.live_forecast", "scalerl_jax.scaling.commands.terminal", "rollout_server.service",
    "rollout_server.engines.jax.engine", "jaxlib.mlir.dialects.mhlo", "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
)  # fmt: skip
# What chat templates and the comparisons with transformers import: many forks of the runner do, few of another server.
OF_TRANSFORMERS = (
    "transformers.utils.chat_template_utils", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
# Of Python's own and JAX's variables a fork follows these; another one in the caller's environment needs a new process.
_FOLLOWED = {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONPATH", "JAX_PLATFORMS", "PYTHONHASHSEED"}
HASH_SEED = "0"  # of all forks but those that ask for another, which have a server of their own
_LARGEST_REQUEST = 2**17  # bytes
_STREAMS = 3


# ---- the server ------------------------------------------------------------------------------------------------------


def import_all(*more: str) -> None:
    """What commands and tests import, and `more`. Nothing of it may start a thread or define a flag."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in (*_IMPORTED_FIRST, *more):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    from absl import flags

    ours = [name for name in flags.FLAGS.flags_by_module_dict() if name.startswith(("scalerl_jax", "rollout_server"))]
    assert not ours, f"{ours} define flags when they are imported"
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page


class ForkServer:
    """Forks on request and watches what it forked. `poll` serves what has come, from the loop of its owner."""

    def __init__(self, path: str):
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(path)
        self._listening.listen(64)
        self._stand_in = os.path.join(os.path.dirname(path), "python")
        _write_stand_in(self._stand_in)
        self._cpu_seconds: Counter[int] = Counter()  # of forks that have ended, by the fork that started them
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def poll(self, seconds: float | None) -> None:
        for key, _ in self.selector.select(seconds):
            key.data(key.fileobj)

    def fork(self, child: Callable[[], None], ended: Callable[[int, float], None]) -> int:
        """The process id of a fork that runs `child` and ends; `ended` gets its exit code and its CPU seconds."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                self._forget()
                child()
                code = 0
            except SystemExit as leaving:
                code = _exit_code(leaving)
            except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
                sys.excepthook(*sys.exc_info())
            end(code)
        watched = os.pidfd_open(pid)

        def gone(_: Any) -> None:
            self.selector.unregister(watched)
            os.close(watched)
            _, status, spent = os.wait4(pid, 0)
            ended(os.waitstatus_to_exitcode(status), spent.ru_utime + spent.ru_stime)

        self.selector.register(watched, selectors.EVENT_READ, gone)
        return pid

    def _forget(self) -> None:
        """In a fork: what is the server's own is closed."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                key.fileobj.close()  # type: ignore[attr-defined]
        self.selector.close()

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        self.selector.register(connection, selectors.EVENT_READ, self._serve)

    def _serve(self, connection: socket.socket) -> None:
        data, streams, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST, _STREAMS)
        self.selector.unregister(connection)
        if not data:
            connection.close()
            return
        request = json.loads(data)
        parent = _parent_of_peer(connection)

        def ended(code: int, cpu_seconds: float) -> None:
            if request.get("ends_with_connection") and connection in self.selector.get_map():
                self.selector.unregister(connection)
            cpu_seconds += self._cpu_seconds.pop(pid, 0.0)
            self._cpu_seconds[parent] += cpu_seconds
            with contextlib.suppress(OSError), connection:  # the one who asked may be gone
                connection.send(json.dumps({"code": code, "cpu_seconds": cpu_seconds}).encode())

        def closed(_: socket.socket) -> None:
            self.selector.unregister(connection)
            os.kill(pid, signal.SIGKILL)

        pid = self.fork(lambda: _become(request, streams, connection, self._stand_in), ended)
        for stream in streams:
            os.close(stream)
        if request.get("ends_with_connection"):
            self.selector.register(connection, selectors.EVENT_READ, closed)


def _parent_of_peer(connection: socket.socket) -> int:
    """Of forked_python.py: the fork that started it."""
    peer = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    try:
        return int(pathlib.Path(f"/proc/{peer}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it is gone
        return 0


def _write_stand_in(path: str) -> None:
    source = (ROOT / "tests" / "support" / "forked_python.py").read_text()
    with open(path, "w") as file:
        file.write(f"#!{sys.executable} -IS\n" + source.replace("REAL PYTHON", sys.executable))
    os.chmod(path, 0o700)


def _exit_code(leaving: SystemExit) -> int:
    if isinstance(leaving.code, str):
        print(leaving.code, file=sys.stderr)
        return 1
    return int(leaving.code or 0)


def end(code: int, *, join_threads: bool = True) -> None:
    """As a program ends: its own exit handlers run, its output is flushed."""
    import atexit
    import threading

    if join_threads:  # those that are no daemons
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


def _become(request: dict[str, Any], streams: Sequence[int], connection: socket.socket, stand_in: str) -> None:
    """In the fork: the program that is asked for."""
    if request["new_session"]:
        os.setsid()
    if "cores" in request:
        os.sched_setaffinity(0, request["cores"])
    with contextlib.suppress(OSError):  # the one who asked may be gone
        connection.send(json.dumps({"pid": os.getpid()}).encode())  # not before it leads its session
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(_STREAMS, 256)
    os.chdir(request["folder"])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    command, environment = [sys.executable, *request["arguments"]], request["environment"]
    if not _can_follow(environment):
        os.execve(sys.executable, command, environment)
    if "jax" in sys.modules and environment.get("JAX_PLATFORMS") != os.environ.get("JAX_PLATFORMS"):
        sys.modules["jax"].config.update("jax_platforms", environment.get("JAX_PLATFORMS"))
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(line_buffering=False, write_through="PYTHONUNBUFFERED" in environment)  # type: ignore[union-attr]
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    sys.path[0] = request["folder"]
    sys.orig_argv = command
    sys.executable = stand_in
    _, kind, program, *arguments = command
    if kind == "-m":
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))


def _seed(environment: Mapping[str, str]) -> str:
    return environment.get("PYTHONHASHSEED", HASH_SEED)


def _can_follow(environment: Mapping[str, str]) -> bool:
    def others(names: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in names.items()
            if name.startswith(("PYTHON", "JAX_", "LD_", "MALLOC_")) and name not in _FOLLOWED
        }

    paths = environment.get("PYTHONPATH", str(ROOT)).split(os.pathsep)
    same_hashes = _seed(environment) == _seed(os.environ)
    return same_hashes and others(environment) == others(os.environ) and set(paths) <= {str(ROOT), ""}


# ---- the client ------------------------------------------------------------------------------------------------------


class Forked:
    """A process that a fork server started, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, connection: socket.socket, stdin: IO[bytes] | None, arguments: Sequence[str]):
        self._connection, self.stdin, self.args = connection, stdin, arguments
        self.returncode: int | None = None
        self.pid = int(self._answer()["pid"])

    def _answer(self) -> dict[str, Any]:
        answer = self._connection.recv(_LARGEST_REQUEST)
        assert answer, "the fork server is gone"
        return json.loads(answer)

    def poll(self) -> int | None:
        return self._collect(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._collect(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(list(self.args), timeout)
        return code

    def _collect(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(seconds)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                answer = self._answer()
                self.returncode = int(answer["code"])
                _spent.append(answer["cpu_seconds"])
                self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdin is not None:
            self.stdin.close()
        self.wait()


_spent: list[float] = []


def cpu_seconds() -> float:
    """Of the processes that were started here and are known to have ended."""
    return sum(_spent)


_own: dict[str, tuple[subprocess.Popen[bytes], str]] = {}  # hash seed: a server that this process has begun, its path


def start(
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    folder: Any = ROOT,
    stdin: int = subprocess.DEVNULL,
    stdout: IO[Any],
    stderr: IO[Any],
    new_session: bool = False,
) -> Forked | subprocess.Popen[bytes]:
    """`python arguments` in `folder`, where the first of them is -m or -c; else a program and its arguments.

    stdin: subprocess.DEVNULL or subprocess.PIPE.
    """
    given = [str(argument) for argument in arguments]
    environment = dict(os.environ if environment is None else environment)
    of_python = given[0] in ("-m", "-c")
    if not (of_python and SUPPORTED):
        return subprocess.Popen(
            [sys.executable, *given] if of_python else given, cwd=folder, env=environment, stdin=stdin, stdout=stdout,
            stderr=stderr, start_new_session=new_session,
        )  # fmt: skip
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(_address(_seed(environment)))
    request = {"arguments": given, "environment": environment, "folder": str(folder), "new_session": new_session}
    writing = None
    if stdin == subprocess.PIPE:
        reading, writing = os.pipe()
    else:
        reading = os.open(os.devnull, os.O_RDONLY)
    try:
        socket.send_fds(connection, [json.dumps(request).encode()], [reading, stdout.fileno(), stderr.fileno()])
    finally:
        os.close(reading)
    return Forked(connection, None if writing is None else os.fdopen(writing, "wb", buffering=0), given)


def _address(seed: str) -> str:
    """Of the runner's server, or of one for this process and those that it starts, which ends with this process."""
    if seed == HASH_SEED and ADDRESS in os.environ:
        return os.environ[ADDRESS]
    if seed not in _own:
        path = str(pathlib.Path(tempfile.mkdtemp(prefix="scalerl-fork-")) / "socket")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", path],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        _own[seed] = server, path
        if seed == HASH_SEED:
            os.environ[ADDRESS] = path
    return _own[seed][1]


def _serve_until_stdin_ends(path: str) -> None:
    import_all()
    server, ends = ForkServer(path), []
    server.selector.register(os.dup(0), selectors.EVENT_READ, ends.append)
    print("ready", flush=True)
    while not ends:
        server.poll(None)
    shutil.rmtree(os.path.dirname(path))


if __name__ == "__main__":
    _serve_until_stdin_ends(sys.argv[1])

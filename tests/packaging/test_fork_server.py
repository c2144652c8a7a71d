"""Programs that tests start by fork are as those that Python starts: streams, codes, signals, environment.

Costs ten forks and two interpreters, three seconds.
"""

import os
import pathlib
import signal
import subprocess
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.processes import run_python
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(not fork_server.SUPPORTED, reason="forks cannot be watched here")

TELLS = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ.get('WHAT')); print('err', file=sys.stderr)"


@pytest.mark.parametrize("forked", [True, False])
def test_arguments_streams_folder_and_environment(tmp_path: pathlib.Path, forked: bool) -> None:
    environment = {**os.environ, "WHAT": "this", **({} if forked else {"JAX_ENABLE_X64": "1"})}
    program = f"{TELLS}; print('jax' in sys.modules); import jax; print(jax.config.jax_enable_x64)"
    done = run_python("-c", program, "a", "b", folder=tmp_path, environment=environment)
    lines = done.stdout.splitlines()
    assert lines[0] == f"['a', 'b'] {tmp_path} this" and done.stderr == "err\n"
    assert lines[1:] == ([str(forked), str(not forked)])


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("import os; os._exit(4)", 4, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import atexit, sys; atexit.register(lambda: print('bye', file=sys.stderr))", 0, "bye\n"),
    ],
)
def test_how_it_ends(program: str, code: int, said: str) -> None:
    done = run_python("-c", program)
    assert (done.returncode, done.stderr) == (code, said)


def test_an_exception_is_told_as_python_tells_it() -> None:
    done = run_python("-c", "1 / 0")
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")


def begin(tmp_path: pathlib.Path, program: str) -> Any:
    with open(tmp_path / "log", "w") as log:
        return fork_server.start("-c", program, stdin=subprocess.PIPE, stdout=log, stderr=log, new_session=True)


def test_signals_and_the_end_of_stdin(tmp_path: pathlib.Path) -> None:
    waits = begin(tmp_path, "import sys; sys.stdin.read()")
    assert waits.poll() is None and os.getsid(waits.pid) == waits.pid
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0.01)
    waits.stdin.close()
    assert waits.wait(600) == 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        waits = begin(tmp_path, "import sys; sys.stdin.read()")
        waits.send_signal(number)
        assert waits.wait(600) == -number
        waits.stdin.close()


# A program that starts a server in the ordinary way, tells its process id, and ends it.
STARTS = """
import pathlib, subprocess, sys, time
command = [sys.executable, "-m", "tests.support.replay.serve", "--engine=replay", "--port=0", "--port_file=port"]
server = subprocess.Popen([*command, "--exit_with_parent"], stdin=subprocess.PIPE)
while not pathlib.Path("port").exists():
    assert server.poll() is None
    time.sleep(0.01)
server.{end}()
print(server.wait())
"""


@pytest.mark.parametrize(("end", "code"), [("terminate", 0), ("kill", -9), ("stdin.close", 0)])
def test_what_a_fork_starts_is_a_fork_that_ends_as_it_is_told(tmp_path: pathlib.Path, end: str, code: int) -> None:
    done = run_python("-c", STARTS.format(end=end), folder=tmp_path)
    assert done.stdout == f"{code}\n", done.stderr
    port = int((tmp_path / "port").read_text())

    def is_gone() -> bool:
        return f":{port:04X} " not in pathlib.Path("/proc/net/tcp").read_text()

    eventually(is_gone, "the server no longer listens")

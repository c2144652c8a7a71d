"""What a sandbox runs and how it ends; what it says where there can be none."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.config import SandboxConfig
from scalerl_jax.environments import sandbox, sandbox_command
from scalerl_jax.environments.sandbox import Limits, Sandbox, check
from tests.environments.sandboxes import SMALL, needs_bubblewrap, others
from tests.support.waiting import eventually

LIMITS = Limits.of(SMALL)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def run(program, given=b"", **changes):
    limits = Limits(**{**vars(LIMITS), **changes})
    with Sandbox(program, limits) as box:
        return box.run(given)


def _shown(folder):
    """Options of bubblewrap for a folder of the machine."""
    if os.path.islink(folder):
        return ["--symlink", os.readlink(folder), folder]
    return ["--ro-bind", folder, folder] if os.path.isdir(folder) else []


@needs_bubblewrap
class TestRuns:
    def test_a_script(self):
        outcome = run("a, b = map(int, input().split())\nprint(a + b)", b"2 3\n")
        assert (outcome.kind, outcome.output, outcome.why) == ("ended", b"5\n", "")

    def test_a_function(self):
        with Sandbox(
            "def add(a, b):\n    print('noise')\n    return (a + b, {1: None})", LIMITS, function="add"
        ) as box:
            outcome = box.run(b"[2, 3]")
        assert outcome.kind == "ended" and json.loads(outcome.reply) == [5, {"1": None}]

    @settings(max_examples=15, deadline=None)
    @given(st.lists(JSON, min_size=1))
    def test_arguments_and_answers_are_values_of_json(self, values):
        with Sandbox("def f(*values):\n    return values", LIMITS, function="f") as box:
            outcome = box.run(json.dumps(values).encode())
        assert json.dumps(json.loads(outcome.reply)) == json.dumps(values)

    def test_keys_that_are_no_texts(self):
        with Sandbox("def f():\n    return {1: 2, None: 3, True: (), 1.5: -1e400}", LIMITS, function="f") as box:
            answer = json.loads(box.run(b"[]").reply)
        assert answer == json.loads(json.dumps({1: (), None: 3, 1.5: float("-inf")}))

    def test_a_method_of_solution(self):
        program = "class Solution:\n    def add(self, a, b):\n        return a + b\ndef add(a, b):\n    return 'no'"
        with Sandbox(program, LIMITS, function="add") as box:
            assert box.run(b"[2, 3]").reply == b"5"

    def test_runs_know_nothing_of_each_other(self):
        program = "import sys\nsys.seen = getattr(sys, 'seen', 0) + 1\nprint(sys.seen, input())"
        with Sandbox(program, LIMITS) as box:
            assert [box.run(b"%d\n" % i).output for i in range(4)] == [b"1 %d\n" % i for i in range(4)]

    def test_the_main_block_is_run_for_scripts_only(self):
        program = "def f():\n    return __name__\nif __name__ == '__main__':\n    print('main')"
        assert run(program).output == b"main\n"
        with Sandbox(program, LIMITS, function="f") as box:
            outcome = box.run(b"[]")
        assert outcome.output == b"" and json.loads(outcome.reply) != "__main__"

    def test_threads_that_print_are_waited_for(self):
        program = (
            "import threading, time\n"
            "def main():\n    time.sleep(0.1)\n    print('late')\nthreading.Thread(target=main).start()"
        )
        assert run(program).output == b"late\n"

    def test_it_ends_as_an_interpreter_does(self):
        program = (
            "import atexit, io, sys, threading, time\natexit.register(print, 'last')\n"
            "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()\n"
            "class Slow(io.StringIO):\n    def flush(self):\n        sys.__stdout__.write(self.getvalue())\n"
            "        sys.__stdout__.flush()\nsys.stdout = Slow()\nprint('first')"
        )
        assert run(program).output == b"first\nlate\nlast\n"

    def test_what_scripts_take_for_granted(self):
        assert run("exit()").kind == "ended"
        assert run("import sys\nprint(sys.argv, len(sys.stdin.read()))", "ä\n".encode()).output == b"['program.py'] 2\n"
        assert run("import tempfile\nprint(tempfile.TemporaryFile().write(b'abc'))").output == b"3\n"
        assert run("import decimal, fractions, numbers, sqlite3, hashlib, ctypes, bz2; print(1)").output == b"1\n"
        assert run("import subprocess, sys\nprint(subprocess.call([sys.executable, '-c', 'print(1)']))").kind == "ended"

    @pytest.mark.parametrize(
        "program",
        [
            "print(open('/dev/stdin').read(), end='')",
            "import sys\nsys.stdin = open('/dev/stdin')\nprint(*map(input, ('', '')), sep='\\n')",
            "import pathlib\nprint(pathlib.Path('/dev/stdin').read_text(), end='')",
            "import os\nprint(os.read(os.open('/dev/stdin', os.O_RDONLY), 99).decode(), end='')",
            "import os\ngiven = open(file='/dev/fd/0', mode='rb').read()\n"
            "os.write(os.open(path='/dev/stdout', flags=os.O_WRONLY), given)",
            "import fileinput\nfor line in fileinput.input('/dev/stdin'):\n    print(line, end='')",
            "import io\nwith io.open('/dev/stdout', 'w') as out:\n    out.write(open(0).read())",
            "import sys\nwith open('/dev/stderr', 'w') as out:\n    out.write('x')\n"
            "sys.stdout.write(open('/proc/self/fd/0').read())",
            "class Reader:\n    opener = open\nprint(Reader().opener('/dev/stdin').read(), end='')",
        ],
    )
    def test_streams_that_have_paths(self, program):
        with Sandbox(program, LIMITS) as box:
            outcomes = [box.run(given) for given in (b"3 4\nfive\n", b"1\n2\n")]
        assert [outcome.why for outcome in outcomes] == ["", ""]
        assert [outcome.output for outcome in outcomes] == [b"3 4\nfive\n", b"1\n2\n"]

    def test_paths_that_are_no_streams(self):
        assert run("open('/tmp/a', 'w').write('b')\nprint(open('/tmp/a').read())").output == b"b\n"
        assert run("open('/dev/fd/9')").why.startswith("FileNotFoundError")
        assert run("open(1.5)").why.startswith("TypeError")

    @pytest.mark.parametrize(
        "program",
        [
            "import multiprocessing\nwith multiprocessing.Pool(2) as pool:\n    print(sum(pool.map(abs, [-3, -4])))",
            "import concurrent.futures\nwith concurrent.futures.ProcessPoolExecutor(2) as pool:\n"
            "    print(sum(pool.map(abs, [-3, -4])))",
            "import multiprocessing\nlock, total = multiprocessing.Lock(), multiprocessing.Array('d', 10**5)\n"
            "def add(number):\n    with lock:\n        total[0] += number\n"
            "made = [multiprocessing.Process(target=add, args=(n,)) for n in (3, 4)]\n"
            "for one in made:\n    one.start()\nfor one in made:\n    one.join()\nprint(int(total[0]))",
            "from multiprocessing.shared_memory import SharedMemory\nmade = SharedMemory(create=True, size=2**20)\n"
            "made.buf[0] = 7\nseen = SharedMemory(made.name)\nprint(seen.buf[0])\n"
            "seen.close()\nmade.close()\nmade.unlink()",
        ],
        ids=["pool", "executor", "lock", "shared memory"],
    )
    def test_processes_that_share(self, program):
        outcome = run(program)
        assert (outcome.kind, outcome.output) == ("ended", b"7\n"), outcome

    def test_what_they_share_is_bounded_and_gone(self):
        size = LIMITS.memory_bytes // sandbox.SHARED_PART
        program = "with open('/dev/shm/a', 'wb') as file:\n    for _ in range({}):\n        file.write(bytes(2**20))"
        assert run(program.format(size // 2**20 - 1)).kind == "ended"
        outcome = run(program.format(size // 2**20 + 1))
        assert (outcome.kind, outcome.why[:7]) == ("crashed", "OSError")
        many = "for number in range(20_000):\n    open(f'/dev/shm/{number}', 'w').close()"
        assert run(many).why == f"more than {sandbox.ENTRIES} files"
        with Sandbox("import os\nprint(os.listdir('/dev/shm'))\nopen('/dev/shm/a', 'w')", LIMITS) as box:
            assert [box.run(b"").output for _ in range(2)] == [b"[]\n"] * 2

    def test_sets_are_in_the_same_order_every_time(self):
        outputs = {run("print(*{'a', 'b', 'c', 'd', 'e'})").output for _ in range(3)}
        assert len(outputs) == 1

    def test_much_input(self):
        given = b"x" * 2**22
        assert run("import sys\nprint(len(sys.stdin.read()))", given).output == b"%d\n" % len(given)

    @pytest.mark.parametrize(
        ("program", "kind", "why"),
        [
            ("1/0", "crashed", "ZeroDivisionError: division by zero (exit code 1)"),
            ("def", "crashed", "SyntaxError: invalid syntax (exit code 1)"),
            ("exit(3)", "crashed", "no message (exit code 3)"),
            ("import os\nos.kill(os.getpid(), 11)", "crashed", "ended by SIGSEGV"),
            ("import time\ntime.sleep(600)", "timeout", "no end after 0.5 s"),
            ("x = 'x' * 10**10", "memory", "MemoryError"),
            ("while True: print('x' * 100)", "output", "more than 65536 bytes of output"),
        ],
    )
    def test_why(self, program, kind, why):
        outcome = run(program, seconds=0.5 if kind == "timeout" else LIMITS.seconds)
        assert (outcome.kind, outcome.why) == (kind, why)

    def test_memory_is_of_all_processes_together(self):
        # All of it is there for as long as the main process sleeps, and the more of them, until somebody looks.
        program = (
            "import os, time\nr, w = os.pipe()\nfor _ in range({0}):\n    if os.fork() == 0:\n"
            "        x = b'x' * (80 * 2**20)\n        os.write(w, b'x')\n        time.sleep(600)\n"
            "for _ in range({0}):\n    os.read(r, 1)\ntime.sleep({1})\nprint('done')"
        )
        assert run(program.format(1, 0.5)).kind == "ended"
        assert run(program.format(5, 600)).kind == "memory"

    def test_as_many_processes_as_the_limit_says(self):
        program = (
            "import os, time\nstarted = 0\ntry:\n    while True:\n"
            "        if os.fork() == 0:\n            time.sleep(60)\n        started += 1\n"
            "except BlockingIOError:\n    print(started)"
        )
        assert run(program, processes=5).output == b"4\n"  # and itself

    def test_one_that_ended_while_nobody_looked(self, monkeypatch):
        """As where the machine stands still beyond the limit: the program has ended before the clock is read again."""
        with Sandbox("import time\nprint('done', flush=True)\ntime.sleep(0.2)", LIMITS) as box:
            box._running = box._start()
            ended, readings = select.poll(), []
            ended.register(box._running._control, select.POLLIN)

            def late():
                readings.append(None)
                if len(readings) == 3:  # behind the first look, which was at what is printed
                    ended.poll(60_000)
                return 0.0 if len(readings) < 3 else 1e9

            monkeypatch.setattr(sandbox, "time", types.SimpleNamespace(monotonic=late))
            outcome = box.run(b"")
        assert (outcome.kind, outcome.output) == ("ended", b"done\n") and len(readings) > 2

    def test_several_at_once_do_not_share_a_limit(self):
        program = (
            "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        time.sleep(1)\n        os._exit(0)\n"
            "time.sleep(0.5)\nprint('done')"
        )
        outcomes = []
        threads = [threading.Thread(target=lambda: outcomes.append(run(program, processes=5))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [outcome.output for outcome in outcomes] == [b"done\n"] * 4


@needs_bubblewrap
class TestEnds:
    def test_of_the_process_that_made_it(self):
        """Killed while a program runs: the kernel takes the sandbox along."""
        program = "import os, time\nfor _ in range(3):\n    os.fork()\ntime.sleep(600)"
        script = (
            "from scalerl_jax.environments.sandbox import *\n"
            f"box = Sandbox({program!r}, Limits(100.0, 2**28, 16, 2**16))\nprint('made', flush=True)\nbox.run(b'')"
        )
        before = others()
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"made\n"
        eventually(lambda: len(others() - before) >= 8, "the program runs")
        inside = {number for number, _ in others() - before} - {process.pid}
        process.kill()
        process.wait()
        process.stdout.close()
        eventually(lambda: not any(os.path.exists(f"/proc/{number}") for number in inside), "all are gone")

    def test_of_an_exception_in_mid_run(self):
        """As a worker that interrupts itself does."""

        class OutOfTime(BaseException):
            pass

        def interrupt(*_):
            raise OutOfTime

        def sleeping():
            patient = Limits(**{**vars(LIMITS), "seconds": 100.0})
            with Sandbox("import time\ntime.sleep(float(input()))", patient) as box:
                assert box.run(b"0").kind == "ended"  # it is started
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                box.run(b"600")

        before = others()
        old = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(OutOfTime):
                sleeping()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert others() - before == set()

    def test_soon(self, monkeypatch):
        """Nobody waits for a program that takes all the signals: neither until it ends, nor for a kill to be heard."""
        monkeypatch.setattr(sandbox, "ENDING_SECONDS", 1e6)  # waited for, the test would not end
        assert run("import os, signal, time\nos.fork()\nos.setsid\ntime.sleep(600)", seconds=0.3).kind == "timeout"


class TestCheck:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        check.cache_clear()
        yield
        check.cache_clear()

    def test_without_bubblewrap(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ValueError, match=r"no bwrap on PATH: apt-get install bubblewrap$"):
            check(LIMITS)

    def test_elsewhere(self, monkeypatch):
        monkeypatch.setattr(sys, "platform", "darwin")
        with pytest.raises(ValueError, match="needs Linux, this is darwin"):
            check(LIMITS)

    def make(self, folder, monkeypatch, script):
        (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def test_an_old_one(self, monkeypatch, tmp_path):
        self.make(tmp_path, monkeypatch, "echo bubblewrap 0.6.1")
        with pytest.raises(ValueError, match=r"bubblewrap 0\.8 or newer, this is 0\.6\.1$"):
            check(LIMITS)

    @pytest.mark.parametrize(
        ("script", "said"),
        [
            ("echo 'bwrap: No permissions to create a new namespace' >&2; exit 1", "No permissions to create a new"),
            ("exit 0", "it ended without a word"),
        ],
    )
    def test_where_the_kernel_forbids_it(self, monkeypatch, tmp_path, script, said):
        self.make(tmp_path, monkeypatch, f'[ "$1" = --version ] && echo bubblewrap 0.9.0 && exit\n{script}')
        monkeypatch.setattr(sandbox, "PAUSE_SECONDS", 0.01)
        with pytest.raises(ValueError, match=said) as raised:
            check(LIMITS)
        assert "\n" not in str(raised.value)

    def test_a_pod_that_may_not_is_told_what_it_needs(self, monkeypatch, tmp_path):
        """The words that scalerl-launch writes above the trainer, too."""
        refused = "bwrap: Creating new namespace failed: Operation not permitted"
        self.make(tmp_path, monkeypatch, f'[ "$1" = --version ] && echo bubblewrap 0.9.0 && exit\necho {refused} >&2')
        monkeypatch.setattr(sandbox, "PAUSE_SECONDS", 0.01)
        monkeypatch.setattr(sandbox_command, "_SWITCHES", {})
        monkeypatch.setattr(sandbox_command, "_has", lambda capabilities: False)
        with pytest.raises(ValueError, match=rf"{refused} \(in a container: docker run --security-opt=seccomp"):
            check(LIMITS)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        with pytest.raises(ValueError) as raised:
            check(LIMITS)
        assert str(raised.value).endswith(f"{refused} ({sandbox_command.POD_NEEDS})")

    @needs_bubblewrap
    @pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, and setpriv")
    def test_root_of_a_container(self):
        """With the capabilities that a container has, and /proc/sys as it has it: another user makes the namespaces."""
        kept = "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,sys_chroot,mknod"
        rights = ",".join(["-all", *(f"+{name}" for name in kept.split(","))])
        names = ("python3.12", "python3.11")
        python = next(filter(None, (shutil.which(name, path="/usr/bin:/usr/local/bin") for name in names)), None)
        if python is None:
            pytest.skip("no Python that others may read")
        libraries = [option for folder in ("/usr", "/lib", "/lib64") for option in _shown(folder)]
        program = (
            "import sys\nfrom scalerl_jax.environments import sandbox_command\n"
            "from scalerl_jax.environments.sandbox import Limits, Sandbox, check\n"
            # One that every user may read: this one may be below /root.
            f"sandbox_command._python = lambda: ({python!r}, {tuple(libraries)!r})\n"
            "made = sandbox_command.user()\nassert made.makes and not made.runs, made\n"
            f"limits = Limits(**{vars(LIMITS)!r})\ncheck(limits)\n"
            "with Sandbox('import os; print(os.getuid() == int(input()))', limits) as box:\n"
            "    sandbox_command.user = lambda: made\n    outcome = box.run(b'%d' % made.makes)\n"
            "assert (outcome.kind, outcome.output) == ('ended', b'True\\n'), outcome\n"
            "with Sandbox('import time; time.sleep(600)', limits) as box:\n"
            "    assert box.run(b'', seconds=0.3).kind == 'timeout'\nprint('held')\n"
        )
        script = (
            "mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys && "
            f'exec setpriv --bounding-set={rights} --inh-caps=-all "$@"'
        )
        before = others()
        command = ["unshare", "--mount", "bash", "-c", script, "_", sys.executable, "-c", program]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (0, "held\n"), result.stderr
        assert others() - before == set()

    @needs_bubblewrap
    def test_where_it_works(self):
        check(LIMITS)
        check(Limits(0.001, 2**28, 1, 2**16))  # whatever time a program has

    @needs_bubblewrap
    def test_a_sandbox_that_does_not_hold(self, monkeypatch):
        """The probe finds out: here the limit of processes is not set."""
        real = sandbox.Sandbox._limits_inside
        monkeypatch.setattr(
            sandbox.Sandbox, "_limits_inside", lambda self, user: {**real(self, user), "RLIMIT_NPROC": 10_000}
        )
        with pytest.raises(ValueError, match="does not hold here: a program may start any number of processes"):
            check(LIMITS)


def test_limits_are_those_of_the_config():
    config = SandboxConfig(seconds=3.0, memory_bytes=4, processes=5, output_bytes=6)
    assert vars(Limits.of(config)) == {"seconds": 3.0, "memory_bytes": 4, "processes": 5, "output_bytes": 6}

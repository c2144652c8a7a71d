"""Programs that mean harm are held, judged as they should be, and leave nothing behind; as root and as another user."""

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile

import pytest

from scalerl_jax.environments.code_judge import judge
from tests.environments.hostile_programs import CALL_TESTS, CALLS, PROGRAMS, TESTS
from tests.environments.sandboxes import SMALL, attempt, needs_bubblewrap, others
from tests.support.paths import ROOT

pytestmark = needs_bubblewrap


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process and no file."""
    gc.collect()  # what other tests have left is closed now, and its numbers are not taken meanwhile
    processes, files, descriptors = others(), set(os.listdir(tempfile.gettempdir())), open_files()
    yield
    assert others() - processes == set()
    assert open_files() - descriptors == set()
    new = set(os.listdir(tempfile.gettempdir())) - files
    assert not [name for name in new if name.isdigit() or name in ("x", "out", "seen", "r", "disk")]


def open_files():
    """The descriptors of this process: (number, what it is)."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this list
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def limits_of(right):
    """Less time for programs that use up all of it."""
    return dataclasses.replace(SMALL, seconds=0.7) if "timeout" in right else SMALL


@pytest.mark.parametrize("name", PROGRAMS)
def test_scripts(name):
    program, right = PROGRAMS[name]
    verdict = judge(program, TESTS, limits_of(right))
    assert verdict.kind in right, verdict


@pytest.mark.parametrize("name", CALLS)
def test_functions(name):
    program, right = CALLS[name]
    verdict = judge(program, CALL_TESTS, SMALL)
    assert verdict.kind in right, verdict


def test_a_listener_on_this_machine_hears_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        program = attempt(
            f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\nescaped = True"
        )
        verdict = judge(program, TESTS, SMALL)
        with pytest.raises(BlockingIOError):  # nobody waits to be let in
            server.accept()
    assert verdict.kind == "ok", verdict


def test_what_stands_in_this_process_environment_is_not_seen(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    verdict = judge(attempt("escaped = 'hunter2' in str(os.environ) or 'SECRET_TOKEN' in os.environ"), TESTS, SMALL)
    assert verdict.kind == "ok", verdict


def test_a_file_beside_this_process_is_not_seen(tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    verdict = judge(attempt(f"escaped = os.path.exists({str(tmp_path / 'secret')!r})"), TESTS, SMALL)
    assert verdict.kind == "ok", verdict


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="these are the tests above, where they are not run by root")
def test_the_same_by_a_user_who_is_not_root():
    """All of them in one process: the machine's own Python, which that user may read."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    version = python and subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True)
    if not version or tuple(map(int, version.stdout.split())) < (3, 11):
        pytest.skip("another user may read no Python 3.11 here")
    script = pathlib.Path(__file__).with_name("judge_alone.py")
    if subprocess.run([python, "-c", ""], user=54321, group=54321, extra_groups=[], check=False).returncode:
        pytest.skip("another user may not run Python here")
    with tempfile.TemporaryDirectory() as copy:
        os.chmod(copy, 0o755)
        shutil.copytree(ROOT / "scalerl_jax", f"{copy}/scalerl_jax", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(script, copy)
        asked = {
            name: [program, tests, dataclasses.asdict(limits_of(right))]
            for programs, tests in ((PROGRAMS, TESTS), (CALLS, CALL_TESTS))
            for name, (program, right) in programs.items()
        }
        done = subprocess.run(
            [python, "-B", f"{copy}/judge_alone.py"],
            input=json.dumps(asked), capture_output=True, text=True, timeout=1700,
            user=54321, group=54321, extra_groups=[], env={"PATH": os.environ["PATH"]}, cwd="/",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    wrong = {name: verdicts[name] for name, (_, right) in (PROGRAMS | CALLS).items() if verdicts[name][0] not in right}
    assert wrong == {}

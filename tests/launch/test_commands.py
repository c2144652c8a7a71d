"""Commands start with huge pages for malloc, and are the process that was started."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from launch.commands import with_huge_pages


def test_the_variable_is_added_to_what_is_there():
    assert with_huge_pages({"A": "b"}, "glibc 2.36") == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    found = with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, "glibc 2.35")
    assert found == {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"}


@pytest.mark.parametrize("glibc", ["", "musl 1.2.4", "glibc 2.34", "glibc 2.31"])
def test_another_library_is_left_alone(glibc):
    assert with_huge_pages({}, glibc) is None


@pytest.mark.parametrize("chosen", ["glibc.malloc.hugetlb=0", "glibc.malloc.check=1:glibc.malloc.hugetlb=2"])
def test_somebodys_own_choice_is_kept(chosen):
    assert with_huge_pages({"GLIBC_TUNABLES": chosen}, "glibc 2.36") is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("chosen", [None, "glibc.malloc.hugetlb=0"])
def test_a_server_is_the_process_that_was_started(chosen, tmp_path, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if chosen:
        monkeypatch.setenv("GLIBC_TUNABLES", chosen)
    program = pathlib.Path(sys.executable).with_name("scalerl-serve")
    port_file = tmp_path / "port"
    process = subprocess.Popen([program, "--engine=replay", "--port=0", f"--port_file={port_file}"])
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        environment = pathlib.Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert f"GLIBC_TUNABLES={chosen or 'glibc.malloc.hugetlb=1'}".encode() in environment
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()

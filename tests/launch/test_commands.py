"""Commands start with malloc tuned, and are the process that was started."""

import os
import pathlib
import signal
import sys

import pytest

from launch.commands import with_tuned_malloc
from tests.support.processes import SECONDS
from tests.support.servers import ServerProcess
from tests.support.tiny_task import write_model

OURS = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=6"


def tuned(environment: dict[str, str], glibc: str = "glibc 2.36") -> dict[str, str] | None:
    return with_tuned_malloc(environment, glibc=glibc, cores=6)


def test_the_variable_is_added_to_what_is_there():
    assert tuned({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": OURS}
    found = tuned({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, "glibc 2.35")
    assert found == {"GLIBC_TUNABLES": f"glibc.malloc.check=1:{OURS}"}
    assert tuned(found) is None  # or it would start itself for ever


@pytest.mark.parametrize("glibc", ["", "musl 1.2.4", "glibc 2.34", "glibc 2.31"])
def test_another_library_is_left_alone(glibc):
    assert tuned({}, glibc) is None


def test_somebodys_own_choice_is_kept():
    hugetlb, arenas = OURS.split(":")
    for chosen in ("glibc.malloc.hugetlb=0", "glibc.malloc.check=1:glibc.malloc.hugetlb=2"):
        assert tuned({"GLIBC_TUNABLES": chosen}) == {"GLIBC_TUNABLES": f"{chosen}:{arenas}"}
    chosen = "glibc.malloc.arena_max=1"
    assert tuned({"GLIBC_TUNABLES": chosen}) == {"GLIBC_TUNABLES": f"{chosen}:{hugetlb}"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("chosen", [None, "glibc.malloc.hugetlb=0"])
def test_a_server_is_the_process_that_was_started(chosen, tmp_path, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if chosen:
        monkeypatch.setenv("GLIBC_TUNABLES", chosen)
    program = pathlib.Path(sys.executable).with_name("scalerl-serve")
    model = write_model(str(tmp_path / "model"))
    server = ServerProcess(tmp_path, "--engine=jax", f"--model={model}", program=[program])
    process = server.process
    try:
        server.wait()
        # glibc reads the list where it lies, and puts a zero behind each value.
        environment = pathlib.Path(f"/proc/{process.pid}/environ").read_bytes().replace(b"\0", b":")
        values = f"{chosen or 'glibc.malloc.hugetlb=1'}:glibc.malloc.arena_max={os.cpu_count()}"
        assert f"GLIBC_TUNABLES={values}:".encode() in environment
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    finally:
        server.close()

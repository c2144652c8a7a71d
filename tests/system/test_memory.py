"""What malloc holds free goes back to the system; how much memory there is, read from a system's files."""

import ctypes
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from scalerl_jax.system import memory
from scalerl_jax.system.memory import GIB

PROGRAM = """
from scalerl_jax.system.memory import trim

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

before = resident()
pieces = [bytes(2000) for _ in range(100_000)]
full = resident()
kept = pieces[::100]
pieces.clear()
freed = resident()
trim()
print(full - before, freed - before, resident() - before, len(kept))
"""

PEAK = """
import sys
kept = bytes(b"x") * 2**26
del kept
print("freed", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's malloc")
def test_pieces_between_used_ones_are_given_back():
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    full, freed, trimmed, _ = map(int, done.stdout.split())  # KiB
    assert full > 180_000
    assert freed > 0.9 * full  # malloc does not do it by itself
    assert trimmed < 0.3 * full


def system(root: pathlib.Path, **files: str) -> str:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


MEMINFO = {"proc__meminfo": f"MemTotal: 1 kB\nMemAvailable:   {20 * 2**20} kB\nBuffers: 7 kB\n"}


def test_the_smaller_of_machine_and_container(tmp_path: pathlib.Path) -> None:
    cgroup = {"sys__fs__cgroup__memory_dot_current": f"{3 * GIB}\n"}
    assert memory.available(system(tmp_path / "bare", **MEMINFO)) == 20 * GIB
    unlimited = system(tmp_path / "unlimited", **MEMINFO, **cgroup, sys__fs__cgroup__memory_dot_max="max\n")
    assert memory.available(unlimited) == 20 * GIB
    limited = system(
        tmp_path / "limited", **MEMINFO, **cgroup, sys__fs__cgroup__memory_dot_max=f"{8 * GIB}\n",
        sys__fs__cgroup__memory_dot_stat=f"anon 5\ninactive_file {GIB}\n",
    )  # fmt: skip
    assert memory.available(limited) == 6 * GIB
    spent = system(tmp_path / "spent", **MEMINFO, **cgroup, sys__fs__cgroup__memory_dot_max=f"{GIB}\n")
    assert memory.available(spent) == 0


def test_the_older_kind_of_container(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.stat").write_text(f"total_inactive_file {GIB}\n")
    assert memory.available(str(tmp_path)) == 4 * GIB


def test_a_system_that_does_not_say(tmp_path: pathlib.Path) -> None:
    assert memory.available(str(tmp_path)) == memory.UNKNOWN > 2**50
    assert memory.resident(str(tmp_path)) == 0
    assert memory.peak_resident(root=str(tmp_path)) == 0


def test_this_process() -> None:
    assert memory.available() > 0
    before = memory.resident()
    kept = np.ones(64 * 2**20, np.uint8)
    assert memory.resident() - before > 0.9 * kept.nbytes
    most = memory.peak_resident()
    assert most > 0.98 * memory.resident()  # the kernel counts it in batches
    del kept
    assert memory.peak_resident() > 0.98 * most


def test_another_process() -> None:
    with subprocess.Popen([sys.executable, "-c", PEAK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"freed\n"
        assert 2**26 < memory.peak_resident(process.pid) < 2**29
        process.communicate()
    assert memory.peak_resident(process.pid) == 0


def test_a_process_may_be_called_anything(tmp_path: pathlib.Path) -> None:
    status = tmp_path / "proc/7/status"
    status.parent.mkdir(parents=True)
    status.write_bytes(b"Name:\t\xc3\xa9\xff\nVmHWM:\t      12 kB\nVmRSS:\t 5 kB\n")
    assert memory.peak_resident(7, root=str(tmp_path)) == 12 * 1024


@pytest.mark.parametrize(
    ("temporary", "given", "aliased", "taken"), [(100, 30, 0, 130), (100, 30, 30, 100), (100, 30, 10, 120)]
)
def test_what_a_program_gives_in_the_place_of_an_argument_is_not_counted(
    temporary: int, given: int, aliased: int, taken: int
) -> None:
    told = types.SimpleNamespace(temp_size_in_bytes=temporary, output_size_in_bytes=given, alias_size_in_bytes=aliased)
    assert memory.working_bytes(types.SimpleNamespace(memory_analysis=lambda: told)) == taken


def test_a_platform_that_tells_no_plan() -> None:
    assert memory.working_bytes(types.SimpleNamespace(memory_analysis=lambda: None)) == 0


def test_gib() -> None:
    assert [memory.gib(size) for size in (0, GIB // 4, 9.99 * GIB, 10 * GIB, 123.46 * GIB)] == [
        "0.00", "0.25", "9.99", "10.0", "123.5",
    ]  # fmt: skip

"""Memory: returning free memory to the system, the amount available, and the use by processes and programs.

The buffers of an update, completions in flight and copies for a checkpoint have many sizes and lifetimes, so free
pieces come to lie between used ones: over thousands of updates a process holds more and more that it does not use.
glibc returns such pieces only when it is asked.
"""

import ctypes
import os
from typing import Any

GIB = 2**30
UNKNOWN = 2**62  # of `available`, where the system does not report it


def trim() -> None:
    """Returns malloc's free memory to the system, in milliseconds. Does nothing if the C library has no malloc_trim."""
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is not None:
        function(0)


def resident(root: str = "/") -> int:
    """Bytes of memory that this process uses; 0 where the system does not report it."""
    text = _read(os.path.join(root, "proc/self/statm"))
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else 0


def peak_resident(process: int | None = None, *, root: str = "/") -> int:
    """The most bytes that a process has used; 0 where the system does not report it, or the process is gone.

    process: its id; None: this process.
    """
    own = "self" if process is None else str(process)
    lines = _read(os.path.join(root, "proc", own, "status")).splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def available(root: str = "/") -> int:
    """Bytes that this process may still use: the smaller of the machine's and its container's.

    A container's page cache counts as free: the kernel drops it first. UNKNOWN, which is more than any machine has,
    where the system does not report it (not Linux).
    """
    found = [UNKNOWN]
    if info := _read(os.path.join(root, "proc/meminfo")):
        found += [int(line.split()[1]) * 1024 for line in info.splitlines() if line.startswith("MemAvailable:")]
    for folder, limit, used, cached in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limits, usage = (_read(os.path.join(root, folder, name)).strip() for name in (limit, used))
        if limits.isdigit() and usage.isdigit():
            stat = dict(line.split()[:2] for line in _read(os.path.join(root, folder, "memory.stat")).splitlines())
            found.append(max(0, int(limits) - int(usage) + int(stat.get(cached, 0))))
    return min(found)


def working_bytes(program: Any) -> int:
    """Bytes that a program compiled by jax needs beyond its arguments, by XLA's plan; 0 where there is no plan.

    Outputs in the place of an argument are not counted.
    """
    analysis = program.memory_analysis()
    if analysis is None:
        return 0
    return analysis.temp_size_in_bytes + max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def gib(size: float) -> str:
    """Bytes as GiB for people: "0.25", and with one decimal from "10.0" on."""
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"


def _read(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        # A process's status contains its name, which may be any bytes.
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""

"""What XLA has compiled, kept from one run of the tests to the next: most of what they compute is compiled first.

A run works on a folder of its own, inherited by pytest's workers and by the processes that tests start. It begins with
what earlier runs left, and leaves behind what it has made that is whole: tests kill processes, and JAX neither writes
an entry at once nor replaces one that is cut off. JAX names an entry by the program, its options and its own version,
and reports a program that it finds there as compiled all the same, so tests that count compilations count it.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import tempfile
import zlib

from tests.support.paths import ROOT


def _processor() -> str:
    """What this processor can do, in few letters: programs are compiled for it."""
    with contextlib.suppress(OSError):
        flags = re.search(r"^(flags|Features)\s*:.*", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return hashlib.blake2b(flags[0].encode(), digest_size=4).hexdigest() if flags else "any"
    return "any"


def _few_passes() -> str:
    flags = "--xla_cpu_parallel_codegen_split_count=1"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have none of these emitters to leave
            flags += " --xla_cpu_use_fusion_emitters=false"
    return flags


# Most of a test's time is compiling; these make it a third as long and change no result beyond rounding. A fit computes
# for longer than it compiles, so those who only fit have its code optimized.
FITS_XLA_FLAGS = _few_passes()
XLA_FLAGS = f"--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true {FITS_XLA_FLAGS}"
KEPT = ROOT / "build" / "compiled-for-tests" / _processor()
MOST_BYTES = 2**30  # a run of all tests makes about a tenth


def on_devices(count: int) -> str:
    """XLA_FLAGS of a process with so many virtual devices."""
    return f"{XLA_FLAGS} --xla_force_host_platform_device_count={count}"


def begin() -> pathlib.Path:
    """The folder of this run; `end` it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="scalerl-compiled-"))
    with contextlib.suppress(OSError):  # there is none yet, or another run is just leaving what it has made
        shutil.copytree(KEPT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.part"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Those of XLA lie beside ours, and their path would be part of what names an entry.
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    return folder


def end(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # another run ends at the same time
        _keep(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _keep(folder: pathlib.Path) -> None:
    if KEPT.is_dir() and sum(entry.stat().st_size for entry in KEPT.iterdir()) > MOST_BYTES:
        shutil.rmtree(KEPT)
    KEPT.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if not (KEPT / entry.name).exists() and _is_whole(entry):
            part = KEPT / f"{entry.name}.{os.getpid()}.part"
            shutil.copyfile(entry, part)
            os.replace(part, KEPT / entry.name)


def _is_whole(entry: pathlib.Path) -> bool:
    """As JAX writes it where no other compressor is installed; the end of it is a checksum."""
    try:
        zlib.decompress(entry.read_bytes())
    except zlib.error:
        return False
    return True

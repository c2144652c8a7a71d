"""What XLA has compiled, kept from one run of the tests to the next: most of what they compute is compiled first.

A run works on a folder of its own, inherited by pytest's workers and by the processes that tests start. It begins with
what earlier runs left, and leaves behind what it has made that is whole: tests kill processes, and JAX neither writes
an entry at once nor replaces one that is cut off. JAX names an entry by the program, its options and its own version,
and reports a program that it finds there as compiled all the same, so tests that count compilations count it.
"""

import os
import pathlib
import shutil
import tempfile
import zlib

from tests.support.paths import ROOT

KEPT = ROOT / "build" / "compiled-for-tests"
MOST_BYTES = 2**30  # a run of all tests makes about a tenth


def begin() -> pathlib.Path:
    """The folder of this run; `end` it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="scalerl-compiled-"))
    if KEPT.is_dir():
        shutil.copytree(KEPT, folder, dirs_exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Those of XLA lie beside ours, and their path would be part of what names an entry.
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    return folder


def end(folder: pathlib.Path) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    if sum(entry.stat().st_size for entry in KEPT.iterdir()) > MOST_BYTES:
        shutil.rmtree(KEPT)
        KEPT.mkdir()
    for entry in folder.iterdir():
        if not (KEPT / entry.name).exists() and _is_whole(entry):
            part = KEPT / f"{entry.name}.{os.getpid()}.part"
            shutil.copyfile(entry, part)
            os.replace(part, KEPT / entry.name)
    shutil.rmtree(folder, ignore_errors=True)


def _is_whole(entry: pathlib.Path) -> bool:
    """As JAX writes it where no other compressor is installed; the end of it is a checksum."""
    try:
        zlib.decompress(entry.read_bytes())
    except zlib.error:
        return False
    return True

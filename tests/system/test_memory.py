"""What malloc holds free between used pieces goes back to the system."""

import ctypes
import os
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's malloc")
def test_pieces_between_used_ones_are_given_back():
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    full, freed, trimmed, _ = map(int, done.stdout.split())  # KiB
    assert full > 180_000
    assert freed > 0.9 * full  # malloc does not do it by itself
    assert trimmed < 0.3 * full

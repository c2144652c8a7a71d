"""Memory that several processes of one machine map, and that no path leads to.

It is a file without a name (memfd_create): other processes of the same user open it through /proc while its maker
lives, and it is gone with the last process that maps it, however that one ended. Nothing is left in /dev/shm, and the
size of /dev/shm, which containers keep small, does not bound it. Linux only, as vLLM is.
"""

import mmap
import os

import numpy as np


class SharedMemory:
    """`size` bytes (at least 1), zero at first. `close` frees them once no other process maps them."""

    def __init__(self, size: int):
        assert size > 0
        self._file = os.memfd_create("scalerl-weights")
        os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        self.array = np.frombuffer(self._map, np.uint8)  # [size], writable

    @property
    def path(self) -> str:
        """What another process opens."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """The array stays readable as long as it is referenced; the name of the memory is gone."""
        os.close(self._file)


def attach(path: str) -> mmap.mmap:
    """The memory behind `SharedMemory.path`, in another process. Raises OSError where its maker is gone."""
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def identity(path: str) -> tuple[str, int]:
    """Tells whether a path still means the memory that it meant before."""
    return path, os.stat(path).st_ino

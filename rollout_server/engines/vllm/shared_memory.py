"""Memory without a file name that several processes of one machine map.

It is an unnamed file (memfd_create): other processes of the same user open it through /proc while its creator lives,
and it is freed with the last process that maps it, however that one ended. Nothing is left in /dev/shm, and the size of
/dev/shm, which containers keep small, is no limit. Linux only, like vLLM.
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
        """The path that another process opens."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Closes the path to the memory; the array stays readable as long as it is referenced."""
        os.close(self._file)


def attach(path: str) -> mmap.mmap:
    """The memory behind `SharedMemory.path`, in another process. Raises OSError if its creator has ended."""
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def identity(path: str) -> tuple[str, int]:
    """A key that changes when the path refers to other memory."""
    return path, os.stat(path).st_ino

"""The journal of a session on disk: a record for each of its calls, written before the call is answered.

    record    uint32 length, uint32 CRC-32 as in zlib, both little-endian; then `length` bytes of JSON

A record counts once it is complete and on the disk. An incomplete last one, left by a killed process, is cut off; one
that has a complete one behind it is damaged.
"""

import errno
import fcntl
import json
import os
import struct
import threading
import zlib
from collections.abc import Mapping
from typing import Any

from scalerl_jax.system import files

_HEAD = struct.Struct("<II")


class Journal:
    """The file at `path`, created if missing; `records` are those that it contains.

    Raises ValueError naming the file if a record before the last is damaged, or another process has it open.
    """

    def __init__(self, path: str):
        self.path, self._lock, self._closed = path, threading.Lock(), False
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(path, "rb") as file:
                data = file.read()
            self.records, self._size = _whole(data, path)
            os.ftruncate(self._file, self._size)
            _sync(os.path.dirname(path) or ".")  # the name of a new file
        except BlockingIOError:
            self.close()
            raise ValueError(f"{path}: another gateway writes it") from None
        except BaseException:
            self.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Returns when the record is on the disk. Raises OSError naming the file; the journal is then unchanged.

        Any thread may call it.
        """
        payload = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
        with self._lock, files.naming(self.path):
            if self._closed:
                raise OSError(errno.EBADF, "closed")
            files.append(self._file, _HEAD.pack(len(payload), zlib.crc32(payload)) + payload, self.path)
            try:
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
            self._size += _HEAD.size + len(payload)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._file)


def _whole(data: bytes, path: str) -> tuple[list[dict[str, Any]], int]:
    """The records, and where the last complete one ends."""
    records, at = list[dict[str, Any]](), 0
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        payload = data[at + _HEAD.size : end]
        if not length or end > len(data) or zlib.crc32(payload) != checksum:
            if _has_record(data, at + 1):
                raise ValueError(f"{path}: the record at byte {at} is damaged")
            break
        records.append(json.loads(payload))
        at = end
    return records, at


def _has_record(data: bytes, begin: int) -> bool:
    """Whether there is a complete record anywhere behind `begin`."""
    for at in range(begin, len(data) - _HEAD.size):
        length, checksum = _HEAD.unpack_from(data, at)
        start, end = at + _HEAD.size, at + _HEAD.size + length
        if length and end <= len(data) and zlib.crc32(memoryview(data)[start:end]) == checksum:
            return True
    return False


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files that are there whole or not at all, and one line for a disk that is full, read-only or gone.

    write_whole   a temporary file beside it, written out to the disk, then renamed; no temporary file stays
    append        all of it or nothing: what a full disk took of it is cut off again
    naming        gives an OSError that names no file the path it was about

A temporary file's name has the process in it: two that write the same file at once do not mix. What a killed process
left is removed by `tidy`.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMPORARY = re.compile(r"\.(\d+)-\d+\.tmp$")
_numbers = itertools.count()
# How libraries that are not Python's tell an error of the system: tensorstore, Rust's, Python's own in a text.
_SYSTEM = re.compile(r"os_error_code='(\d+)'|\(os error (\d+)\)|\[Errno (\d+)\]")


class WriteError(OSError):
    """A file of ours cannot be written or read; has errno, strerror and filename, and is one line."""

    def __str__(self) -> str:
        return f"{self.filename}: {reason(self)}"


def reason(error: OSError) -> str:
    """In words, without the file: "no space left on device"."""
    text = error.strerror or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """What is raised inside for want of a file or of room becomes a WriteError that names the path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, WriteError) or error.errno is None:
            raise
        raise WriteError(error.errno, os.strerror(error.errno), path) from error


def write_error(error: BaseException, path: str) -> WriteError | None:
    """What a library has raised as something else, where it says which error of the system it was."""
    if isinstance(error, WriteError):
        return error
    found = _SYSTEM.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1] or found[2] or found[3]) if found else None
    return WriteError(number, os.strerror(number), path) if number is not None else None


def temporary(path: str) -> str:
    """A name beside `path` that no other writer uses."""
    return f"{path}.{os.getpid()}-{next(_numbers)}.tmp"


def write_whole(path: str, data: str | bytes, *, durable: bool = True) -> None:
    """Writes a file so that it is there whole or, after a crash or on a full disk, as it was before.

    durable: it is on the disk before this returns, so that losing power costs nothing either. Raises WriteError.
    """
    beside = temporary(path)
    with naming(path):
        try:
            with open(beside, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(beside)
            raise


@contextlib.contextmanager
def whole_folder(path: str, *, replace: bool = False) -> Iterator[str]:
    """A new folder to write into, which is at `path` when the block ends; nothing is there where the block fails.

    replace: a folder that is there stays until the new one is whole; a kill leaves the old one, the new one, or none.
    Raises WriteError, also where a library says in words of its own that there is no room.
    """
    beside, before = f"{path}.tmp", f"{path}.old"
    for left in (beside, before) if replace else (beside,):  # of a process that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    try:
        with naming(path):
            os.makedirs(beside)
        yield beside
        if replace and os.path.isdir(path):
            os.rename(path, before)
        os.replace(beside, path)
        if replace:
            shutil.rmtree(before, ignore_errors=True)
    except Exception as error:
        if (fault := write_error(error, path)) is not None:
            raise fault from None
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def append(descriptor: int, data: bytes, path: str) -> None:
    """Appends to a file opened with O_APPEND, as its only writer: all of `data` or nothing. Raises WriteError.

    A file whose last name is gone is an error too: what is written to it would be lost.
    """
    with naming(path):
        before = os.fstat(descriptor)
        if before.st_nlink == 0:
            raise OSError(errno.ENOENT, "deleted")
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before.st_size)
            raise


def ends_whole(path: str) -> bool:
    """Whether a file of lines ends with one, or is empty."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def tidy(folder: str) -> None:
    """Removes temporary files that no process is writing any more."""
    for name in os.listdir(folder):
        found = _TEMPORARY.search(name)
        if found and (int(found[1]) == os.getpid() or not lives(int(found[1]))):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, name))


def lives(process: int) -> bool:
    """Whether a process of this number is there."""
    try:
        os.kill(process, 0)  # signal 0 asks only
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # it exists, and is another user's
    return True


def plain(value: Any) -> Any:
    """As JSON can hold it: arrays as lists, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy and jax, scalars and arrays
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_object(path: str) -> dict[str, Any]:
    """The object that a file holds. Raises ValueError, one line, where it holds none, and OSError."""
    try:
        with open(path, "rb") as file:
            value = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not an object")
    return value

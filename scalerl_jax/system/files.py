"""Files that are written whole or not at all, and one line for a disk that is full, read-only or gone.

    write_whole   a temporary file beside it, flushed to the disk, then renamed; no temporary file stays
    append        all of it or nothing: a part that a full disk took is cut off again
    naming        adds the path to an OSError that names no file

A temporary file's name contains the process id: two processes that write the same file do not mix. `tidy` removes what
a killed process left.
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
# How libraries other than Python's report a system error: tensorstore, Rust's, Python's own inside a text.
_SYSTEM = re.compile(r"os_error_code='(\d+)'|\(os error (\d+)\)|\[Errno (\d+)\]")


class WriteError(OSError):
    """A file of ours that cannot be written or read; has errno, strerror and filename, and is one line."""

    def __str__(self) -> str:
        return f"{self.filename}: {reason(self)}"


def reason(error: OSError) -> str:
    """The reason in words, without the file: "no space left on device"."""
    text = error.strerror or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """An OSError raised inside, such as a missing file or a full disk, becomes a WriteError that names the path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, WriteError) or error.errno is None:
            raise
        raise WriteError(error.errno, os.strerror(error.errno), path) from error


def write_error(error: BaseException, path: str) -> WriteError | None:
    """The WriteError for an error of a library that mentions a system error; None if it mentions none."""
    if isinstance(error, WriteError):
        return error
    found = _SYSTEM.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1] or found[2] or found[3]) if found else None
    return WriteError(number, os.strerror(number), path) if number is not None else None


def temporary(path: str) -> str:
    """A name beside `path` that no other writer uses."""
    return f"{path}.{os.getpid()}-{next(_numbers)}.tmp"


def write_whole(path: str, data: str | bytes, *, durable: bool = True) -> None:
    """Writes a file so that it is whole or, after a crash or on a full disk, as it was before.

    A link stays one; a device or a pipe is written to as it is. durable: the data is on the disk before this returns,
    so that it survives a loss of power. Raises WriteError.
    """
    data, target = data.encode() if isinstance(data, str) else data, os.path.realpath(path)
    beside = temporary(target)
    with naming(path):
        if os.path.exists(target) and not os.path.isfile(target):
            with open(target, "wb") as device:
                device.write(data)
            return
        try:
            with open(beside, "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(beside)
            raise


@contextlib.contextmanager
def whole_folder(path: str, *, replace: bool = False) -> Iterator[str]:
    """A new folder to write into, which is renamed to `path` when the block ends; removed if the block fails.

    replace: an existing folder stays until the new one is whole; a kill leaves the old one, the new one, or none.
    Raises WriteError, also where a library reports a full disk in its own words.
    """
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    if os.path.isdir(folder):
        tidy(folder, f"{name}.")
    beside, before = temporary(path), temporary(path)
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

    A deleted file is an error too: what is written to it would be lost.
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
    """Whether a file of lines ends with a complete line, or is empty."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def tidy(folder: str, name: str = "") -> None:
    """Removes temporary files and folders, of names that begin with `name`, that no process writes any longer. The
    caller writes none: a process before may have had its number."""
    for one in os.scandir(folder):
        found = _TEMPORARY.search(one.name)
        if found and one.name.startswith(name) and (int(found[1]) == os.getpid() or not lives(int(found[1]))):
            if one.is_dir(follow_symlinks=False):
                shutil.rmtree(one.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.remove(one.path)


def lives(process: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(process, 0)  # signal 0 only checks
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # it exists, and belongs to another user
    return True


def plain(value: Any) -> Any:
    """The value in JSON's types: arrays as lists, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy and jax, scalars and arrays
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def newest_step(run: str) -> int | None:
    """The newest checkpoint's step in a run's folder, or None; without the imports of learner/checkpoint.py, and by its
    rule: a checkpoint is named by its step once it is complete."""
    try:
        names = os.listdir(os.path.join(run, "checkpoints"))
    except FileNotFoundError:
        return None
    return max((int(name) for name in names if name.isdecimal()), default=None)


def read_object(path: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, one line, if it holds none, and OSError."""
    try:
        with open(path, "rb") as file:
            value = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not an object")
    return value

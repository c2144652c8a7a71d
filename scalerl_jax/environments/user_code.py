"""Loads an object that a user names as FILE.py:NAME; each file is imported once.

The file's folder is appended to sys.path: modules in it can be imported, and shadow no other module. A relative path
is relative to the folder where the command was started.
"""

import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from typing import Any

LONGEST_ERROR = 400  # characters of an exception in a line


def named(text: str) -> bool:
    """Whether `text` has the form FILE.py:NAME."""
    file, _, name = text.rpartition(":")
    return file.endswith(".py") and name.isidentifier()


def check(field: str, text: str) -> None:
    """Raises ValueError if `text`, the value of the config field, names no existing file. Imports nothing."""
    if not named(text):
        raise ValueError(f"{field}={text}: is not of the form FILE.py:NAME")
    file = text.rpartition(":")[0]
    if not os.path.isfile(file):
        raise ValueError(f"{field}={text}: there is no file {file} (from {os.getcwd()})")


def load(field: str, text: str) -> Any:
    """The object FILE.py:NAME. Raises ValueError, one line naming the config field, if it cannot be loaded."""
    check(field, text)
    file, _, name = text.rpartition(":")
    path = os.path.realpath(file)
    module = "scalerl_user_" + hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[module] = made  # dataclasses and pickle require it
        if os.path.dirname(path) not in sys.path:
            sys.path.append(os.path.dirname(path))
        try:
            spec.loader.exec_module(made)
        except (Exception, SystemExit) as error:
            del sys.modules[module]
            raise ValueError(f"{field}={text}: {error_line(error, file=path)}") from error
    found = getattr(sys.modules[module], name, None)
    if found is None:
        near = [
            other for other, value in vars(sys.modules[module]).items() if not other.startswith("_") and callable(value)
        ]
        raise ValueError(f"{field}={text}: {file} has no {name} (it has: {', '.join(near) or 'nothing to call'})")
    return found


def error_line(error: BaseException, *, file: str = "") -> str:
    """An exception in one line: its type, its message, and the innermost line of `file` (else: of any file)."""
    message = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    if len(message) > LONGEST_ERROR:  # it may hold whatever the user's code was given
        message = f"{message[:LONGEST_ERROR]}... ({len(message)} characters)"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{message.split(' (')[0]} ({os.path.basename(error.filename)} line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file and os.path.realpath(frame.filename) == os.path.realpath(file)] or frames
    return f"{message} ({os.path.basename(own[-1].filename)} line {own[-1].lineno})" if own else message


def file_of(function: Any) -> str:
    """The file that defines a function or class; "" if it has none."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function)) or ""
    except TypeError:
        return ""

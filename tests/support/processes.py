"""Programs of this tree as processes of their own."""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from tests.support import fork_server
from tests.support.paths import ROOT

# A loaded machine starts a process in a minute.
SECONDS = 600.0


def single_threaded() -> dict[str, str]:
    """The environment of a program that is small, and one of as many as there are cores."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # SIGABRT: every thread's stack
    }


def run_command(
    module: str,
    *arguments: Any,
    folder: Any = ROOT,
    environment: Mapping[str, str] | None = None,
    packages: Any = None,
    seconds: float = SECONDS,
) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments` to its end, with the folder as its working directory; on a wide terminal.

    packages: a folder of packages that the environment lacks. seconds: after which it is killed.
    """
    paths = os.pathsep.join(map(str, filter(None, [ROOT, packages])))
    given = {**(os.environ if environment is None else environment), "PYTHONPATH": paths, "COLUMNS": "200"}
    return run_python("-m", module, *arguments, folder=folder, environment=given, seconds=seconds)


def begin_python(
    *arguments: Any, errors: bool = False, **options: Any
) -> tuple[fork_server.Forked | subprocess.Popen[bytes], IO[str]]:
    """`python arguments`, the first of them -m or -c, and what it writes on stdout; with `errors` on stderr too.

    options: of fork_server.start.
    """
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as output, open(os.devnull, "w") as nowhere:
        process = fork_server.start(*arguments, stdout=output, stderr=output if errors else nowhere, **options)
    return process, os.fdopen(reading)


def run_python(
    *arguments: Any, folder: Any = ROOT, environment: Mapping[str, str] | None = None, seconds: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """`python arguments` to its end, the first of them -m or -c; killed after so many seconds."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = fork_server.start(*arguments, environment=environment, folder=folder, stdout=output, stderr=errors)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, output.read(), errors.read())

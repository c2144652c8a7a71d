"""Programs of this tree as processes of their own."""

import os
import subprocess
import sys
from typing import Any

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
    environment: dict[str, str] | None = None,
    packages: Any = None,
    seconds: float = SECONDS,
) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments` to its end, with the folder as its working directory; on a wide terminal.

    packages: a folder of packages that the environment lacks. seconds: after which it is killed.
    """
    paths = os.pathsep.join(map(str, filter(None, [ROOT, packages])))
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=folder,
        env={**(environment or os.environ), "PYTHONPATH": paths, "COLUMNS": "200"},
        capture_output=True, text=True, check=False, timeout=seconds,
    )  # fmt: skip

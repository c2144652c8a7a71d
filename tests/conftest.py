"""What holds for every test: what one test process has compiled none compiles again, and property tests repeat."""

import os
import signal

from hypothesis import settings

from tests.support import compiled

# A shell that runs the tests in the background has them ignore Ctrl-C, and with them every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where tests/runner.py has begun one, its forks inherit the folder.
_COMPILED = None if "JAX_COMPILATION_CACHE_DIR" in os.environ else compiled.begin()

# The same examples at every run, and no limit on one: a loaded machine is not a bug.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


def pytest_unconfigure() -> None:
    if _COMPILED:
        compiled.end(_COMPILED)

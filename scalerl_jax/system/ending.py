"""How a command's process ends: with its exit code, in bounded time, whatever a library's threads still do.

At its end Python waits without limit for every non-daemon thread and for every executor's workers. A stuck one, such as
a checkpoint library's after a failed write, would keep a job on its machines long after its last line:

    1. output is flushed, and from here on the end takes at most so many seconds
    2. Python's usual end: threads are waited for, exit handlers run
    3. os._exit: the destructors of libraries are not waited for

Everything that must be on disk is written before: rows and the ledger when they are made, checkpoints when closed.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

SECONDS = 30.0  # of a successful end: exit handlers may still send data, hosts wait for each other
FAILED_SECONDS = 10.0  # of any other


def run(main: Callable[[], object]) -> NoReturn:
    """Runs a command, and ends the process with it. In the main thread."""
    try:
        main()
        code = 0
    except SystemExit as system_exit:
        code = code_of(system_exit)
    except BaseException as error:  # noqa: BLE001  printed as Python does at the end of a program
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(code)


def end(code: int) -> NoReturn:
    """Ends the process, which has nothing more to do; called by the main thread."""
    after(FAILED_SECONDS if code else SECONDS, code)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C leaves at once
    _flush()
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # Python has no public name for it
        atexit._run_exitfuncs()  # nor for that; it prints what a handler raises
    except BaseException as error:  # noqa: BLE001  likewise
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        _flush()
        os._exit(code)


def after(seconds: float, code: int) -> None:
    """Ends the process after `seconds` even if something hangs, unless C code keeps Python's other threads from
    running."""
    timer = threading.Timer(seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()


def code_of(system_exit: SystemExit) -> int:
    """The exit code, as in Python: 0 for None; a value that is not a number is printed and gives 1."""
    if system_exit.code is None or isinstance(system_exit.code, int):
        return system_exit.code or 0
    print(system_exit.code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()

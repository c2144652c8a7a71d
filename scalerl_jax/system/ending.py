"""How the process of a command ends: with its exit code, in bounded time, whatever a library's threads still do.

At its end Python waits for every thread that is no daemon and for every executor's workers, for ever. One that is
stuck, as a checkpoint library's after a write that failed, would keep a job on its machines long after its last line:

    1. what is written is flushed, and the end has so many seconds from here on
    2. as Python ends by itself: threads are waited for, exit handlers run
    3. os._exit: what a library does when it is taken down is not waited for

What is to be on disk is there before: rows and the ledger when they are written, checkpoints when they are closed.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

SECONDS = 30.0  # of a good end: exit handlers may send what is left to be sent, hosts wait for each other
FAILED_SECONDS = 10.0  # of any other


def run(main: Callable[[], object]) -> NoReturn:
    """Runs a command to its end, and the process with it. In the main thread."""
    try:
        main()
        code = 0
    except SystemExit as system_exit:
        code = code_of(system_exit)
    except BaseException as error:  # noqa: BLE001  told as Python does at the end of a program
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(code)


def end(code: int) -> NoReturn:
    """Ends the process, which has nothing more to do; of its threads, the main one calls it."""
    after(FAILED_SECONDS if code else SECONDS, code)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C leaves at once
    _flush()
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # Python has no public name for it
        atexit._run_exitfuncs()  # nor for that; it tells itself what a handler raises
    except BaseException as error:  # noqa: BLE001  likewise
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        _flush()
        os._exit(code)


def after(seconds: float, code: int) -> None:
    """Ends the process even if something hangs until then, but in C that keeps Python's other threads from running."""
    timer = threading.Timer(seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()


def code_of(system_exit: SystemExit) -> int:
    """As Python has it: none is 0, and what is no number is told, and is 1."""
    if system_exit.code is None or isinstance(system_exit.code, int):
        return system_exit.code or 0
    print(system_exit.code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()

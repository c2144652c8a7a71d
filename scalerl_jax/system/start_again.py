"""The same command once more, in the same process: as if it had ended and been started again by hand."""

import os
import signal
import sys
from typing import NoReturn

from scalerl_jax.system import signals

_ENVIRONMENT = dict(os.environ)  # as it was given, before anything is settled in it


def start_again() -> NoReturn:
    """Everything is closed. What is still open behind Python's back, an accelerator for one, goes with the program.

    Raises signals.Interrupted where a signal has come; one that comes from now on ends the process.
    """
    for number in signals.SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signals.look()
    sys.stdout.flush()
    sys.stderr.flush()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
            os.set_inheritable(int(name), False)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], _ENVIRONMENT)

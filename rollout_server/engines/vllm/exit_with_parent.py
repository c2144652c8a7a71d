"""vLLM's processes end with the server, however it ended: vLLM itself leaves them behind when its parent is killed.

A thread of each worker waits for the end of the server's process. It then asks vLLM's engine process, the worker's
parent, to end, which takes the workers along and removes what they share; one that does not is killed.
"""

import contextlib
import os
import select
import signal
import threading

# How long the engine process may take to end in good order.
GRACE_SECONDS = 10.0


def follow(server: int) -> None:
    """Returns at once. `server` is the process id to follow; raises OSError where there is none."""
    lifeline, parent = os.pidfd_open(server), os.getppid()
    engine = None if parent == server else os.pidfd_open(parent)
    threading.Thread(target=_follow, args=(lifeline, engine), name="lifeline", daemon=True).start()


def _follow(lifeline: int, engine: int | None) -> None:
    select.select([lifeline], [], [])
    if engine is not None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            signal.pidfd_send_signal(engine, signal.SIGTERM)
            if not select.select([engine], [], [], GRACE_SECONDS)[0]:
                signal.pidfd_send_signal(engine, signal.SIGKILL)
    os._exit(1)

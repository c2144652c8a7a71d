"""An announced end of this machine, taken as SIGTERM: training saves and leaves while there is time.

    gce         the instance's metadata: maintenance-event other than NONE, or preempted
    file:PATH   a file that appears (a pod's preStop hook, a node agent, a cron job may write it)

Looked at every few seconds, on a thread. Of metadata that do not answer, one line is said, and no more.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator

from scalerl_jax.system import gce_metadata, signals

LOOK_SECONDS = 5.0
_log = logging.getLogger(__name__)


def source(where: str) -> Callable[[], str]:
    """A function that says what is announced; "": nothing. It raises OSError. Raises ValueError: no such source."""
    if where == "gce":
        return _gce
    kind, _, path = where.partition(":")
    if kind == "file" and path:
        return lambda: f"{path} is there" if os.path.exists(path) else ""
    raise ValueError(f"--maintenance={where}: gce, or file:PATH")


@contextlib.contextmanager
def watched(where: str, *, every: float = LOOK_SECONDS) -> Iterator[None]:
    """In it, what is announced ends the run as SIGTERM does. "": nothing is looked at."""
    if not where:
        yield
        return
    look, stop = source(where), threading.Event()
    thread = threading.Thread(target=_watch, args=(look, stop, every), name="maintenance", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(2 * gce_metadata.ANSWER_SECONDS)


def _watch(look: Callable[[], str], stop: threading.Event, every: float) -> None:
    told = False
    while not stop.is_set():
        try:
            announced = look()
        except gce_metadata.FAULTS as error:
            if not told:
                _log.warning("maintenance is not heard of: %s", error)
            announced, told = "", True
        if announced and not signals.requested():
            os.write(2, f"maintenance is announced: {announced}\n".encode())
            signals.request()
            return
        stop.wait(every)


def _gce() -> str:
    event = _told("maintenance-event")
    if event not in ("", "NONE"):
        return f"maintenance-event is {event}"
    return "the instance is preempted" if _told("preempted") == "TRUE" else ""


def _told(name: str) -> str:
    return gce_metadata.read(name, host=gce_metadata.host_of())[:80]

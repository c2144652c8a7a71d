"""An announced end of this machine, handled as SIGTERM: training saves and leaves while there is time.

    gce         the instance's metadata: maintenance-event other than NONE, or preempted
    file:PATH   a file that appears (a pod's preStop hook, a node agent, a cron job may write it)

Polled every few seconds, on a thread. Metadata that do not answer are logged once.
"""

import contextlib
import http.client
import logging
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping

from scalerl_jax.system import signals

POLL_SECONDS = 5.0
_log = logging.getLogger(__name__)


def source(where: str) -> Callable[[], str]:
    """A function that returns the announcement, or "", and may raise OSError. Raises ValueError: no such source."""
    if where == "gce":
        return _gce
    kind, _, path = where.partition(":")
    if kind == "file" and path:
        return lambda: f"{path} is there" if os.path.exists(path) else ""
    raise ValueError(f"--maintenance={where}: gce, or file:PATH")


@contextlib.contextmanager
def watched(where: str, *, every: float = POLL_SECONDS) -> Iterator[None]:
    """While inside, an announcement ends the run as SIGTERM does. "": nothing is polled."""
    if not where:
        yield
        return
    poll, stop = source(where), threading.Event()
    thread = threading.Thread(target=_watch, args=(poll, stop, every), name="maintenance", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(2 * ANSWER_SECONDS)


def _watch(poll: Callable[[], str], stop: threading.Event, every: float) -> None:
    warned = False
    while not stop.is_set():
        try:
            announced = poll()
        except FAULTS as error:
            if not warned:
                _log.warning("maintenance is not heard of: %s", error)
            announced, warned = "", True
        if announced and not signals.requested():
            os.write(2, f"maintenance is announced: {announced}\n".encode())
            signals.request()
            return
        stop.wait(every)


def _gce() -> str:
    event = _metadata("maintenance-event")
    if event not in ("", "NONE"):
        return f"maintenance-event is {event}"
    return "the instance is preempted" if _metadata("preempted") == "TRUE" else ""


def _metadata(name: str) -> str:
    return read(name, host=host_of())[:80]


ANSWER_SECONDS = 3.0
FAULTS = (OSError, http.client.HTTPException)  # raised by `read`


def host_of(environment: Mapping[str, str] = os.environ) -> str:
    """The host of the metadata server."""
    return environment.get("GCE_METADATA_HOST", "metadata.google.internal")


def read(name: str, *, host: str) -> str:
    """A value of the instance's metadata. Raises FAULTS."""
    url = f"http://{host}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know this instance
    with direct.open(request, timeout=ANSWER_SECONDS) as answer:
        return answer.read().decode(errors="replace").strip()

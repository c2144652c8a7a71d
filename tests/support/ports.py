"""Ports of this machine that are nobody else's while a test needs them.

A socket that is bound and never listens keeps its port: the system gives it to nobody who asks for any, and whoever
dials it is refused. A server that is told to listen at this very port may do so all the same (Linux, SO_REUSEADDR).
"""

import contextlib
import socket
from collections.abc import Iterator

_KEPT: list[socket.socket] = []


def hold(host: str = "127.0.0.1") -> socket.socket:
    """Such a socket; its port is free for others once it is closed."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def port_of(held: socket.socket) -> int:
    return held.getsockname()[1]


@contextlib.contextmanager
def nowhere() -> Iterator[str]:
    """An address at which nobody answers, and nobody begins to."""
    with hold() as held:
        yield f"127.0.0.1:{port_of(held)}"


def free_port() -> int:
    """Held as long as this process lives, on all interfaces."""
    _KEPT.append(hold("0.0.0.0"))
    return port_of(_KEPT[-1])

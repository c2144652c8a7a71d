"""The connections of a server's port. Those without an accepted call are closed.

    let in     a call on it was accepted, with the token if one is required. It stays open until the client closes it
    unknown    all others: silent ones, handshakes, refused calls. Each is closed after UNKNOWN_SECONDS, and above
               MOST_UNKNOWN the oldest are closed at once

Otherwise any client that reaches the port could use up the open files of this process, and shut out the trainer without
ever showing a token. An idle client that is closed reconnects with its next call.

gRPC does not list its connections: they are found among the open files of this process. gRPC's own limits do not help:
a limit on connections keeps out the latest client, a limit on age cuts streams that are in use.
"""

import contextlib
import ipaddress
import os
import resource
import socket
import stat
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator

UNKNOWN_SECONDS = 20.0  # for a handshake over a slow network, and a first call
MOST_UNKNOWN = 128
MOST_FILES = 65_536  # the most that this process asks for
_FILES = "/dev/fd"  # on Linux and macOS

Peer = tuple[str, int]  # address, port


def raise_file_limit() -> None:
    """Allows as many open files as this process may have: many systems default to a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connections:
    """Lives on the service's event loop."""

    def __init__(self, port: int, *, clock: Callable[[], float] = time.monotonic):
        self._port, self._clock = port, clock
        self._seen: dict[Peer, float] = {}  # when it was first seen, oldest first
        self._let_in: set[Peer] = set()
        self._files = contextlib.ExitStack()
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        # A duplicate descriptor of the file under inspection, so that it stays the same file even if gRPC closes the
        # original meanwhile. Allocated in advance.
        self._name = os.dup(self._nothing)
        for file in (self._nothing, self._name):
            self._files.callback(os.close, file)

    def let_in(self, peer: str) -> None:
        """Marks a connection on which a call was accepted. peer: as gRPC writes it."""
        if (known := parsed(peer)) is not None:
            self._let_in.add(known)

    def tick(self) -> int:
        """Closes what must be closed; call it about once a second. Returns the number closed."""
        now = self._clock()
        there = {peer: file for file, peer in self._sockets()}
        self._seen = {peer: since for peer, since in self._seen.items() if peer in there}
        for peer in there:
            self._seen.setdefault(peer, now)
        self._let_in &= there.keys()
        unknown = [peer for peer in self._seen if peer not in self._let_in]
        surplus = len(unknown) - MOST_UNKNOWN
        over = [peer for i, peer in enumerate(unknown) if i < surplus or now - self._seen[peer] > UNKNOWN_SECONDS]
        for peer in over:
            self._close(there[peer], peer)
        return len(over)

    def close(self) -> None:
        self._files.close()

    def _sockets(self) -> Iterator[tuple[int, Peer]]:
        """The connections accepted at the port: (file, peer)."""
        for file in _open_files():
            with self._named(file) as found:
                if found is not None and (peer := _other_end(found, self._port)) is not None:
                    yield file, peer

    def _close(self, file: int, peer: Peer) -> None:
        """Shuts the connection down for both sides; gRPC then closes the file."""
        with self._named(file) as found, contextlib.suppress(OSError):
            if found is not None and _other_end(found, self._port) == peer:
                found.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _named(self, file: int) -> Iterator[socket.socket | None]:
        """The file as a socket, or None if it is no socket; it stays the same one inside. Opens no further file."""
        found = None
        # Sockets only: closing a duplicate of a locked file would release its lock.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                os.dup2(file, self._name, inheritable=False)
                found = socket.socket(fileno=self._name)
        try:
            yield found
        finally:
            if found is not None:
                found.detach()
            os.dup2(self._nothing, self._name, inheritable=False)


def parsed(peer: str) -> Peer | None:
    """The peer of "ipv4:127.0.0.1:7000" or "ipv6:%5B::1%5D:7000"; None for anything else."""
    kind, _, address = urllib.parse.unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _peer(host.strip("[]"), int(port))


def _peer(host: str, port: int) -> Peer | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), port


def _other_end(found: socket.socket, port: int) -> Peer | None:
    """The peer of a connection accepted at the port; None if it is none."""
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        if found.getsockname()[1] != port:
            return None
        return _peer(*found.getpeername()[:2])
    except OSError:  # it is listening or closed
        return None


def _open_files() -> Iterable[int]:
    """The open file numbers; all possible numbers if they cannot be listed, since listing needs one more file."""
    try:
        return [int(name) for name in os.listdir(_FILES)]
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST_FILES))

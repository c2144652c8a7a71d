"""Resolves --servers to the addresses of the fleet, now and later.

host:port,host:port   as written, for the whole run
file:PATH             one host:port a line; empty lines and what follows a # are skipped; read periodically
dns:///name:port      every address that the name has: a headless service, a round-robin record; resolved periodically
"""

import collections
import os
import socket


class Discovery:
    """Raises ValueError, one line that names what is wrong with the flag or field; so does resolve()."""

    def __init__(self, text: str, *, field: str = "--servers"):
        prefix = next(prefix for prefix in _RESOLVERS if text.startswith(prefix))
        self._where, self._resolve, self._target = f"{field}={text}", _RESOLVERS[prefix], text.removeprefix(prefix)
        self.changes = prefix != ""  # whether resolving again may find others
        self._listed = () if self.changes else self._checked()

    @property
    def name(self) -> str:
        """The name in the certificates of servers found by DNS; empty if each is dialled by its own name."""
        return _split(self._where, self._target)[0].strip("[]") if self._resolve is _by_name else ""

    def resolve(self) -> tuple[str, ...]:
        """The servers' addresses as of now, in order, each once; may block for seconds."""
        return self._checked() if self.changes else self._listed

    def _checked(self) -> tuple[str, ...]:
        found = self._resolve(self._where, self._target)
        if not found:
            raise ValueError(f"{self._where}: names no server")
        for address in found:
            _split(self._where, address)
        for address, times in collections.Counter(found).items():
            if times > 1:
                raise ValueError(f"{self._where}: names {address} twice")
        return tuple(found)


def _as_written(where: str, addresses: str) -> list[str]:
    return [address.strip() for address in addresses.split(",") if address.strip()]


def _by_name(where: str, name: str) -> list[str]:
    host, port = _split(where, name)
    try:
        answers = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror or error}") from error
    hosts = sorted({str(address[0]) for *_, address in answers})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


def _read(where: str, path: str) -> list[str]:
    if not os.path.isfile(path):
        raise ValueError(f"{where}: no such file")
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: cannot be read ({error})") from error
    return [line for line in lines if line]


_RESOLVERS = {"file:": _read, "dns:///": _by_name, "": _as_written}


def _split(where: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{where}: {address!r} is not host:port")
    return host, int(port)

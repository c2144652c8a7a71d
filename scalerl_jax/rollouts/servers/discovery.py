"""What --servers means: the addresses of the fleet, now and later.

host:port,host:port   as written, for the whole run
file:PATH             one host:port a line; empty lines and what follows a # are skipped; looked at again and again
dns:///name:port      every address that the name has: a headless service, a round-robin record; asked again and again
"""

import collections
import os
import socket


class Discovery:
    """Raises ValueError, one line that names what is wrong with --servers; so does resolve()."""

    def __init__(self, text: str):
        self._text = text
        self._listed: tuple[str, ...] = ()
        if not text.startswith(("file:", "dns:///")):
            parts = [part.strip() for part in text.split(",") if part.strip()]
            self._listed = _checked(f"--servers={text}", parts)

    @property
    def changes(self) -> bool:
        """Whether another look may find others."""
        return not self._listed

    @property
    def name(self) -> str:
        """What the certificates of servers found by a name carry; empty where each is dialled by what it is called."""
        return _split(self._where, self._target)[0].strip("[]") if self._text.startswith("dns:///") else ""

    def resolve(self) -> tuple[str, ...]:
        """The servers' addresses as of now, in order, each once; may block for seconds."""
        if self._listed:
            return self._listed
        found = _read(self._where, self._target) if self._text.startswith("file:") else self._by_name()
        return _checked(self._where, found)

    @property
    def _where(self) -> str:
        return f"--servers={self._text}"

    @property
    def _target(self) -> str:
        return self._text.removeprefix("file:").removeprefix("dns:///")

    def _by_name(self) -> list[str]:
        host, port = _split(self._where, self._target)
        try:
            answers = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ValueError(f"{self._where}: {error.strerror or error}") from error
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


def _checked(where: str, found: list[str]) -> tuple[str, ...]:
    if not found:
        raise ValueError(f"{where}: names no server")
    for address in found:
        _split(where, address)
    for address, times in collections.Counter(found).items():
        if times > 1:
            raise ValueError(f"{where}: names {address} twice")
    return tuple(found)


def _split(where: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{where}: {address!r} is not host:port")
    return host, int(port)

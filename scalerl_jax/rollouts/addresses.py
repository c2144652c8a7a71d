"""What --servers means: the addresses of the fleet.

host:port,host:port   as written
file:PATH             one host:port a line; empty lines and what follows a # are skipped
dns:///name:port      every address that the name has now: a headless service, a round-robin record
"""

import os
import socket


def parse(text: str) -> list[str]:
    """The servers' addresses, in order. Raises ValueError, one line that names what is wrong with --servers."""
    if text.startswith("file:"):
        found = _read(text.removeprefix("file:"))
    elif text.startswith("dns:///"):
        found = _resolve(text.removeprefix("dns:///"))
    else:
        found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ValueError(f"--servers={text}: names no server")
    for address in found:
        _split(address)
    return found


def _read(path: str) -> list[str]:
    if not os.path.isfile(path):
        raise ValueError(f"--servers=file:{path}: no such file")
    with open(path, encoding="utf-8") as file:
        lines = [line.partition("#")[0].strip() for line in file]
    return [line for line in lines if line]


def _resolve(target: str) -> list[str]:
    host, port = _split(target)
    try:
        answers = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"--servers=dns:///{target}: {error.strerror or error}") from error
    hosts = dict.fromkeys(str(address[0]) for *_, address in answers)
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--servers: {address!r} is not host:port")
    return host, int(port)

"""Where the fleet's servers are, now and later, and what they are shown.

--servers is resolved to addresses:

    host:port,host:port   as written, for the whole run
    file:PATH             one host:port a line; empty lines and what follows a # are skipped; read periodically
    dns:///name:port      every address that the name has: a headless service, a round-robin record; resolved
                          periodically

The trainer's credentials and the authority it trusts are in the files that config.fleet names, read at the start. The
config holds only paths. The files' contents go to the clients of the servers and nowhere else.
"""

import asyncio
import collections
import dataclasses
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Self

from scalerl_jax.config import FleetConfig
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract import security
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.requests import Routed

_log = logging.getLogger(__name__)

_HERE = "config.fleet."


@dataclasses.dataclass(frozen=True)
class Servers:
    """Where servers are, what credentials they are shown, and what they are checked against when they are met."""

    addresses: Sequence[str]  # host:port of each at the start
    probe_prompts: Sequence[Row]  # that candidates sample for the probe
    # Returns those listed now; called every fleet.discovery_seconds on a separate thread. None: they never change.
    resolve: Callable[[], Sequence[str]] | None = None
    credentials: security.Credentials = security.PLAIN
    vocabulary: int = 0  # of the policy; token ids are below it. 0: not known
    routed: Routed | None = None  # of the policy; None: it has no experts
    # Raises ProbeError on the status of a server that cannot serve this run.
    check: Callable[[str, pb.StatusReply], None] = lambda server, status: None


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


@dataclasses.dataclass(frozen=True)
class ListedServers:
    """Where servers are, and what credentials they are shown."""

    addresses: tuple[str, ...] = ()  # host:port of each at the start
    resolve: Callable[[], Sequence[str]] | None = None  # those listed now; may block. None: they never change
    credentials: security.Credentials = security.PLAIN

    @classmethod
    def of(cls, text: str, fleet: FleetConfig, *, field: str = "--servers") -> Self:
        """text: the value of the flag or field; "": no server is listed. Raises ValueError as Discovery and
        read_credentials."""
        if not text:
            return cls(credentials=read_credentials(fleet))
        found = Discovery(text, field=field)
        shown = read_credentials(fleet, name=found.name)
        return cls(found.resolve(), found.resolve if found.changes else None, shown)


async def relist(
    resolve: Callable[[], Sequence[str]] | None,
    update: Callable[[Sequence[str]], None],
    *,
    seconds: float,
    warning: str,
) -> None:
    """Until cancelled: every so many seconds lists servers again, on a separate thread, and calls `update`. Returns at
    once if they never change. A list that cannot be read leaves them as they are, which is logged once: a file that is
    being replaced, a name server that cannot be reached. warning: that line, with %s for the error."""
    complaint = ""
    while resolve is not None:
        await asyncio.sleep(seconds)
        try:
            addresses = await asyncio.get_running_loop().run_in_executor(None, resolve)
        except ValueError as error:
            if str(error) != complaint:
                _log.warning(warning, error)
            complaint = str(error)
        else:
            complaint = ""
            update(addresses)


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


def read_credentials(config: FleetConfig, *, name: str = "") -> security.Credentials:
    """Raises ValueError, one line that names the field and the file.

    name: the name in the servers' certificates, if config.fleet.tls_name is empty.
    """
    where = (f"{_HERE}tls_certificate", f"{_HERE}tls_key")
    pair = security.read_pair(config.tls_certificate, config.tls_key, where=where)
    token = security.read_token(config.token_file, where=f"{_HERE}token_file")
    for field in ("tls_key", "token_file"):
        if why := security.exposed(getattr(config, field), where=_HERE + field):
            _log.warning("%s", why)
    if not config.tls_authority:
        for field in ("tls_certificate", "tls_name"):
            if getattr(config, field):
                raise ValueError(f"{_HERE}{field}={getattr(config, field)}: requires {_HERE}tls_authority")
        return security.Credentials(token=token)
    authority = security.read_authority(config.tls_authority, where=f"{_HERE}tls_authority")
    return security.Credentials(authority, *pair, token, config.tls_name or name)


class Plaintext:
    """Warns once that a token is sent over a network in plaintext."""

    def __init__(self, shown: security.Credentials):
        self._worth_a_warning = bool(shown.token) and not shown.authority

    def dial(self, address: str) -> None:
        """Called with host:port before it is dialled."""
        host = address.rpartition(":")[0].strip("[]")
        if self._worth_a_warning and not _is_this_machine(host):
            self._worth_a_warning = False
            _log.warning(
                "the token is sent to %s in plaintext, for everybody on the way to read: "
                "%stls_authority would encrypt the connection (and --tls_certificate at the server)",
                *(host, _HERE),
            )


def _is_this_machine(host: str) -> bool:
    """Judged by its name alone; no DNS lookup."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback

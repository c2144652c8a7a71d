"""Whom a version may be passed on to: what a header may say, and whom this server then dials.

    header   at most MAXIMUM_FAN_OUT servers behind one, MAXIMUM_RELAY_DEPTH behind each other, MAXIMUM_RELAYS in all,
             each a host:port. Looked at before anything is made of it

    dialled by a server    without TLS   loopback addresses
                           with TLS      any host, by TLS alone; the certificate must be for that host and signed by
                                         --tls_authority
                           --relay_to  beyond loopback these hosts and networks alone; without TLS too, but then no
                                         server that has a token passes anything on

Whoever has the token may name any host in a header. So the token goes to loopback and to hosts whose certificate has
been checked, and nowhere else; addresses that belong to no single host (multicast, link-local, unspecified) are never
dialled; and relay.py answers so that nobody learns what listens where. No name is looked up here: what is allowed
is what is written, and what a name leads to has to show its certificate.
"""

import collections
import dataclasses
import ipaddress
import re
from collections.abc import Sequence

from scalerl_jax.contract import addresses, limits
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.security import PLAIN, Credentials

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)


def check(relays: Sequence[pb.Relay]) -> None:
    """Raises ValueError where a header names more servers than it may, or one that is not host:port."""
    total, rows = 0, collections.deque([(1, relays)])
    while rows:
        depth, row = rows.popleft()
        if row and depth > limits.MAXIMUM_RELAY_DEPTH:
            raise ValueError(f"relays names servers behind each other, more than {limits.MAXIMUM_RELAY_DEPTH} of them")
        if len(row) > limits.MAXIMUM_FAN_OUT:
            raise ValueError(f"relays names {len(row)} servers behind one, at most {limits.MAXIMUM_FAN_OUT} may be")
        total += len(row)
        if total > limits.MAXIMUM_RELAYS:
            raise ValueError(f"relays names more than {limits.MAXIMUM_RELAYS} servers")
        for relay in row:
            addresses.check(relay)
            rows.append((depth + 1, relay.relays))


@dataclasses.dataclass(frozen=True)
class Reach:
    """Whom a server dials to pass a version on.

    credentials: what they are shown; None: nobody is dialled.
    beyond: hosts and networks beyond loopback, of --relay_to; None: not given.
    """

    credentials: Credentials | None = PLAIN
    beyond: tuple[str | Network, ...] | None = None

    @property
    def tls(self) -> bool:
        return self.credentials is not None and bool(self.credentials.authority)

    def why_not(self, address: str) -> str:
        """Why this host:port is not dialled; empty where it is."""
        if self.credentials is None:
            return "this server cannot show itself to others"
        host = addresses.host_of(address)
        ip = addresses.ip_of(host)
        if host == "localhost" or (ip is not None and ip.is_loopback):
            return ""
        if ip is not None and (ip.is_multicast or ip.is_unspecified or ip.is_link_local):
            return "its address is not one of a single host"
        if self.beyond is not None and not any(_within(host, ip, one) for one in self.beyond):
            return "--relay_to does not name its host"
        if self.tls:
            return ""
        if self.beyond is None:
            return "without TLS a server passes nothing on beyond its machine"
        return "a token is not sent without TLS" if self.credentials.token else ""


LOOPBACK = Reach()


def parse_beyond(text: str) -> tuple[str | Network, ...]:
    """Reads host names and networks with commas between (10.0.0.0/8,fd00::/8,.pod.example: names that end so).

    Raises ValueError naming the part.
    """
    found: list[str | Network] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(ipaddress.ip_network(part))
        except ValueError as error:
            if _looks_like_ip(part) or not _HOST.fullmatch(part.removeprefix(".")):
                raise ValueError(f"{part}: neither a host name nor a network ({error})") from None
            found.append(part.lower())
    return tuple(found)


def _looks_like_ip(text: str) -> bool:
    return "/" in text or ":" in text or re.fullmatch(r"[0-9.]+", text) is not None


def _within(host: str, ip: ipaddress.IPv4Address | ipaddress.IPv6Address | None, one: str | Network) -> bool:
    if isinstance(one, str):
        return host.lower().endswith(one) if one.startswith(".") else host.lower() == one
    return ip is not None and ip.version == one.version and ip in one

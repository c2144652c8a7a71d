"""What a header may call a server that a version is passed on to: a plain host:port, the same for whoever reads it.

    name:port   1.2.3.4:port   [2001:db8::1]:port

Nothing that gRPC reads in another way (unix:, dns:name, ipv4:..., an interface behind a %, ...) is one.
"""

import ipaddress
import re

from scalerl_jax.contract import limits
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.peer_text import said

_ADDRESS = re.compile(
    r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?)):([0-9]{1,5})", re.ASCII
)


def check(hop: pb.Relay) -> None:
    """Raises ValueError where a header may not name this server; whom it names behind it is not looked at."""
    if len(hop.address) > limits.MAXIMUM_ADDRESS_BYTES or not host_of(hop.address):
        raise ValueError(f"relays names {said(hop.address)!r}, which is not host:port")
    if len(hop.server_id) > limits.MAXIMUM_ID_BYTES:
        raise ValueError(f"relays names a server_id of {len(hop.server_id)} characters")


def host_of(address: str) -> str:
    """Of a host:port; empty where it is none."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[3]) < 65536:
        return ""
    if match[1] and ip_of(match[1]) is None:
        return ""
    return match[1] or match[2]


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None where it is a name. IPv4 in the clothes of IPv6 is IPv4."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip

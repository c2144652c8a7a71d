"""The trainer's credentials and the authority it trusts: the files that config.fleet names, read at the start.

The config holds only paths. The files' contents go to the clients of the servers and nowhere else.
"""

import ipaddress
import logging

from scalerl_jax.config import FleetConfig
from scalerl_jax.contract import security

_log = logging.getLogger(__name__)

_HERE = "config.fleet."


def read(config: FleetConfig, *, name: str = "") -> security.Credentials:
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
        self._worth_saying = bool(shown.token) and not shown.authority

    def dial(self, address: str) -> None:
        """Called with host:port before it is dialled."""
        host = address.rpartition(":")[0].strip("[]")
        if self._worth_saying and not _is_this_machine(host):
            self._worth_saying = False
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

"""Who may talk to scalerl-serve: what the flags on TLS and the token say, and must say beyond this machine.

    loopback                 anything goes: plain, a token, TLS
    any other --host         TLS and a token, or --insecure

With --tls_client_authority a client must show a certificate too, beside the token. Whom weights are passed on to, and
shown the token: reach.py.
"""

import dataclasses
from collections.abc import Iterator

from rollout_server import reach
from rollout_server import serve_flags as given
from scalerl_jax.contract import security


def read(host: str) -> security.Access:
    """What the flags say. Raises ValueError, one line that names the flag and the file."""
    access = security.Access()
    certificate, key = given.TLS_CERTIFICATE.value, given.TLS_KEY.value
    client_authority, servers_authority = given.TLS_CLIENT_AUTHORITY.value, given.TLS_AUTHORITY.value
    if certificate or key:
        pair = security.read_pair(certificate, key, where=("--tls_certificate", "--tls_key"))
        authority = b""
        if client_authority:
            authority = security.read_authority(client_authority, where="--tls_client_authority")
        passing = None
        if servers_authority:
            passing = security.Credentials(security.read_authority(servers_authority, where="--tls_authority"), *pair)
        access = security.Access(security.server_credentials(*pair, authority), bool(authority), passing=passing)
    elif client_authority:
        raise ValueError(f"--tls_client_authority={client_authority}: goes with --tls_certificate and --tls_key")
    elif servers_authority:
        raise ValueError(f"--tls_authority={servers_authority}: goes with --tls_certificate and --tls_key")
    if given.TOKEN_FILE.value:
        token = security.read_token(given.TOKEN_FILE.value, where="--token_file")
        passing = access.passing and dataclasses.replace(access.passing, token=token)
        access = dataclasses.replace(access, token=token, passing=passing)
    if not (access.credentials and access.token) and not given.INSECURE.value and not _loopback(host):
        raise ValueError(
            f"--host={host}: beyond this machine a server needs --tls_certificate, --tls_key and --token_file "
            "(or --insecure, where everybody on the network may replace its weights)"
        )
    beyond = None
    if given.RELAY_TO.value is not None:
        try:
            beyond = reach.parse_beyond(given.RELAY_TO.value)
        except ValueError as error:
            raise ValueError(f"--relay_to={given.RELAY_TO.value}: {error}") from None
    return dataclasses.replace(access, beyond=beyond, warnings=tuple(_warnings(access, host)))


def _warnings(access: security.Access, host: str) -> Iterator[str]:
    """What whoever starts the server should know."""
    secrets = {"--tls_key": given.TLS_KEY.value, "--token_file": given.TOKEN_FILE.value}
    for where, path in secrets.items():
        if path and (why := security.exposed(path, where=where)):
            yield why
    if _loopback(host):
        return
    if not access.token:
        yield f"--insecure: whoever reaches {host} may read the prompts and replace the weights: no token is asked for"
    if access.credentials is None:
        yield f"--insecure: whoever sees the packets to and from {host} reads prompts and weights: there is no TLS"
        if access.token:
            yield f"--token_file={given.TOKEN_FILE.value}: the token is sent in plaintext, since there is no TLS"


def _loopback(host: str) -> bool:
    try:
        return security.is_loopback(host)
    except ValueError as error:
        raise ValueError(f"--host={error}") from None

"""Who may talk to scalerl-serve: its flags on TLS and the token, and what they must be beyond this machine.

    loopback                 anything goes: plain, a token, TLS
    any other --host         TLS and a token, or --insecure

With --tls_client_authority a client must show a certificate too, beside the token.
"""

import dataclasses

from absl import flags

from rollout_server.contract import security

_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM of this server's certificate; empty: no TLS.")
_KEY = flags.DEFINE_string("tls_key", "", "PEM of its private key.")
_CLIENT_AUTHORITY = flags.DEFINE_string(
    "tls_client_authority", "", "PEM of who signs the clients' certificates; empty: none is asked for."
)
_AUTHORITY = flags.DEFINE_string(
    "tls_authority", "", "PEM of who signs the other servers' certificates; empty: no weights are passed on to them."
)
_TOKEN_FILE = flags.DEFINE_string("token_file", "", "File with the token that every call must carry; empty: none.")
_INSECURE = flags.DEFINE_bool(
    "insecure", False, "Listen beyond this machine without TLS and a token: whoever reaches it may replace its weights."
)


def read(host: str) -> security.Access:
    """What the flags say. Raises ValueError, one line that names the flag and the file."""
    access = security.Access()
    if _CERTIFICATE.value or _KEY.value:
        pair = security.read_pair(_CERTIFICATE.value, _KEY.value, where=("--tls_certificate", "--tls_key"))
        authority = b""
        if _CLIENT_AUTHORITY.value:
            authority = security.read_authority(_CLIENT_AUTHORITY.value, where="--tls_client_authority")
        passing = None
        if _AUTHORITY.value:
            passing = security.Credentials(security.read_authority(_AUTHORITY.value, where="--tls_authority"), *pair)
        access = security.Access(security.server_credentials(*pair, authority), bool(authority), passing=passing)
    elif _CLIENT_AUTHORITY.value:
        raise ValueError(f"--tls_client_authority={_CLIENT_AUTHORITY.value}: goes with --tls_certificate and --tls_key")
    elif _AUTHORITY.value:
        raise ValueError(f"--tls_authority={_AUTHORITY.value}: goes with --tls_certificate and --tls_key")
    if _TOKEN_FILE.value:
        token = security.read_token(_TOKEN_FILE.value, where="--token_file")
        passing = access.passing and dataclasses.replace(access.passing, token=token)
        access = dataclasses.replace(access, token=token, passing=passing)
    if not (access.credentials and access.token) and not _INSECURE.value and not _loopback(host):
        raise ValueError(
            f"--host={host}: beyond this machine a server needs --tls_certificate, --tls_key and --token_file "
            "(or --insecure, where everybody on the network may replace its weights)"
        )
    return access


def _loopback(host: str) -> bool:
    try:
        return security.is_loopback(host)
    except ValueError as error:
        raise ValueError(f"--host={error}") from None

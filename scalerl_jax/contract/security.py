"""TLS and the token, at both ends of a connection.

    trainer                                          server
      connect(address, Credentials)                    Access.credentials   certificate, key, the clients' authority
        TLS: the server's certificate is checked       TokenInterceptor     every call of every service, health and
        against `authority`, `certificate` is shown                         reflection too
        authorization: Bearer TOKEN, with every call

A call without the right token is ended with UNAUTHENTICATED before any of its messages is read. Tokens are compared in
constant time, and appear in no log, no config and no repr. A token without TLS can be read from the packets: it keeps
out other users of one machine, but no client on a network.

Left out on purpose: no users, no rights. A client that may talk to a server may do all that the contract offers.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from scalerl_jax.contract import limits, peer_text, rpc

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# In DER: tags and lengths of the sequence (30, 32 or 34 bytes) and of its two times (13 or 15 bytes).
_TIME = rb"(?:\x17\x0d|\x18\x0f)([0-9]{12}(?:[0-9]{2})?)Z"
_VALIDITY = re.compile(rb"\x30[\x1e\x20\x22]" + _TIME + _TIME)


def validity(pem: bytes) -> list[tuple[datetime.datetime, datetime.datetime]]:
    """(from, until) of each certificate in PEM, in order. Raises ValueError if one has no dates as above."""
    return [_validity(ssl.PEM_cert_to_DER_cert(block.decode("ascii"))) for block in _PEM.findall(pem)]


def check_validity(
    pem: bytes, *, where: str, one_is_enough: bool = False, now: datetime.datetime | None = None
) -> None:
    """Raises ValueError that begins with `where` and names the date, if the first certificate is not valid now.

    The first is the one shown. For those after it a warning is logged: a peer may find another chain to an authority it
    trusts, as with an authority that was signed by an old one as well, and needs none of them.
    one_is_enough: raises only if none is valid, as for a list of authorities. now: by default this machine's clock.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        dates = validity(pem)
    except ValueError:
        return  # unusual, but not judged here
    if one_is_enough and any(begin <= now <= end for begin, end in dates):
        return
    for number, (begin, end) in enumerate(dates, 1):
        if begin <= now <= end:
            continue
        which = f"certificate {number}, behind the one that is shown," if number > 1 else "the certificate"
        why = f"{where}: {which} expired on {end:%Y-%m-%d %H:%M} UTC"
        if now < begin:
            why = (
                f"{where}: {which} is not valid before {begin:%Y-%m-%d %H:%M} UTC "
                f"(by this machine's clock it is {now:%Y-%m-%d %H:%M} now)"
            )
        if number == 1:
            raise ValueError(why)
        log.warning("%s", why)


def _validity(der: bytes) -> tuple[datetime.datetime, datetime.datetime]:
    found = _VALIDITY.search(der)
    if found is None:
        raise ValueError("not a certificate")
    return _time(found[1].decode()), _time(found[2].decode())


def _time(digits: str) -> datetime.datetime:
    if len(digits) == 12:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    return datetime.datetime.strptime(digits, "%Y%m%d%H%M%S").replace(tzinfo=datetime.UTC)


HEADER = "authorization"
SHORTEST_TOKEN = 16  # characters

# How gRPC ends the details of a call whose connection the other end has closed at once.
CLOSED = re.compile(r"(Socket closed|Connection reset by peer|Broken pipe)( \(\d+\))?$")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Credentials:
    """A client's certificate and token, and the authority it trusts. An empty one is a plain connection."""

    authority: bytes = b""  # PEM of the signer of the servers' certificates; empty: no TLS
    certificate: bytes = dataclasses.field(default=b"", repr=False)  # PEM, for servers that ask for one
    key: bytes = dataclasses.field(default=b"", repr=False)
    token: str = dataclasses.field(default="", repr=False)
    name: str = ""  # that the servers' certificates carry; empty: the host dialled


PLAIN = Credentials()


@dataclasses.dataclass(frozen=True)
class Access:
    """Which clients may talk to a server."""

    credentials: grpc.ServerCredentials | None = None  # None: no TLS
    client_certificates: bool = False  # a client must show one
    token: str = dataclasses.field(default="", repr=False)
    warnings: tuple[str, ...] = ()  # for the operator of the server, a line each

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        return [TokenInterceptor(self.token)] if self.token else []

    def words(self, host: str) -> str:
        """Which clients can talk to a server that listens on `host`."""
        who = "this machine only" if is_loopback(host) else "every client that reaches it"
        tls = "no TLS" if self.credentials is None else "TLS"
        return f"{who}: {tls}{', client certificates' * self.client_certificates}, {'a' if self.token else 'no'} token"


OPEN = Access()


# ------------------------------------------------------------------------- files; an empty path: nothing is given


def read_token(path: str, *, where: str) -> str:
    """The token in a file; white space around it does not count. Raises ValueError that begins with `where`."""
    if not path:
        return ""
    text = _read(path, where).decode("utf-8", errors="replace").strip()
    if len(text) < SHORTEST_TOKEN:
        raise ValueError(f"{where}={path}: holds {len(text)} characters, a token has at least {SHORTEST_TOKEN}")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"{where}={path}: a token is one word of printable ASCII")
    return text


def exposed(path: str, *, where: str) -> str:
    """What is wrong with the mode of a file that holds a secret, in one line; empty if nothing is."""
    mode = stat.S_IMODE(os.stat(path).st_mode) if path else 0
    if not mode & 0o007:
        return ""
    what = "write to" if mode & 0o002 else "read"
    return f"{where}={path}: every user of this machine can {what} it (mode {mode:04o}; chmod 600 mends that)"


def read_authority(path: str, *, where: str) -> bytes:
    """Certificates in PEM. Raises ValueError that begins with `where`: not PEM, or not valid now."""
    if not path:
        return b""
    data = _read(path, where)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{where}={path}: not certificates in PEM ({_reason(error)})") from None
    check_validity(data, where=f"{where}={path}", one_is_enough=True)
    return data


def read_pair(certificate: str, key: str, *, where: tuple[str, str]) -> tuple[bytes, bytes]:
    """A certificate (with those between it and its authority) and its private key, both PEM.

    Raises ValueError naming the flag and the file: one without the other, not PEM, not a pair, not valid now.
    """
    for given, other in (((certificate, where[0]), (key, where[1])), ((key, where[1]), (certificate, where[0]))):
        if given[0] and not other[0]:
            raise ValueError(f"{given[1]}={given[0]}: requires {other[1]}")
    if not certificate:
        return b"", b""
    data = _read(certificate, where[0]), _read(key, where[1])
    try:
        # OpenSSL asks for a password on the terminal unless one is given.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"-")
    except (ssl.SSLError, ValueError) as error:
        why = _reason(error)
        raise ValueError(
            f"{where[0]}={certificate}, {where[1]}={key}: not a certificate and its unencrypted key in PEM ({why})"
        ) from None
    check_validity(data[0], where=f"{where[0]}={certificate}")
    return data


def _read(path: str, where: str) -> bytes:
    if not os.path.isfile(path):
        raise ValueError(f"{where}={path}: no such file")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{where}={path}: {error.strerror}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


# --------------------------------------------------------------------------------------------------------- client


class _TokenChannel:
    """A channel whose every call carries the token.

    Not an interceptor: those of grpc.aio put a proxy between caller and stream, which reads ahead and hides errors.
    """

    def __init__(self, channel: Any, token: str):
        self._channel, self._metadata = channel, ((HEADER, f"Bearer {token}"),)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return value
        return lambda *args, **kwargs: functools.partial(value(*args, **kwargs), metadata=self._metadata)


def dial(address: str, credentials: Credentials, *, secure: Callable[..., Any], insecure: Callable[..., Any]) -> Any:
    """A channel to host:port, made by gRPC's `secure` if there is an authority, else by `insecure`; without token."""
    if not credentials.authority:
        return insecure(address, options=limits.CHANNEL_OPTIONS)
    name = [("grpc.ssl_target_name_override", credentials.name)] if credentials.name else []
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key or None, credentials.certificate or None)
    return secure(address, tls, options=[*limits.CHANNEL_OPTIONS, *name])


def connect(address: str, credentials: Credentials = PLAIN) -> Any:
    """A channel to host:port, for a stub of grpc.aio; nothing is dialled before the first call."""
    channel = dial(address, credentials, secure=grpc.aio.secure_channel, insecure=grpc.aio.insecure_channel)
    return _TokenChannel(channel, credentials.token) if credentials.token else channel


@contextlib.contextmanager
def connect_here(address: str, credentials: Credentials = PLAIN) -> Iterator[Any]:
    """Likewise for blocking calls, on any thread; closed at the end."""
    with dial(address, credentials, secure=grpc.secure_channel, insecure=grpc.insecure_channel) as channel:
        yield _TokenChannel(channel, credentials.token) if credentials.token else channel


def refusal(error: grpc.RpcError, credentials: Credentials) -> str:
    """Why the two ends do not authenticate each other, in words; empty if something else ended the call."""
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return "it does not take the token" if credentials.token else "it asks for a token"
    if code is not grpc.StatusCode.UNAVAILABLE:
        return ""
    if "CERTIFICATE_VERIFY_FAILED" in details and "certificate has expired" in details:
        return "its TLS certificate has expired (or this machine's clock is ahead)"
    if "CERTIFICATE_VERIFY_FAILED" in details and "certificate is not yet valid" in details:
        return "its TLS certificate is not valid yet (or this machine's clock is behind)"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"its TLS certificate is not signed by the authority given ({details.rpartition(': ')[2]})"
    if "Hostname Verification" in details:
        return "its TLS certificate is for another name than " + (credentials.name or "the one dialled")
    if "WRONG_VERSION_NUMBER" in details:
        return "it speaks without TLS"
    if "handshake failed" in details:
        return f"the TLS handshake failed ({details.rpartition('OPENSSL_internal:')[2]})"
    # In TLS 1.3 a client finishes the handshake before the server checks its certificate, and gRPC servers give no
    # reason when they close. What the client sees depends on what was still in flight between the two.
    if "failed to connect" in details and CLOSED.search(details):
        if not credentials.authority:
            return "it closes the connection at once, as a server with TLS does"
        which = "another client certificate" if credentials.certificate else "a client certificate"
        return f"it closes the connection after the TLS handshake, as one that wants {which} does"
    return ""


# --------------------------------------------------------------------------------------------------------- server


def server_credentials(certificate: bytes, key: bytes, client_authority: bytes = b"") -> grpc.ServerCredentials:
    """client_authority: PEM of the signer of the clients' certificates; empty: none is required."""
    return grpc.ssl_server_credentials([(key, certificate)], client_authority or None, bool(client_authority))


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call that does not carry the token."""

    def __init__(self, token: str):
        self._expected = _digest(f"Bearer {token}")
        self._log_limit = peer_text.LogLimit()

    async def intercept_service(
        self, continuation: rpc.Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        shown = [value for name, value in handler_call_details.invocation_metadata if name == HEADER]
        if len(shown) == 1 and hmac.compare_digest(_digest(shown[0]), self._expected):
            return await continuation(handler_call_details)

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            if times := self._log_limit.happened("refused", now=time.monotonic()):
                text = "%d calls without the right token refused; the last: %s from %s"
                log.warning(text, times, handler_call_details.method, context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token came" if not shown else "not the token")

        # A stream both ways, whatever the method is: nothing is read before the refusal.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _digest(value: str | bytes) -> bytes:
    # Of equal length, so that the comparison takes equal time.
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).digest()


def is_loopback(host: str) -> bool:
    """Whether listening on `host` admits this machine only. Raises ValueError if the name is unknown."""
    try:
        answers = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"{host}: {error.strerror or error}") from error
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in answers)

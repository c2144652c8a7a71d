"""From when and until when certificates are valid, which the standard library tells of a connection's peer only.

    Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version?, INTEGER serialNumber, SEQUENCE signature,
                    SEQUENCE issuer, validity SEQUENCE { Time notBefore, Time notAfter }, ... }, ... }      (RFC 5280)
    Time        ::= UTCTime YYMMDDHHMMSSZ (50 to 99 are of the last century) | GeneralizedTime YYYYMMDDHHMMSSZ

Only these fields are looked at; whether a certificate is right in all else is for TLS to say.
"""

import datetime
import logging
import re
import ssl

log = logging.getLogger(__name__)

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


def validity(pem: bytes) -> list[tuple[datetime.datetime, datetime.datetime]]:
    """(from, until) of each certificate in PEM, in order. Raises ValueError where one is not laid out as above."""
    return [_validity(ssl.PEM_cert_to_DER_cert(block.decode("ascii"))) for block in _PEM.findall(pem)]


def check(pem: bytes, *, where: str, one_is_enough: bool = False, now: datetime.datetime | None = None) -> None:
    """Raises ValueError that begins with `where` and tells the date, where the first certificate is not valid now.

    The first is the one shown. Those behind it are a warning: a peer may find another way to whom it trusts, as with
    an authority that was signed by an old one as well, and needs none of them.
    one_is_enough: an error where none of them is, as of a list of authorities. now: default: by this machine's clock.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        dates = validity(pem)
    except ValueError:
        return  # odd, but not for us to say
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
    try:
        certificate = _inside(der, 0, _SEQUENCE)
        at = _inside(der, certificate, _SEQUENCE)
        if der[at] == _VERSION:
            at = _behind(der, at)
        for _ in range(3):  # serialNumber, signature, issuer
            at = _behind(der, at)
        begin = _inside(der, at, _SEQUENCE)
        return _time(der, begin), _time(der, _behind(der, begin))
    except (IndexError, UnicodeDecodeError) as error:
        raise ValueError("not a certificate") from error


def _header(der: bytes, at: int) -> tuple[int, int]:
    """(where the value begins, where it ends) of the element at a place."""
    size, begin = der[at + 1], at + 2
    if size >= 0x80:
        count = size & 0x7F
        size, begin = int.from_bytes(der[begin : begin + count], "big"), begin + count
    if begin + size > len(der):
        raise IndexError
    return begin, begin + size


def _inside(der: bytes, at: int, tag: int) -> int:
    if der[at] != tag:
        raise ValueError(f"an element of kind {der[at]:#x} in the place of one of kind {tag:#x}")
    return _header(der, at)[0]


def _behind(der: bytes, at: int) -> int:
    return _header(der, at)[1]


def _time(der: bytes, at: int) -> datetime.datetime:
    begin, end = _header(der, at)
    text = der[begin:end].decode("ascii")
    if der[at] == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif der[at] != _GENERALIZED_TIME:
        raise ValueError(f"an element of kind {der[at]:#x} in the place of a time")
    return datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC)

"""From when and until when certificates are valid, which the standard library tells of a connection's peer only.

    Validity ::= SEQUENCE { notBefore Time, notAfter Time }                                                  (RFC 5280)
    Time     ::= UTCTime YYMMDDHHMMSSZ (50 to 99 are of the last century) | GeneralizedTime YYYYMMDDHHMMSSZ

The first thing of that form in a certificate is looked at; whether one is right in all else is for TLS to say.
"""

import datetime
import logging
import re
import ssl

log = logging.getLogger(__name__)

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# In DER: tags and lengths of the sequence (30, 32 or 34 bytes) and of its two times (13 or 15 bytes).
_TIME = rb"(?:\x17\x0d|\x18\x0f)([0-9]{12}(?:[0-9]{2})?)Z"
_VALIDITY = re.compile(rb"\x30[\x1e\x20\x22]" + _TIME + _TIME)


def validity(pem: bytes) -> list[tuple[datetime.datetime, datetime.datetime]]:
    """(from, until) of each certificate in PEM, in order. Raises ValueError where one has no dates as above."""
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
    found = _VALIDITY.search(der)
    if found is None:
        raise ValueError("not a certificate")
    return _time(found[1].decode()), _time(found[2].decode())


def _time(digits: str) -> datetime.datetime:
    if len(digits) == 12:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    return datetime.datetime.strptime(digits, "%Y%m%d%H%M%S").replace(tzinfo=datetime.UTC)

"""Whom a server dials to pass a version on."""

from typing import Any

import pytest

from rollout_server import reach
from scalerl_jax.contract.security import PLAIN, Credentials

BEYOND = reach.parse_beyond("10.0.0.0/8, fd00::/8, gen.example, .pods.example, 192.0.2.7")
TLS = Credentials(b"an authority", token="a token")


@pytest.mark.parametrize(
    ("credentials", "beyond", "yes", "no"),
    [
        (PLAIN, None, "127.0.0.1:1 127.9.9.9:1 [::1]:1 localhost:1", "10.1.1.1:1 gen.example:1 [fd00::1]:1"),
        (Credentials(token="a token"), None, "127.0.0.1:1", "10.1.1.1:1"),
        (
            PLAIN,
            BEYOND,
            "10.1.1.1:1 gen.example:1 GEN.example:1 a.pods.example:1 192.0.2.7:1",
            "11.1.1.1:1 x.example:1",
        ),
        (Credentials(token="a token"), BEYOND, "127.0.0.1:1", "10.1.1.1:1"),
        (
            TLS,
            None,
            "10.1.1.1:1 gen.example:1 [fd00::1]:1 127.0.0.1:1",
            "0.0.0.0:1 169.254.169.254:1 224.0.0.1:1 [::]:1",
        ),
        (TLS, BEYOND, "10.1.1.1:1 [fd00::1]:1 [::1]:1", "11.1.1.1:1 agen.example:1 pods.example:1 [::ffff:11.1.1.1]:1"),
        (None, BEYOND, "", "127.0.0.1:1 10.1.1.1:1"),
    ],
)
def test_whom_a_server_dials(credentials: Credentials | None, beyond: Any, yes: str, no: str) -> None:
    dialled = reach.Reach(credentials, beyond)
    assert [dialled.why_not(address) for address in yes.split()] == [""] * len(yes.split())
    assert all(dialled.why_not(address) for address in no.split())


@pytest.mark.parametrize("text", ["10.0.0.0/33", "10.0.0.1/8", "a b", "host:80", "1.2.3", "-x", "*.example"])
def test_hosts_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="neither a host name nor a network"):
        reach.parse_beyond(text)

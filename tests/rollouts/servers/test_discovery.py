import socket

import pytest

from scalerl_jax.rollouts.servers.discovery import Discovery


def test_all_forms(tmp_path):
    listed = Discovery("a:1, b.example:65535,[::1]:7")
    assert listed.resolve() == ("a:1", "b.example:65535", "[::1]:7")
    assert not listed.changes
    path = tmp_path / "servers"
    path.write_text("a:1  # the first\n\n# none\nb:2\n")
    watched = Discovery(f"file:{path}")
    assert watched.resolve() == ("a:1", "b:2")
    assert watched.changes
    path.write_text("b:2\nc:3\n")
    assert watched.resolve() == ("b:2", "c:3")
    assert listed.name == watched.name == ""
    named = Discovery("dns:///localhost:70")
    assert set(named.resolve()) <= {"127.0.0.1:70", "[::1]:70"}
    assert named.changes and named.name == "localhost"


def test_a_name_is_asked_again_each_time(monkeypatch):
    known = [["10.0.0.2", "10.0.0.1"], ["10.0.0.2", "fd00::1"]]

    def getaddrinfo(host, port, **_):
        assert host == "generators.example"
        return [(0, 0, 0, "", (ip, port)) for ip in known.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    named = Discovery("dns:///generators.example:70")
    assert named.resolve() == ("10.0.0.1:70", "10.0.0.2:70")
    assert named.resolve() == ("10.0.0.2:70", "[fd00::1]:70")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no server"),
        ("a", "'a' is not host:port"),
        ("a:1,b:x", "'b:x' is not host:port"),
        ("a:0", "'a:0' is not host:port"),
        ("a:1,b:2,a:1", "names a:1 twice"),
        ("file:/nowhere/at/all", "--servers=file:/nowhere/at/all: no such file"),
        ("dns:///no-such-name.invalid:1", "--servers=dns:///no-such-name.invalid:1"),
        ("dns:///name", "'name' is not host:port"),
    ],
)
def test_what_is_wrong_is_named(text, message, monkeypatch):
    def unknown(host, *_, **__):  # whatever a name server here says
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError) as error:
        Discovery(text).resolve()
    assert message in str(error.value)
    assert "\n" not in str(error.value)

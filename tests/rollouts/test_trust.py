"""A fleet behind TLS, client certificates and a token; and the line that says which server lets nobody in, and why."""

import contextlib
import dataclasses
import socket
import ssl
import struct
import threading

import grpc
import pytest

from scalerl_jax.config import FleetConfig
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract import security
from scalerl_jax.rollouts import trust
from scalerl_jax.rollouts.servers.discovery import Plaintext, read_credentials
from scalerl_jax.rollouts.servers.validate_status import FleetError, ProbeError
from tests.rollout_server.certificates import Authority
from tests.rollouts.small_trainer import ReplayServer, Trainer, config
from tests.support.ports import nowhere
from tests.support.waiting import SECONDS, eventually

TOKEN = "correct-horse-battery"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Paths: of our authority and another one, of a client's certificate and key of either, of two tokens."""
    folder = tmp_path_factory.mktemp("trust")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    made = {"authority": ours.certificate, "other_authority": others.certificate}
    made["server_certificate"], made["server_key"] = ours.sign("server")
    made["certificate"], made["key"] = ours.sign("client")
    made["other_certificate"], made["other_key"] = others.sign("client")
    for name, token in (("token", TOKEN), ("other_token", TOKEN[::-1])):
        made[name] = folder / name
        made[name].write_text(token + "\n")
    return {name: str(path) for name, path in made.items()}


@pytest.fixture
def servers(start, files):
    options = {"certificate": files["server_certificate"], "key": files["server_key"], "clients": files["authority"]}
    return start({**options, "token": TOKEN}, {**options, "token": TOKEN})


def shown(files, **changes: str) -> FleetConfig:
    """What a trainer's config names; changes: another file, or none, for a field."""
    fields = {
        "tls_authority": "authority",
        "tls_certificate": "certificate",
        "tls_key": "key",
        "token_file": "token",
    } | changes
    return FleetConfig(**{field: files[name] for field, name in fields.items() if name})


def test_a_run_through_tls(servers, files, caplog):
    with Trainer(config(), servers, credentials=read_credentials(shown(files))) as trainer:
        trainer.admit_until(lambda: len(trainer.admitted) == 2)
        for _ in range(4):
            trainer.update()
        trainer.check()
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"token_file": "other_token"}, "it does not take the token"),
        ({"token_file": ""}, "it asks for a token"),
        ({"tls_authority": "other_authority"}, "its TLS certificate is not signed by the authority given"),
        ({"tls_certificate": "", "tls_key": ""}, "as one that wants a client certificate does"),
        ({"tls_certificate": "other_certificate", "tls_key": "other_key"}, "as one that wants another client certif"),
        ({"tls_authority": "", "tls_certificate": "", "tls_key": ""}, "as a server with TLS does"),
    ],
)
def test_a_trainer_that_is_not_let_in_says_by_whom_and_why(servers, files, changes, told):
    # Each time it is sure long before it would stop waiting for them to be there.
    made = config(fleet_connect_seconds=10000.0)
    trainer = Trainer(made, servers, credentials=read_credentials(shown(files, **changes)))
    with pytest.raises(FleetError) as error:
        with trainer:
            pass
    message = str(error.value)
    assert "\n" not in message and TOKEN not in message and TOKEN[::-1] not in message
    for server in servers:
        assert f"rollout server {server.address}: " in message
    assert told in message


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("how", ["at its end", "in the middle"])
def test_each_way_of_closing_a_connection_at_once(files, encrypted, how):
    """With all read that came the client sees the end, with something unread a reset."""
    shows = read_credentials(FleetConfig(tls_authority=files["authority"] if encrypted else ""))
    told = (
        "closes the connection after the TLS handshake" if encrypted else "closes the connection at once, as a server"
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["server_certificate"], files["server_key"])
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def close_all() -> None:
            while True:
                try:
                    connection = listening.accept()[0]
                except OSError:  # the test is over
                    return
                with contextlib.suppress(OSError):
                    if encrypted:
                        connection = context.wrap_socket(connection, server_side=True)
                    if how == "at its end":
                        connection.recv(1 << 20)
                    else:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        threading.Thread(target=close_all, daemon=True).start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        trainer = Trainer(config(fleet_connect_seconds=10000.0), [], addresses=[address], credentials=shows)
        with pytest.raises(FleetError, match=told), trainer:
            pass
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("end", "closed"),
    [
        ("Socket closed", True),
        ("recvmsg:Connection reset by peer", True),
        ("sendmsg: Connection reset by peer (104)", True),
        ("sendmsg: Broken pipe (32)", True),
        ("Failed to connect to remote host: connect: Connection refused (111)", False),
        ("Timeout occurred: FD Shutdown", False),
    ],
)
def test_a_connection_that_was_closed_at_once(end, closed):
    details = f"failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:7: {end}"
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=details)
    assert bool(security.refusal(error, security.PLAIN)) == closed


@pytest.fixture
def away():
    with nowhere() as address:
        yield address


def test_the_others_may_be_away(servers, files, away):
    seconds = 0.5
    shows = read_credentials(shown(files, token_file="other_token"))

    def refused() -> str:
        """Why the run does not begin, or nothing if the time did not even suffice to be refused."""
        nonlocal seconds
        seconds *= 2
        made = config(fleet_connect_seconds=seconds)
        with pytest.raises(FleetError) as error:
            with Trainer(made, [], addresses=[servers[0].address, away], credentials=shows):
                pass
        late = str(error.value).startswith(f"no rollout server answers at {servers[0].address}, {away} (tried for")
        return "" if late else str(error.value)

    named = f"rollout server {servers[0].address}: it does not take the token"
    assert eventually(refused) == f"{named}; no server answers at {away}"


@pytest.fixture
def soon_sure(monkeypatch):
    """A first look asks again at once."""
    monkeypatch.setattr(trust, "_PAUSE_SECONDS", 0.01)


def anybody(server: str, status: pb.StatusReply) -> None:
    pass


def nobody(server: str, status: pb.StatusReply) -> None:
    raise ProbeError(f"server {server}: {status.engine} is not ours")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"token_file": "other_token"}, "it does not take the token"),
        ({"tls_authority": "other_authority"}, "its TLS certificate is not signed by the authority given"),
        ({"tls_authority": "", "tls_certificate": "", "tls_key": ""}, "as a server with TLS does"),
    ],
)
def test_a_first_look_says_who_can_never_be_used(servers, files, soon_sure, changes, told):
    addresses, shows = [server.address for server in servers], read_credentials(shown(files, **changes))
    with pytest.raises(FleetError) as error:
        trust.check_servers(addresses, shows, anybody, seconds=SECONDS)
    message = str(error.value)
    assert message.startswith(f"rollout server {addresses[0]}: ") and told in message and "\n" not in message
    assert message.endswith("; nor can the other one be used")
    assert TOKEN not in message and TOKEN[::-1] not in message


def test_a_first_look_leaves_alone_what_may_come(servers, files, tmp_path_factory, away, soon_sure):
    shows, refused = read_credentials(shown(files)), read_credentials(shown(files, token_file="other_token"))
    here = servers[0].address
    trust.check_servers([here], shows, anybody, seconds=SECONDS)
    with pytest.raises(FleetError, match=f"^server {here}: replay is not ours$"):
        trust.check_servers([here], shows, nobody, seconds=SECONDS)
    trust.check_servers([here, away], refused, anybody, seconds=SECONDS)  # one may be there soon
    with socket.create_server(("127.0.0.1", 0)) as silent:
        trust.check_servers([here, f"127.0.0.1:{silent.getsockname()[1]}"], refused, anybody, seconds=0.5)
    stranger = ReplayServer(str(tmp_path_factory.mktemp("stranger")), "server").wait()
    try:
        trust.check_servers([here, stranger.address], read_credentials(FleetConfig()), anybody, seconds=SECONDS)
    finally:
        stranger.close()


def test_one_server_that_lets_nobody_in_does_not_stop_the_others(servers, files, tmp_path_factory, caplog, told_once):
    stranger = ReplayServer(str(tmp_path_factory.mktemp("stranger")), "server").wait()
    try:
        with Trainer(config(), [*servers, stranger], credentials=read_credentials(shown(files))) as trainer:
            trainer.admit_until(lambda: len(trainer.admitted) == 2)
            trainer.update()
            eventually(lambda: trainer.server(stranger)["reason"] == "it speaks without TLS")
            assert trainer.server(stranger)["state"] == "connecting"
            said = f"server {stranger.address} is left out: it speaks without TLS"
            eventually(lambda: said in caplog.messages)
        assert sum(stranger.address in message for message in caplog.messages) == 1
    finally:
        stranger.close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tls_authority": ""}, "config.fleet.tls_certificate="),
        ({"tls_key": ""}, "requires config.fleet.tls_key"),
        ({"tls_authority": "token"}, "not certificates in PEM"),
        ({"tls_key": "other_key"}, "not a certificate and its unencrypted key"),
    ],
)
def test_fields_that_cannot_be(files, changes, told):
    with pytest.raises(ValueError) as error:
        read_credentials(shown(files, **changes))
    assert told in str(error.value) and "\n" not in str(error.value)
    assert TOKEN not in str(error.value)


def test_the_name_of_a_found_server_is_checked_against_its_certificate(files):
    read = read_credentials(shown(files), name="generators.example")
    assert read.name == "generators.example"
    read = read_credentials(dataclasses.replace(shown(files), tls_name="other.example"), name="generators.example")
    assert read.name == "other.example"


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_token_in_plaintext_is_said_once_naming_host_and_flag(files, caplog, encrypted):
    shows = read_credentials(shown(files) if encrypted else FleetConfig(token_file=files["token"]))
    plaintext = Plaintext(shows)
    for here in ("127.0.0.1:7", "[::1]:7", "localhost:7", "127.8.8.8:7"):
        plaintext.dial(here)
    assert not any("plaintext" in message for message in caplog.messages)
    for there in ("10.0.0.7:7", "10.0.0.8:7", "generators.example:7", "[fd00::7]:7"):
        plaintext.dial(there)
    said = [r for r in caplog.records if "plaintext" in r.message]
    assert len(said) == (0 if encrypted else 1)
    for record in said:
        assert record.levelname == "WARNING" and "10.0.0.7" in record.message and TOKEN not in record.message
        assert "config.fleet.tls_authority" in record.message


def test_without_a_token_nothing_is_said_of_plaintext(caplog):
    Plaintext(security.PLAIN).dial("10.0.0.7:7")
    assert not caplog.messages


def test_every_server_is_looked_at_before_it_is_dialled(start, files, monkeypatch):
    dialled = []
    monkeypatch.setattr(Plaintext, "dial", lambda self, address: dialled.append(address))
    servers = start({"token": TOKEN})
    shows = read_credentials(FleetConfig(token_file=files["token"]))
    with Trainer(config(), servers, credentials=shows):
        assert dialled == [servers[0].address]

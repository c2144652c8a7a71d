"""TLS and the token over real connections: who is let in, what the others are told, what is never written down."""

import asyncio
import contextlib
import datetime
import pathlib
import ssl
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollout_server.engines.engine import EngineInfo
from rollout_server.service import RolloutServer
from scalerl_jax.contract import codec, peer_text, security
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rollout_pb2_grpc import RolloutStub
from scalerl_jax.contract.security import Access, Credentials
from tests.rollout_server.certificates import Authority
from tests.rollout_server.client import SECONDS, Push, group, random_weights
from tests.rollout_server.test_serve import complaint
from tests.support.replay.engine import ReplayEngine
from tests.support.replay.scripts import Scripted
from tests.support.servers import CalledServer

TOKEN = "correct-horse-battery"

INFO = EngineInfo("replay", slots=8, queue_capacity=16, maximum_tokens=4096, tensors={"a": (400, 10)})


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "others")


@contextlib.asynccontextmanager
async def serving(access: Access) -> AsyncIterator[str]:
    """The address of a server that lets in whom `access` says."""
    server = RolloutServer(ReplayEngine(Scripted(vocabulary=64), INFO), access=access)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop()


def tls(
    authority: Authority, *, hosts: str = "IP:127.0.0.1", clients: Authority | None = None, days: int = 1
) -> Access:
    certificate, key = authority.sign("server", hosts=hosts, days=days)
    clients_pem = clients.certificate.read_bytes() if clients else b""
    made = security.server_credentials(certificate.read_bytes(), key.read_bytes(), clients_pem)
    return Access(made, clients is not None, TOKEN)


def client(authority: Authority, *, signed_by: Authority | None = None, **changes: str) -> Credentials:
    pair = [path.read_bytes() for path in signed_by.sign("client")] if signed_by else [b"", b""]
    return Credentials(authority.certificate.read_bytes(), pair[0], pair[1], **{"token": TOKEN, **changes})


async def told(address: str, credentials: Credentials) -> str:
    """What a client with these credentials learns: the engine's name, or why it gets no answer.

    It asks again where the two ends do not mistrust each other, but something else ended the call, as a client does.
    """
    channel = security.connect(address, credentials)
    try:
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    return (await RolloutStub(channel).Status(pb.StatusRequest(), timeout=SECONDS)).engine
                except grpc.aio.AioRpcError as error:
                    if why := security.refusal(error, credentials):
                        return why
                await asyncio.sleep(0.05)
    finally:
        await channel.close()


async def test_every_kind_of_call_with_tls_both_ways_and_a_token(ours) -> None:
    async with serving(tls(ours, clients=ours)) as address:
        channel = security.connect(address, client(ours, signed_by=ours))
        stub, version = RolloutStub(channel), codec.Version(7, 1)
        engine = ReplayEngine(Scripted(vocabulary=64), INFO)
        reply = await Push(stub, version, random_weights(engine, 1), forget=frozenset({3})).run()
        assert codec.version_from_proto(reply.applied.version) == version
        call = stub.Generate(codec.request_to_proto(group(incarnation=7, completions=3)), timeout=SECONDS)
        assert sorted([message.index async for message in call]) == [0, 1, 2]
        scored = await stub.Score(pb.ScoreRequest(token_ids=codec.encode_ids([3, 4, 5])), timeout=SECONDS)
        assert len(codec.decode_floats(scored.logprobs)) == 3
        await channel.close()


async def test_whom_it_turns_away_learns_why(ours, others) -> None:
    async with serving(tls(ours, clients=ours)) as address:
        assert await told(address, client(ours, signed_by=ours)) == "replay"
        assert "not signed by the authority given" in await told(address, client(others, signed_by=ours))
        assert "as one that wants a client certificate" in await told(address, client(ours))
        assert "as one that wants another client certificate" in await told(address, client(ours, signed_by=others))
        assert "it does not take the token" in await told(address, client(ours, signed_by=ours, token="wrong" * 5))
        assert "it asks for a token" in await told(address, client(ours, signed_by=ours, token=""))
        assert "as a server with TLS does" in await told(address, Credentials(token=TOKEN))
    async with serving(Access(token=TOKEN)) as address:
        assert await told(address, client(ours)) == "it speaks without TLS"


async def test_a_proxy_for_the_web_is_not_asked(ours, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving(Access()) as address:
        assert await told(address, Credentials()) == "replay"
    async with serving(tls(ours)) as address:
        assert await told(address, client(ours)) == "replay"


async def test_the_name_in_the_certificate(ours) -> None:
    async with serving(tls(ours, hosts="DNS:generators.example")) as address:
        assert "for another name than the one dialled" in await told(address, client(ours))
        assert await told(address, client(ours, name="generators.example")) == "replay"
        assert "another name than x.example" in await told(address, client(ours, name="x.example"))


async def test_a_certificate_that_has_expired_while_it_was_served(ours) -> None:
    async with serving(tls(ours, days=-1)) as address:
        assert await told(address, client(ours)) == "its TLS certificate has expired (or this machine's clock is ahead)"


async def test_no_call_of_any_service_without_the_token(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_text, "LOG_SECONDS", 1e6)  # a loaded machine may take longer than a minute
    async with serving(Access(token=TOKEN)) as address, grpc.aio.insecure_channel(address) as channel:
        rollout, health = RolloutStub(channel), health_pb2_grpc.HealthStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        for metadata in ((), (("authorization", f"Bearer {TOKEN}x"),), (("authorization", f"Bearer {TOKEN}"),) * 2):
            options = {"timeout": SECONDS, "metadata": metadata}
            calls = [
                rollout.Status(pb.StatusRequest(), **options),
                rollout.Score(pb.ScoreRequest(), **options),
                rollout.Generate(codec.request_to_proto(group()), **options),
                # Nothing is written: it need not be, and gRPC's client hides the status where a write comes too late.
                rollout.PushWeights(**options),
                reflection.ServerReflectionInfo(**options),
                health.Check(health_pb2.HealthCheckRequest(), **options),
                health.Watch(health_pb2.HealthCheckRequest(), **options),
                channel.unary_unary("/nothing.Here/AtAll")(b"", **options),
            ]
            for call in calls:
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        right = (("authorization", f"Bearer {TOKEN}"),)
        question = [reflection_pb2.ServerReflectionRequest(list_services="")]
        reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS, metadata=right)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        stream = reflection.ServerReflectionInfo(iter(question), timeout=SECONDS, metadata=right)
        assert (await stream.read()).list_services_response.service
    assert sum("without the right token" in record.message for record in caplog.records) == 1  # a flood is one line
    assert TOKEN not in caplog.text


def test_a_token_shows_nowhere() -> None:
    for holder in (Access(token=TOKEN), Credentials(key=b"secret", token=TOKEN)):
        assert TOKEN not in repr(holder) and "secret" not in repr(holder)


# ---- The flags of scalerl-serve


def server_flags(ours: Authority, folder: pathlib.Path) -> dict[str, str]:
    certificate, key = ours.sign("flags")
    (folder / "token").write_text(TOKEN + "\n")
    return {
        "tls_certificate": str(certificate),
        "tls_key": str(key),
        "tls_client_authority": str(ours.certificate),
        "token_file": str(folder / "token"),
    }


@pytest.mark.parametrize("given", [(), ("token_file",), ("tls_certificate", "tls_key")])
def test_nobody_listens_beyond_this_machine_unprotected(ours, tmp_path, given) -> None:
    flags = [f"--{name}={value}" for name, value in server_flags(ours, tmp_path).items() if name in given]
    line = complaint("--engine=replay", "--port=0", "--host=0.0.0.0", *flags)
    assert "--host=0.0.0.0: beyond this machine a server needs --tls_certificate, --tls_key and --token_file" in line
    assert "--insecure" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tls_key": ""}, "requires --tls_key"),
        ({"tls_certificate": ""}, "requires --tls_certificate"),
        ({"tls_certificate": "", "tls_key": ""}, "requires --tls_certificate and --tls_key"),
        ({"tls_key": "/nowhere"}, "--tls_key=/nowhere: no such file"),
        ({"tls_key": "another"}, "not a certificate and its unencrypted key in PEM"),
        ({"tls_client_authority": "token"}, "not certificates in PEM"),
        ({"tls_certificate": "expired", "tls_key": "its key"}, "the certificate expired on 20"),
        ({"token_file": "short"}, "holds 3 characters, a token has at least 16"),
        ({"token_file": "two"}, "a token is one word of printable ASCII"),
    ],
)
def test_flags_that_cannot_be(ours, tmp_path, changes, message) -> None:
    flags = server_flags(ours, tmp_path)
    (tmp_path / "short").write_text("abc\n")
    (tmp_path / "two").write_text("two words of a token\n")
    files = {name: str(tmp_path / name) for name in ("short", "two", "token")} | {"another": str(ours.sign("x")[1])}
    files["expired"], files["its key"] = map(str, ours.sign("expired", days=-1))
    flags |= {name: files.get(value, value) for name, value in changes.items()}
    line = complaint("--engine=replay", "--port=0", *(f"--{name}={value}" for name, value in flags.items()))
    assert message in line
    assert TOKEN not in line


def test_a_date_is_told_for_what_is_not_valid_now(ours, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = ours.sign("dates")[0].read_bytes()
    ((begin, end),) = security.validity(pem)
    assert (end - begin).days == 1 and len(security.validity(pem + ours.certificate.read_bytes())) == 2
    as_ssl_reads_it = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    as_ssl_reads_it.load_verify_locations(ours.certificate)
    ((first, last),) = security.validity(ours.certificate.read_bytes())
    (read,) = as_ssl_reads_it.get_ca_certs()
    assert ssl.cert_time_to_seconds(str(read["notBefore"])) == first.timestamp()
    assert ssl.cert_time_to_seconds(str(read["notAfter"])) == last.timestamp()
    security.check_validity(pem, where="--f=x")
    second = datetime.timedelta(seconds=1)
    for now, date, said in ((begin - second, begin, "is not valid before"), (end + second, end, "expired on")):
        with pytest.raises(ValueError, match=f"--f=x: the certificate {said} {date:%Y-%m-%d %H:%M} UTC"):
            security.check_validity(pem, where="--f=x", now=now)
    security.check_validity(ours.sign("old", days=-1)[0].read_bytes() + pem, where="--f=x", one_is_enough=True)


def test_only_the_certificate_that_is_shown_must_be_valid(ours, caplog: pytest.LogCaptureFixture) -> None:
    """An authority may be signed by an old one as well, which has expired."""
    (good, key), (old, old_key) = ours.sign("shown"), ours.sign("old one", days=-1)
    chain, pem = good.with_name("chain.pem"), old.read_bytes()
    chain.write_bytes(good.read_bytes() + pem)
    ((_, end),) = security.validity(pem)
    security.read_pair(str(chain), str(key), where=("--c", "--k"))
    assert f"--c={chain}: certificate 2, behind the one that is shown, expired on {end:%Y-%m-%d %H:%M}" in caplog.text
    chain.write_bytes(pem + good.read_bytes())
    with pytest.raises(ValueError, match="the certificate expired on"):
        security.read_pair(str(chain), str(old_key), where=("--c", "--k"))


@pytest.mark.parametrize("data", [b"", b"\x30", b"\x30\x82\xff\xff", b"\x30\x03\x02\x01\x01", bytes(40)])
def test_certificates_that_are_none(data: bytes) -> None:
    with pytest.raises(ValueError):
        security.validity(
            ssl.DER_cert_to_PEM_cert(data).encode()
            if data
            else b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----"
        )


@pytest.mark.parametrize(
    ("mode", "said"),
    [(0o600, ""), (0o640, ""), (0o644, "can read it (mode 0644"), (0o666, "can write to it (mode 0666")],
)
def test_files_that_everybody_can_read(tmp_path: pathlib.Path, mode: int, said: str) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    line = security.exposed(str(file), where="--token_file")
    assert said in line and bool(line) == bool(said)
    assert not line or f"--token_file={file}: every user of this machine" in line


@pytest.mark.parametrize("token", [True, False])
def test_what_is_open_is_a_warning_at_the_start(tmp_path: pathlib.Path, token: bool) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    flags = [f"--token_file={file}"] if token else []
    process = CalledServer(tmp_path, "--engine=replay", "--host=0.0.0.0", "--insecure", *flags)
    process.close()
    warnings = [line for line in process.log.read_text().splitlines() if line.startswith("W")]
    assert any("--insecure: a reader of the packets" in line for line in warnings)
    assert any("no token is asked for" in line for line in warnings) is not token
    assert any("the token is sent in plaintext" in line for line in warnings) is token
    assert any("every user of this machine can read it" in line for line in warnings) is token
    assert TOKEN not in process.log.read_text()

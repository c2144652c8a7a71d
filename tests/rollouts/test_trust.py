"""A fleet behind TLS, client certificates and a token; and the line that says which server lets nobody in, and why."""

import dataclasses
import time

import pytest

from scalerl_jax.config import FleetConfig
from scalerl_jax.rollouts import credentials
from scalerl_jax.rollouts.fleet import FleetError
from tests.rollout_server.certificates import Authority
from tests.rollouts.helpers import ReplayServer, Trainer, config, eventually

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
    with Trainer(config(), servers, credentials=credentials.read(shown(files))) as trainer:
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
    trainer = Trainer(config(), servers, credentials=credentials.read(shown(files, **changes)))
    began = time.monotonic()
    with pytest.raises(FleetError) as error:
        with trainer:
            pass
    message = str(error.value)
    assert "\n" not in message and TOKEN not in message and TOKEN[::-1] not in message
    for server in servers:
        assert f"rollout server {server.address}: " in message
    assert told in message
    assert time.monotonic() - began < config().fleet.connect_seconds + 5


def test_the_others_may_be_away(servers, files):
    nowhere = "127.0.0.1:1"
    made = config(fleet_connect_seconds=2.0)
    shows = credentials.read(shown(files, token_file="other_token"))
    trainer = Trainer(made, [], addresses=[servers[0].address, nowhere], credentials=shows)
    with pytest.raises(FleetError) as error:
        with trainer:
            pass
    named = f"rollout server {servers[0].address}: it does not take the token"
    assert str(error.value) == f"{named}; nobody answers at {nowhere}"


def test_one_server_that_lets_nobody_in_does_not_stop_the_others(servers, files, tmp_path_factory, caplog):
    stranger = ReplayServer(str(tmp_path_factory.mktemp("stranger")), "server").wait()
    try:
        with Trainer(config(), [*servers, stranger], credentials=credentials.read(shown(files))) as trainer:
            trainer.admit_until(lambda: len(trainer.admitted) == 2)
            trainer.update()
            state = trainer.fleet.status()["servers"][stranger.address]
            assert (state["state"], state["reason"]) == ("connecting", "it speaks without TLS")
            said = f"server {stranger.address} is left out: it speaks without TLS"
            eventually(lambda: said in caplog.messages)
        assert sum(stranger.address in message for message in caplog.messages) == 1
    finally:
        stranger.close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tls_authority": ""}, "config.fleet.tls_certificate="),
        ({"tls_key": ""}, "goes with config.fleet.tls_key"),
        ({"tls_authority": "token"}, "not certificates in PEM"),
        ({"tls_key": "other_key"}, "not a certificate and its unencrypted key"),
    ],
)
def test_fields_that_cannot_be(files, changes, told):
    with pytest.raises(ValueError) as error:
        credentials.read(shown(files, **changes))
    assert told in str(error.value) and "\n" not in str(error.value)
    assert TOKEN not in str(error.value)


def test_the_name_of_a_found_server_is_checked_against_its_certificate(files):
    read = credentials.read(shown(files), name="generators.example")
    assert read.name == "generators.example"
    read = credentials.read(dataclasses.replace(shown(files), tls_name="other.example"), name="generators.example")
    assert read.name == "other.example"

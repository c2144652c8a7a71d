"""The endpoint of --metrics_port: what it answers, whom it keeps waiting, and what it says where it cannot begin."""

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scalerl_jax.system import metrics_endpoint
from scalerl_jax.system.metrics_endpoint import MetricsEndpoint
from tests.support.processes import SECONDS
from tests.support.waiting import eventually


def families():
    yield "a_tokens", "Tokens.", "counter", ("kind",), {("x",): 3.0, ("y",): 4.0}
    yield "a_slots", "Slots.", "gauge", (), {(): 2.0}
    yield "a", "What it is.", "info", ("name", "more"), {('quote " and \\ and\nline', "z"): 1.0}


def get(endpoint: MetricsEndpoint, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=SECONDS) as answer:
        return answer.read().decode()


def test_what_it_tells_is_what_is_collected() -> None:
    with MetricsEndpoint(families, host="127.0.0.1", port=0) as endpoint:
        found = {
            (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
            for family in text_string_to_metric_families(get(endpoint))
            for sample in family.samples
        }
    assert found == {
        ("a_tokens_total", "x"): 3.0, ("a_tokens_total", "y"): 4.0, ("a_slots",): 2.0,
        ("a_info", "z", 'quote " and \\ and\nline'): 1.0,
    }  # fmt: skip


def test_a_port_that_is_taken_is_one_line_and_a_closed_one_is_free() -> None:
    with MetricsEndpoint(families, host="127.0.0.1", port=0) as first:
        port = first.port
        with pytest.raises(ValueError, match=rf"^--metrics_port={port} --metrics_host=127.0.0.1: cannot listen there"):
            MetricsEndpoint(families, host="127.0.0.1", port=port)

    def is_free() -> bool:
        try:
            MetricsEndpoint(families, host="127.0.0.1", port=port).close()
        except ValueError:  # some other process of the machine has got it
            return False
        return True

    eventually(is_free, "the port is free")


@pytest.mark.parametrize("host", ["no.such.host.example.invalid", "192.0.2.1"])
def test_an_address_that_is_not_this_machines(host: str) -> None:
    with pytest.raises(ValueError, match=f"--metrics_host={host}: cannot listen there"):
        MetricsEndpoint(families, host=host, port=0)


def test_without_the_client_it_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--metrics_port=9: needs prometheus_client, .*scalerl-jax\[metrics\]"):
        MetricsEndpoint(families, host="127.0.0.1", port=9)


@pytest.mark.parametrize("error", [TimeoutError("the loop stands still"), RuntimeError("the engine is over")])
def test_what_cannot_be_told_now_is_503(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    def collect():
        raise error

    with MetricsEndpoint(collect, host="127.0.0.1", port=0) as endpoint:
        with pytest.raises(urllib.error.HTTPError) as raised:
            get(endpoint)
        with raised.value as answer:
            assert answer.code == 503
            assert str(error) in answer.read().decode()
    assert capfd.readouterr().err == ""  # and not a traceback at each request


def test_who_says_nothing_is_cut_off_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint._Handler, "timeout", 0.5)
    with MetricsEndpoint(families, host="127.0.0.1", port=0) as endpoint:
        address = ("127.0.0.1", endpoint.port)
        silent = [socket.create_connection(address, timeout=SECONDS) for _ in range(3 * metrics_endpoint.MOST_REQUESTS)]
        try:
            assert all(connection.recv(1) == b"" for connection in silent)
        finally:
            for connection in silent:
                connection.close()

        def answers() -> bool:
            try:
                return "a_slots" in get(endpoint)
            except OSError:  # the last place is not free yet
                return False

        assert eventually(answers, "it answers again")

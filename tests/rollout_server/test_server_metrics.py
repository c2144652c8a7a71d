"""--metrics_port of scalerl-serve: what it tells is what Status tells; and the health probe, with token and TLS."""

import pathlib
import re
import subprocess
import sys
import urllib.request

import grpc
from prometheus_client.parser import text_string_to_metric_families

from rollout_server.service import COUNTERS, GAUGES
from scalerl_jax.contract import rollout_pb2 as pb
from tests.rollout_server.certificates import Authority
from tests.rollout_server.client import SECONDS
from tests.support import processes
from tests.support.servers import REPLAY, CalledServer, ServerProcess

FIELDS = {**GAUGES, **COUNTERS}


def scraped(server: ServerProcess) -> dict[str, float]:
    (url,) = re.findall(r"metrics at (http://\S+)", server.log.read_text())
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_metrics_are_the_status(tmp_path: pathlib.Path) -> None:
    server = CalledServer(tmp_path, "--engine=replay", "--metrics_port=0", "--slots=3", "--queue=5")
    try:
        request = pb.GenerateRequest(
            group_id="g", prompt_token_ids=b"\1\0\0\0", completions=[pb.CompletionRequest(index=i) for i in range(2)],
            sampling=pb.Sampling(temperature=1.0, top_p=1.0, answer_budget=5),
        )  # fmt: skip
        list(server.stub.Generate(request, timeout=SECONDS))
        found, status = scraped(server), server.stub.Status(pb.StatusRequest(), timeout=SECONDS)
        assert status.sampled_tokens > 0
        for field in FIELDS:
            exact = found.get(f"scalerl_generator_{field}", found.get(f"scalerl_generator_{field}_total"))
            assert exact is not None, field
            if field in ("up_seconds", "busy_seconds"):
                assert exact <= getattr(status, field)
            else:
                assert exact == getattr(status, field), field
        assert found["scalerl_generator_slots"] == 3 and found["scalerl_generator_step"] == status.version.step
    finally:
        server.close()


def test_every_number_of_the_status_is_told() -> None:
    """A field that is added to the contract is told too."""
    fields = pb.StatusReply.DESCRIPTOR.fields
    numbers = {field.name for field in fields if field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_MESSAGE)}
    numbers -= {"router_replay"}  # yes or no
    assert numbers - FIELDS.keys() == {"maximum_tokens", "maximum_top_k"}  # what it can, always the same


def test_without_the_flag_there_are_none(tmp_path: pathlib.Path) -> None:
    server = ServerProcess(tmp_path, "--engine=replay").wait()
    try:
        assert "metrics at" not in server.log.read_text()
    finally:
        server.close()


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(tmp_path: pathlib.Path) -> None:
    server = ServerProcess(tmp_path, "--engine=replay", "--metrics_port=0").wait()
    try:
        (port,) = re.findall(r"metrics at http://127.0.0.1:(\d+)/", server.log.read_text())
        command = [
            sys.executable,
            *REPLAY,
            "--engine=replay",
            "--port=0",
            f"--metrics_port={port}",
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=processes.SECONDS)
        assert result.returncode == 2
        assert result.stderr.startswith(f"scalerl-serve: --metrics_host=127.0.0.1 --metrics_port={port}: cannot listen")
        assert len(result.stderr.splitlines()) == 1
    finally:
        server.close()


# --------------------------------------------------------------------------------------------------- the probe


def probe(server: ServerProcess, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollout_server.health", f"--address=127.0.0.1:{server.port}", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=processes.SECONDS)


def test_the_probe_has_what_a_call_needs(tmp_path: pathlib.Path) -> None:
    authority, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    certificate, key = authority.sign("server", hosts="DNS:generators.default.svc")
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test\n")
    token.chmod(0o600)
    (tmp_path / "wrong").write_text("another-token-altogether")
    server = ServerProcess(
        tmp_path, "--engine=replay", f"--tls_certificate={certificate}", f"--tls_key={key}", f"--token_file={token}"
    ).wait()
    name = "--tls_name=generators.default.svc"
    try:
        good = probe(server, f"--tls_authority={authority.certificate}", name, f"--token_file={token}")
        assert (good.returncode, good.stdout, good.stderr) == (0, "", "")
        for flags, said in (
            ((f"--tls_authority={authority.certificate}", name), "it asks for a token"),
            (
                (f"--tls_authority={authority.certificate}", name, f"--token_file={tmp_path}/wrong"),
                "not take the token",
            ),
            ((f"--tls_authority={other.certificate}", name, f"--token_file={token}"), "not signed by the authority"),
            ((f"--tls_authority={authority.certificate}", f"--token_file={token}"), "for another name"),
        ):
            bad = probe(server, *flags, "--seconds=60")
            assert bad.returncode == 1 and said in bad.stderr, bad.stderr
        assert probe(server, "--token_file=/no/such").returncode == 2
        server.freeze()
        assert probe(server, f"--tls_authority={authority.certificate}", name, "--seconds=1").returncode == 1
    finally:
        server.close()


def test_the_probe_of_an_open_server(tmp_path: pathlib.Path) -> None:
    server = ServerProcess(tmp_path, "--engine=replay").wait()
    assert probe(server).returncode == 0
    server.close()
    gone = probe(server, "--seconds=60")
    assert gone.returncode == 1
    assert grpc.StatusCode.UNAVAILABLE.name in gone.stderr

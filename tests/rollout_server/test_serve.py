"""scalerl-serve as a process: health and reflection by their own stubs, its end, and what it says to bad flags."""

import asyncio
import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollout_server.engines.engine import Engine
from rollout_server.serve import serve
from rollout_server.service import RolloutServer
from scalerl_jax.contract import codec, rollout_pb2_grpc
from scalerl_jax.contract import rollout_pb2 as pb
from tests.rollout_server.client import SECONDS, group
from tests.rollout_server.conftest import CONFIG, jax_engine, replay_engine
from tests.support import processes
from tests.support.replay.engine import CRASH_EXIT_CODE
from tests.support.servers import CalledServer, program_of


@pytest.fixture
def replay(tmp_path: pathlib.Path) -> Iterator[CalledServer]:
    process = CalledServer(tmp_path, "--engine=replay", "--slots=4", "--replay_token_seconds=0.01")
    yield process
    process.close()


def health(process: CalledServer, service: str) -> int:
    reply = health_pb2_grpc.HealthStub(process.channel).Check(
        health_pb2.HealthCheckRequest(service=service), timeout=SECONDS
    )
    return reply.status


def test_health_and_reflection(replay: CalledServer) -> None:
    assert health(replay, "") == health(replay, "scalerl.v1.Rollout") == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as error:
        health(replay, "scalerl.v1.Nothing")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND

    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="scalerl.v1.Rollout"),
    ]
    stub = reflection_pb2_grpc.ServerReflectionStub(replay.channel)
    services, files = stub.ServerReflectionInfo(iter(questions), timeout=SECONDS)
    names = {service.name for service in services.list_services_response.service}
    assert names >= {"scalerl.v1.Rollout", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    file = descriptor_pb2.FileDescriptorProto.FromString(files.file_descriptor_response.file_descriptor_proto[0])
    methods = {method.name for method in file.service[0].method}
    assert (file.package, methods) == ("scalerl.v1", {"Status", "Generate", "PushWeights", "Score", "ScoreMany"})


def test_sigterm_ends_calls_and_watchers_and_exits_0(replay: CalledServer) -> None:
    watch = health_pb2_grpc.HealthStub(replay.channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    # Asked for before it comes: gRPC drops what nobody has asked for when a connection ends.
    last = concurrent.futures.ThreadPoolExecutor(1).submit(next, watch)
    wanted = group(incarnation=0, answer_budget=4000, stop_token_ids=())  # 40 s
    call = replay.stub.Generate(codec.request_to_proto(wanted), timeout=SECONDS)
    while replay.stub.Status(pb.StatusRequest(), timeout=SECONDS).busy_slots < 4:
        time.sleep(0.01)
    replay.process.send_signal(signal.SIGTERM)
    assert last.result(SECONDS).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert replay.process.wait(SECONDS) == 0
    assert "Traceback" not in replay.log.read_text()


def test_it_ends_with_its_parent(replay: CalledServer) -> None:
    assert replay.process.stdin is not None
    replay.process.stdin.close()
    assert replay.process.wait(SECONDS) == 0


def test_it_says_who_can_reach_it(replay: CalledServer) -> None:
    assert "open to this machine only" in replay.log.read_text()


def test_a_crash_that_was_ordered(tmp_path: pathlib.Path) -> None:
    flags = ["--replay_crash_after=3", "--slots=1", "--replay_token_seconds=0.02"]
    process = CalledServer(tmp_path, "--engine=replay", *flags)
    try:
        for name in ("train/0", "train/1"):
            whole = codec.request_to_proto(group(name, incarnation=0, completions=1))
            assert [message.group_id for message in process.stub.Generate(whole, timeout=SECONDS)] == [name]
        # A call of its own: gRPC drops what nobody has asked for when a connection ends.
        wanted = codec.request_to_proto(group("train/2", incarnation=0, completions=4))
        call = process.stub.Generate(wanted, timeout=SECONDS)
        assert next(call).group_id == "train/2"
        with pytest.raises(grpc.RpcError) as error:
            next(call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert process.process.wait(SECONDS) == CRASH_EXIT_CODE
    finally:
        process.close()


def test_a_replay_server_passes_for_one_of_the_model(tmp_path: pathlib.Path, model_folder: pathlib.Path) -> None:
    process = CalledServer(
        tmp_path, "--engine=replay", f"--model={model_folder}", "--sync_dtype=float32", "--head_precision=highest"
    )
    try:
        status = process.stub.Status(pb.StatusRequest(), timeout=SECONDS)
        assert status.model_config == CONFIG.canonical_json()
        assert len(status.tokenizer_fingerprint) == 64
        assert (status.sync_dtype, status.head_precision) == ("float32", "highest")
    finally:
        process.close()


def test_the_jax_engine_is_served_without_torch(tmp_path: pathlib.Path, model_folder: pathlib.Path) -> None:
    flags = ["--slots=2", "--queue=2", "--decode_chunk=4", "--maximum_tokens=64", "--compute_dtype=float32"]
    flags += ["--engine=jax", f"--model={model_folder}", "--head_precision=highest"]
    # No fork: the tests' own process has torch.
    process = CalledServer(tmp_path, *flags, program=(sys.executable, "-m", "rollout_server.serve"))
    try:
        assert process.stub.Status(pb.StatusRequest(), timeout=SECONDS).head_precision == "highest"
        request = codec.request_to_proto(group(incarnation=0, completions=4))
        completions = [codec.completion_from_proto(m) for m in process.stub.Generate(request, timeout=SECONDS)]
        assert sorted(c.index for c in completions) == [0, 1, 2, 3]
        # Nothing in its log looks like a failure, where none is: no backend that this machine does not have.
        said = process.log.read_text()
        assert "Unable to initialize" not in said
        assert said.count("keys and values of 2 sequences of 64 tokens") == 1  # how much memory that may take
        maps = pathlib.Path(f"/proc/{process.process.pid}/maps")
        if maps.exists():
            assert "torch" not in maps.read_text()
    finally:
        process.close()


@pytest.mark.parametrize(
    ("flags", "platform", "said"),
    [
        (["--port_file=/no/such/folder/port"], "cpu", "--port_file=/no/such/folder/port: /no/such/folder is no folder"),
        ([], "cuda", "JAX_PLATFORMS=cuda: no such device here ("),
    ],
)
def test_what_cannot_be_is_one_line(model_folder: pathlib.Path, flags: list[str], platform: str, said: str) -> None:
    command = [sys.executable, "-m", "rollout_server.serve", "--engine=jax", f"--model={model_folder}", "--port=0"]
    environment = {**os.environ, "JAX_PLATFORMS": platform}
    done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"scalerl-serve: {said}"), done.stderr
    assert "Traceback" not in done.stderr


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address of IPv6")
async def test_an_address_of_ipv6_needs_no_brackets(model_folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    server = RolloutServer(replay_engine(model_folder), host="::1", port=0)
    assert server.port > 0
    await server.stop()


async def test_it_ends_when_its_engine_is_over(
    model_folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that answers but can never sample again would be asked for ever; one that ended is started anew."""
    engine, port_file = replay_engine(model_folder), tmp_path / "port"

    async def make() -> Engine:
        return engine

    serving = asyncio.create_task(serve(make, host="127.0.0.1", port=0, port_file=str(port_file), with_parent=False))
    while not port_file.exists():
        await asyncio.sleep(0.01)

    def over() -> None:
        raise RuntimeError("the device is gone")

    leave = []
    monkeypatch.setattr("rollout_server.serve.ending.after", lambda seconds, code: leave.append(code))
    monkeypatch.setattr(engine, "status", over)
    with pytest.raises(RuntimeError, match="the device is gone"):
        await serving
    assert leave == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_decode_thread_that_dies_is_noticed(
    model_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = jax_engine(model_folder)
    server = RolloutServer(engine)
    await server.start()

    def out_of_memory(*_: object) -> None:
        raise ValueError("out of memory")

    monkeypatch.setattr(engine._pool, "dispatch", out_of_memory)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = rollout_pb2_grpc.RolloutStub(channel).Generate(
            codec.request_to_proto(group(incarnation=0)), timeout=SECONDS
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        assert isinstance(await asyncio.wait_for(server.failure(), SECONDS), RuntimeError)
    await server.stop()


def test_importing_the_server_needs_no_engine() -> None:
    program = (
        "import sys, rollout_server.serve, tests.support.replay.engine;"
        "print(*[m for m in ('jax', 'torch', 'flax', 'ml_dtypes', 'vllm') if m in sys.modules],"
        "*[m for m in sys.modules if m.startswith('scalerl_jax.')"
        " and not m.startswith(('scalerl_jax.contract', 'scalerl_jax.system'))])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


# ------------------------------------------------------------------------------------------------------- bad flags


def complaint(*flags: str) -> str:
    """The one line that a server with these flags says before it ends with exit code 2."""
    result = processes.run_python(*program_of(flags), *flags)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("scalerl-serve: ")
    return line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "--engine"),
        (["--engine=replay"], "--port"),
        (["--engine=torch", "--port=0"], "--engine=torch"),
        (["--engine=jax"], "--port"),
        (["--engine=jax", "--port=70000"], "--port=70000"),
        (["--engine=replay", "--port=70000"], "--port=70000"),
        (["--engine=replay", "--port=0", "--slots=0"], "--slots=0"),
        (["--engine=replay", "--port=0", "--slot=4"], "slot"),
        (["--engine=replay", "--port=0", "again"], "again"),
        (["--engine=replay", "--port=0", "--sync_dtype=float16"], "--sync_dtype=float16"),
        (["--engine=replay", "--port=0", "--replay_file=nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--engine=replay", "--port=0", "--faults=delay:3"], "--faults=delay:3: delay:3: is not delay:after:seconds"),
        (["--engine=replay", "--port=0", "--faults=lies:3"], "lies:3: is not one of delay, duplicate"),
        (["--engine=jax", "--port=0"], "--model"),
        (["--engine=jax", "--port=0", "--model=nowhere"], "--model=nowhere: no such folder"),
    ],
)
def test_bad_flags_get_one_line(flags: list[str], told: str) -> None:
    assert told in complaint(*flags)


@pytest.mark.parametrize(
    ("lacking", "told"),
    [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer.json"), ("model.safetensors", "no weights")],
)
def test_a_folder_without_what_a_model_needs(
    tmp_path: pathlib.Path, model_folder: pathlib.Path, lacking: str, told: str
) -> None:
    for file in model_folder.iterdir():
        if file.name != lacking:
            os.symlink(file, tmp_path / file.name)
    line = complaint("--engine=jax", "--port=0", f"--model={tmp_path}")
    assert told in line and str(tmp_path) in line


def test_too_little_memory_is_said_before_anything_is_loaded(
    tmp_path: pathlib.Path, model_folder: pathlib.Path
) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    flags = ["--engine=jax", "--port=0", f"--model={tmp_path}", "--slots=100000000", "--maximum_tokens=256"]
    line = complaint(*flags)
    assert "memory: " in line and "keys and values of 100000000 sequences of 256 tokens" in line
    assert re.search(r"--slots=\d+ would fit$", line)


@pytest.mark.parametrize("engine", ["replay", "jax"])
def test_a_taken_port(tmp_path: pathlib.Path, model_folder: pathlib.Path, engine: str) -> None:
    """Also where a model would have to be loaded: the port is looked at first, and nobody hears of broken weights."""
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = complaint(f"--engine={engine}", f"--port={port}", f"--model={tmp_path}")
        assert f"--port={port}" in line and "in use" in line


def test_two_servers_do_not_share_a_port(replay: CalledServer, tmp_path: pathlib.Path) -> None:
    port = str(replay.port)
    assert "in use" in complaint("--engine=replay", f"--port={port}")

"""The whole server process over vLLM: what it answers, how it ends, and what is left of it."""

import asyncio
import os
import pathlib
import signal
import socket
from collections.abc import Iterator

import grpc
import psutil
import pytest

from scalerl_jax.contract import codec, rollout_pb2_grpc
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.limits import CHANNEL_OPTIONS
from tests.rollout_server.client import INCARNATION, Push, group
from tests.support import processes
from tests.support.models import random_tensors, toy_decoder, write_folder
from tests.support.servers import CalledServer
from tests.vllm.models import config

SECONDS = 150.0


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_folder(tmp_path / "model", config(), random_tensors(config(), 0))


def flags(folder: pathlib.Path, **options: object) -> list[str]:
    chosen = {
        "engine": "vllm",
        "model": folder,
        "slots": 4,
        "maximum_tokens": 256,
        "compute_dtype": "float32",
        "sync_dtype": "float32",
        **options,
    }
    return [f"--{name}={value}" for name, value in chosen.items()]


@pytest.fixture
def served(folder: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[CalledServer]:
    process = CalledServer(tmp_path, *flags(folder))
    yield process
    process.close()


def family(process: CalledServer) -> list[psutil.Process]:
    """The processes that vLLM started."""
    return [
        child
        for child in psutil.Process(process.process.pid).children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]


def gone(children: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children, timeout=SECONDS)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE], alive


def shared_memory(family: list[psutil.Process]) -> list[pathlib.Path]:
    """What these processes have mapped of it, by name. Others of this machine may make and remove some meanwhile."""
    lines = [line for one in family for line in pathlib.Path(f"/proc/{one.pid}/maps").read_text().splitlines()]
    paths = {line.split(maxsplit=5)[-1] for line in lines if " /dev/shm/" in line}
    named = [pathlib.Path(path) for path in sorted(paths) if os.path.exists(path)]
    assert named, "what is never there cannot be left"
    return named


def left(named: list[pathlib.Path]) -> list[pathlib.Path]:
    return [path for path in named if path.exists()]


def test_it_serves_and_ends_and_leaves_nothing(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    served = CalledServer(tmp_path, *flags(folder))
    status = served.stub.Status(pb.StatusRequest(), timeout=SECONDS)
    assert (status.engine, status.model_config) == ("vllm", config().canonical_json())
    call = served.stub.Generate(codec.request_to_proto(group(incarnation=0)), timeout=SECONDS)
    assert len([codec.completion_from_proto(message) for message in call]) == 4
    children = family(served)
    assert children
    named = shared_memory([psutil.Process(served.process.pid), *children])
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(processes.SECONDS) == 0
    gone(children)
    assert left(named) == []
    served.close()


def test_nothing_outlives_a_server_that_was_killed(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    served = CalledServer(tmp_path, *flags(folder))
    children = family(served)
    assert children
    named = shared_memory([psutil.Process(served.process.pid), *children])
    served.process.kill()
    gone(children)
    assert left(named) == []
    served.close()


def test_a_server_whose_worker_died_exits(served: CalledServer) -> None:
    """With an error's exit code, so that whoever started it starts it anew."""
    children = family(served)
    children[-1].kill()
    assert served.process.wait(processes.SECONDS) not in (0, 2)
    gone(children)


# The weights reach the server, and no worker can be told of them.
BROKEN = """
from rollout_server import serve
from rollout_server.engines.vllm.adapter import Vllm

async def load(self, buffer, tensors, changes):
    await self.engine.collective_rpc("scalerl_load", args=("/no such memory", None, []))

Vllm.load = load
serve.run()
"""


async def pushed(served: CalledServer) -> None:
    tensors = random_tensors(config(), 1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", options=CHANNEL_OPTIONS) as channel:
        push = Push(rollout_pb2_grpc.RolloutStub(channel), codec.Version(INCARNATION, 1), tensors, chunk_bytes=2**16)
        await push.send_header()
        await push.send_chunks()
        await push.send_commit()
        assert await push.call.code() is not grpc.StatusCode.OK


def test_a_server_that_cannot_take_weights_exits(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    served = CalledServer(tmp_path, *flags(folder), program=("-c", BROKEN))
    children = family(served)
    asyncio.run(pushed(served))
    assert served.process.wait(processes.SECONDS) not in (0, 2)
    gone(children)
    log = served.log.read_text()
    assert "attempt 3 of 3" in log and "could not be written in 3 attempts" in log
    served.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tensor_parallel": 3}, "4 query heads cannot be split evenly over 3 workers"),
        ({"compute_dtype": "bfloat16", "head_precision": "highest"}, "has it with --compute_dtype=float32 only"),
        ({"compute_dtype": "float32", "head_precision": "bfloat16"}, "has it with --compute_dtype=bfloat16 only"),
        ({"slots": 10**8}, "keys and values of 100000000 sequences"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_flags_that_cannot_be(folder: pathlib.Path, change: dict[str, object], told: str) -> None:
    assert told in complaint([*flags(folder, **change), "--port=0"])


def test_a_head_size_that_the_backend_lacks(tmp_path: pathlib.Path) -> None:
    model = config(head_dim=8)
    folder = write_folder(tmp_path / "odd", model, random_tensors(model, 0))
    assert "head size 8" in complaint([*flags(folder), "--port=0"])


def test_a_release_that_is_not_supported(folder: pathlib.Path) -> None:
    program = "import vllm; vllm.__version__ = '0.25.1'; from rollout_server import serve; serve.run()"
    line = complaint([*flags(folder), "--port=0"], program=program)
    assert "vLLM 0.25.1 is installed" in line and "vllm>=0.26,<0.34" in line


def complaint(arguments: list[str], *, program: str = "from rollout_server import serve; serve.run()") -> str:
    """What a server that cannot begin says: its last line, after exit code 2."""
    result = processes.run_python("-c", program, *arguments)
    assert result.returncode == 2, result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("scalerl-serve: ") and "Traceback" not in result.stderr
    return line


def test_time_is_not_wasted_on_a_port_that_is_taken(folder: pathlib.Path) -> None:
    """It is looked at first: nobody hears of the broken weights, nor starts vLLM's processes to find them."""
    (folder / "model.safetensors").write_bytes(b"broken")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "in use" in complaint([*flags(folder), f"--port={port}"])


def test_a_family_that_it_could_not_update_is_one_line(tmp_path: pathlib.Path) -> None:
    """vLLM would sample from Llama 4, but keeps query and key in another order than versions come in."""
    model = toy_decoder(family="llama4_text", max_positions=512)
    folder = write_folder(tmp_path / "model", model, random_tensors(model, 0))
    line = complaint([*flags(folder), "--port=0"])
    assert line == f"scalerl-serve: --engine=vllm: {folder} is a llama4_text, which only --engine=jax updates"

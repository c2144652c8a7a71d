"""scalerl-serve in a process of its own, for benchmarks."""

import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator

import grpc
import psutil

from scalerl_jax.contract.limits import CHANNEL_OPTIONS
from scalerl_jax.contract.rollout_pb2_grpc import RolloutStub


@contextlib.asynccontextmanager
async def served(
    engine: str, python: str, folder: str, *options: str
) -> AsyncIterator[tuple[RolloutStub, psutil.Process]]:
    """(stub, process) of a server of the model in `folder`, once it serves; what it says, where it does not."""
    with tempfile.TemporaryDirectory() as scratch:
        port_file, log_file = os.path.join(scratch, "port"), os.path.join(scratch, "log")
        command = [
            python, "-m", "rollout_server.serve", f"--engine={engine}", f"--model={folder}", "--port=0",
            f"--port_file={port_file}", *options,
        ]  # fmt: skip
        with open(log_file, "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not os.path.exists(port_file):
                if process.poll() is not None:
                    sys.exit(f"{engine}: {pathlib.Path(log_file).read_text(errors='replace')[-2000:]}")
                await asyncio.sleep(0.1)
            port = pathlib.Path(port_file).read_text().strip()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
                yield RolloutStub(channel), psutil.Process(process.pid)
        except grpc.RpcError:
            print(f"{engine}: {pathlib.Path(log_file).read_text(errors='replace')[-30000:]}", file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()

"""A server process of its own, as a user starts it."""

import pathlib
import subprocess
import sys
import time

import grpc

from scalerl_jax.contract import rollout_pb2_grpc


class Process:
    """One `python -m rollout_server.serve`, or another program, its standard input held open by us."""

    def __init__(self, folder: pathlib.Path, *flags: str, seconds: float = 150.0, program: str = ""):
        port_file = folder / "port"
        what = ["-c", program] if program else ["-m", "rollout_server.serve"]
        command = [sys.executable, *what, "--port=0", f"--port_file={port_file}", *flags]
        self.log = folder / "log"
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [*command, "--exit_with_parent"], stdin=subprocess.PIPE, stdout=output, stderr=output
            )
        deadline = time.monotonic() + seconds
        while not port_file.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.port = int(port_file.read_text())
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = rollout_pb2_grpc.RolloutStub(self.channel)

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

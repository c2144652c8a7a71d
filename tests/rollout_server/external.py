"""A generator of somebody else, as an engine of the conformance tests: a program that is started anew for each test.

    SCALERL_GENERATOR="node generator.js --steps_from_stdin" pytest tests/rollout_server/test_conformance*.py

It is started with flags of scalerl-serve: --model, --port=0, --port_file, --exit_with_parent, --slots, --queue,
--maximum_tokens, --decode_chunk, --compute_dtype, --sync_dtype. Where its command has --steps_from_stdin it reads
numbers from its standard input, one a line: so many decode steps it may take from then on, and no more (Infinity: as
many as it likes). Without it, tests that hold decoding up are skipped. What is not in the contract is not asked of it:
the words of a refusal, and what only shows inside of the process.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import shlex
import signal
import struct
import subprocess
import tempfile
import termios
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.engine_info import engine_info
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Version, version_from_proto
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.security import PLAIN, connect
from scalerl_jax.model.decoder_config import read_config
from tests.support.waiting import eventually_async

VARIABLE = "SCALERL_GENERATOR"
STEPS = "--steps_from_stdin"
START_SECONDS = 150.0
ARRIVAL_SECONDS = 30.0  # in which a version that may be flipped in is
PINNED_SECONDS = 0.5  # that one which may not be is looked for


class External:
    """A process, from `serving` to its end."""

    def __init__(self, model_folder: pathlib.Path, **options: Any):
        options.pop("token_seconds", None)
        told = EngineOptions(str(model_folder), **options)
        self.info = engine_info("external", told, read_config(model_folder))
        self._folder = tempfile.TemporaryDirectory()
        self._port_file, self._log = (pathlib.Path(self._folder.name) / name for name in ("port", "log"))
        self._command = shlex.split(os.environ[VARIABLE])
        self._steps = STEPS in self._command
        flags = {name: value for name, value in vars(told).items() if name in TOLD}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [
                    *self._command, f"--model={model_folder}", "--port=0", f"--port_file={self._port_file}",
                    "--exit_with_parent", *(f"--{name}={value}" for name, value in flags.items()),
                ],
                stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[Any, Any, Stub]]:
        """Yields (what stands for the server in tests, channel, stub)."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while not self._port_file.exists():
                    assert self._process.poll() is None, self._log.read_text()
                    await asyncio.sleep(0.01)
            channel = connect(f"127.0.0.1:{int(self._port_file.read_text())}", PLAIN)
            self._stub = Stub(channel)
            status = await self._stub.Status(pb.StatusRequest(), timeout=START_SECONDS)
            self.info = dataclasses.replace(self.info, name=status.engine)
            service = types.SimpleNamespace(server_id=status.server_id, stop=self._stop)
            try:
                yield types.SimpleNamespace(service=service), channel, self._stub
                assert self._process.poll() in (None, 0), self._log.read_text()
            finally:
                await channel.close()
        finally:
            self._process.kill()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._folder.cleanup()

    async def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    # ------------------------------------------------------------------------------------------ decoding held up

    @contextlib.asynccontextmanager
    async def pause_decoding(self, steps: int) -> AsyncIterator["Steps"]:
        if not self._steps:
            pytest.skip(f"{VARIABLE} has no {STEPS}: its decoding cannot be held up")
        held = Steps(self)
        self.allow(steps)
        # It hears of it before it is asked for anything: what we wrote is read, and there was time to act on it.
        await eventually_async(lambda: not self._unread())
        await asyncio.sleep(0.1)
        try:
            yield held
        finally:
            held.go_on()

    def allow(self, steps: float) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it may be stopping
            self._process.stdin.write(f"{steps}\n".replace("inf", "Infinity").encode())
            self._process.stdin.flush()

    def _unread(self) -> int:
        """Bytes that lie in its standard input."""
        assert self._process.stdin is not None
        return struct.unpack("i", fcntl.ioctl(self._process.stdin, termios.FIONREAD, b"\0" * 4))[0]

    async def holds(self, version: Version) -> bool:
        status = await self._stub.Status(pb.StatusRequest(), timeout=START_SECONDS)
        return version_from_proto(status.version) == version


TOLD = ("slots", "queue", "maximum_tokens", "decode_chunk", "compute_dtype", "sync_dtype")


class Steps:
    """As Decoding of pause_decoding.py, from outside of the process."""

    def __init__(self, engine: External):
        self._engine = engine

    def go_on(self) -> None:
        self._engine.allow(float("inf"))

    async def arrival(self, version: Version, *, pinned: bool = False) -> None:
        """Returns when it decodes with the version, or, where something keeps it from that, has had the time to."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PINNED_SECONDS if pinned else ARRIVAL_SECONDS):
                while not await self._engine.holds(version):
                    await asyncio.sleep(0.02)

"""Runs of scalerl-train as a user starts them: on a workdir, killed, and started again with the same command."""

import json
import os
import pathlib
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Self

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file, override
from scalerl_jax.run.jsonl import read_rows
from tests.support import fork_server
from tests.support.paths import ROOT
from tests.support.processes import SECONDS, single_threaded
from tests.support.waiting import eventually

CONFIG = os.path.join(ROOT, "tests", "train", "tiny.py")


class Run:
    """A run of scalerl-train on one workdir: started, killed, started again with the same command."""

    def __init__(
        self, workdir: pathlib.Path, *flags: str, log: pathlib.Path | None = None, variables: Mapping[str, str] = {}
    ):
        """log: what it says; default: beside the workdir. variables: of its environment, beside the usual ones."""
        self.workdir = str(workdir)
        self._arguments = [f"--workdir={workdir}", *flags]
        self._output = str(log or f"{workdir}.log")
        self._variables = dict(variables)
        self.process: fork_server.Forked | subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with open(self._output, "ab") as output:
            self._spawn(output)
        return self

    def _spawn(self, output: IO[bytes]) -> None:
        environment = {**single_threaded(), **self._variables}
        self.process = fork_server.start(
            "-m",
            "scalerl_jax.train",
            *self._arguments,
            environment=environment,
            stdout=output,
            stderr=output,
            new_session=True,
        )

    def kill(self) -> None:
        """SIGKILL to the trainer and all it started; it must have been running."""
        assert self.process is not None and self.process.poll() is None, read(self._output)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def wait(self) -> int:
        """The exit code."""
        assert self.process is not None
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
            raise AssertionError(f"not within {SECONDS:.0f} s: the run ends\n{read(self._output)}") from None

    def finish(self) -> Self:
        """Waits for the end, which must be a good one."""
        assert self.wait() == 0, read(self._output)
        return self

    def until(self, condition: Callable[[], Any], what: str) -> None:
        def look() -> Any:
            assert self.process is not None and self.process.poll() is None, read(self._output)
            return condition()

        eventually(look, what, seconds=SECONDS)

    def until_ended_or(self, condition: Callable[[], Any]) -> None:
        assert self.process is not None
        eventually(
            lambda: self.process.poll() is not None or condition(), "the run ends or comes so far", seconds=SECONDS
        )

    def path(self, *names: str) -> str:
        return os.path.join(self.workdir, *names)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_rows(self.path(name)) if os.path.exists(self.path(name)) else []

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.rows("metrics.jsonl")

    def output(self) -> str:
        return read(self._output)

    def ledger(self) -> dict[str, Any]:
        return json.loads(read(self.path("ledger.json"))) if os.path.exists(self.path("ledger.json")) else {}


def read(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read()


def config_of(flags: Sequence[str]) -> Config:
    """The config that a run with these flags has."""
    config = load_file(CONFIG)
    for flag in flags:
        if flag.startswith("--config."):
            name, _, value = flag.removeprefix("--config.").partition("=")
            override(config, name, value)
    return config

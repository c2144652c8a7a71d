"""A trainer of several hosts, each a process of this machine with its share of the virtual devices."""

import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any, Self

from tests.support.ports import free_port
from tests.support.processes import SECONDS
from tests.support.runs import Run
from tests.support.waiting import eventually

DEVICES = 4  # of all hosts together


class Hosts:
    """scalerl-train on `count` hosts and one workdir; the first of `runs` is the first host."""

    def __init__(self, workdir: pathlib.Path, count: int, *flags: str, devices: int = DEVICES):
        self.workdir, self.count, self._flags, self._devices = workdir, count, flags, devices
        self.runs: list[Run] = []
        self._starts = 0

    def start(self) -> Self:
        assert not any(run.process is not None and run.process.poll() is None for run in self.runs)
        self._starts += 1
        port = free_port()
        flags = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self._devices // self.count}"
        )
        self.runs = [
            Run(
                self.workdir,
                *self._flags,
                *self._rank(index, port),
                log=pathlib.Path(f"{self.workdir}-{self._starts}-{index}.log"),
                # Sets of a host and of the next one have orders of their own.
                # And a proxy for the web, where nobody listens: hosts do not ask it.
                variables={
                    "XLA_FLAGS": flags,
                    "PYTHONHASHSEED": str(1 + index % 2),
                    "http_proxy": "http://127.0.0.1:9",
                },
            ).start()
            for index in range(self.count)
        ]
        return self

    def _rank(self, index: int, port: int) -> list[str]:
        if self.count == 1:
            return []
        return [f"--coordinator=127.0.0.1:{port}", f"--host_count={self.count}", f"--host_index={index}"]

    def again(self, count: int, *flags: str) -> Self:
        """The same command on so many hosts. flags: beside those of before."""
        self.count, self._flags = count, (*self._flags, *flags)
        return self.start()

    @property
    def first(self) -> Run:
        return self.runs[0]

    def outputs(self) -> str:
        return "\n".join(f"---- host {index}\n{run.output()}" for index, run in enumerate(self.runs))

    def wait(self) -> list[int]:
        """The exit codes."""
        return [run.wait() for run in self.runs]

    def finish(self) -> Self:
        codes = self.wait()
        assert codes == [0] * self.count, self.outputs()
        return self

    def until(self, condition: Callable[[], Any], what: str) -> None:
        def look() -> Any:
            assert all(run.process.poll() is None for run in self.runs), self.outputs()
            return condition()

        eventually(look, what, seconds=SECONDS)

    def signal(self, index: int, number: signal.Signals) -> None:
        """To one host, not to what it has started."""
        os.kill(self.runs[index].process.pid, number)

    def close(self) -> None:
        for run in self.runs:
            run.close()

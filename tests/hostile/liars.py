"""The process of the faulty servers, seen from a test."""

import json
import pathlib
import sys
from typing import Self

from tests.support.processes import SECONDS, single_threaded
from tests.support.servers import ServerProcess


class Liars(ServerProcess):
    """A context manager: one process with a server for each of the modes."""

    def __init__(self, folder: pathlib.Path, model: str, modes: list[str], *, rollouts: str = ""):
        """rollouts: a recording to play; none: they sample from the model."""
        self._told = folder / "liars"
        self._told.mkdir()
        self._options = {"model": model, "modes": modes, "folder": str(self._told), "rollouts": rollouts}
        super().__init__(folder, name="liars", environment=single_threaded())

    def command(self) -> list[str | pathlib.Path]:
        return [sys.executable, "-m", "tests.hostile.lying_server", json.dumps(self._options)]

    def wait(self, *, seconds: float = SECONDS) -> Self:
        self.until_written(self._told / "truth.json", seconds=seconds)
        ports = json.loads((self._told / "ports.json").read_text())
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        return self

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.close()

    def truth(self) -> dict[str, dict[str, float]]:
        """What each has truly done so far."""
        return json.loads((self._told / "truth.json").read_text())

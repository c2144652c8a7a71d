"""The process of the faulty servers, seen from a test."""

import json
import os
import pathlib
import subprocess
import sys

from tests.support.waiting import eventually
from tests.train import helpers


class Liars:
    """A context manager: one process with a server for each of the modes."""

    def __init__(self, folder: pathlib.Path, model: str, modes: list[str], *, rollouts: str = ""):
        """rollouts: a recording to play; none: they sample from the model."""
        self._folder, self._log = os.path.join(folder, "liars"), os.path.join(folder, "liars.log")
        os.makedirs(self._folder)
        options = {"model": model, "modes": modes, "folder": self._folder, "rollouts": rollouts}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.lying_server", json.dumps(options)],
                cwd=helpers.ROOT,
                env=helpers.environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> "Liars":
        def listen() -> bool:
            assert self._process.poll() is None, helpers.read(self._log)
            return os.path.exists(os.path.join(self._folder, "truth.json"))

        eventually(listen, "the faulty servers listen", seconds=helpers.SECONDS)
        ports = json.loads(helpers.read(os.path.join(self._folder, "ports.json")))
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def truth(self) -> dict[str, dict[str, float]]:
        """What each has truly done so far."""
        return json.loads(helpers.read(os.path.join(self._folder, "truth.json")))

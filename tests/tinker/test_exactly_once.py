"""Tinker's own client against a server that is killed: what it is answered, and what is saved, is the same to the bit.

About 40 s of CPU. More kills: python -m tests.tinker.test_exactly_once KILLS
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pytest

from scalerl_jax.learner.checkpoint import read_newest
from tests.support.paths import ROOT
from tests.tinker.served import SCRIPT, model_folder, rollout_server, tinker_server

pytestmark = pytest.mark.slow
pytest.importorskip("tinker")

LONGEST_LIFE = 8.0  # seconds that a server lives at most, from when it listens
SCRIPT_SECONDS = 900


def played(
    folder: pathlib.Path, model: pathlib.Path, address: str, name: str, lives: list[float]
) -> tuple[Any, Any, int]:
    """(what the script was answered, the parameters that it saved, how many servers were killed before it was over).

    lives: seconds after which a server is killed."""
    workdir, out = folder / name, folder / f"{name}.json"
    workdir.mkdir()
    server = tinker_server(workdir, model, address)
    left = list(lives)
    try:
        server.wait()
        script = subprocess.Popen([*SCRIPT, f"http://{server.address}", str(out)], cwd=ROOT)
        try:
            until = time.monotonic() + SCRIPT_SECONDS
            while script.poll() is None:
                assert time.monotonic() < until, server.log.read_text()
                try:
                    script.wait(left[0] if left else 1.0)
                except subprocess.TimeoutExpired:
                    assert server.process.poll() is None, server.log.read_text()
                    if left:
                        left.pop(0)
                        server.kill()
                        server.start()
                        server.wait()
        finally:
            script.kill()
            script.wait()
        assert script.returncode == 0, server.log.read_text()
    finally:
        server.close()
    saved = workdir / "models" / "session-0-train-0" / "weights" / "here"
    with open(out) as file:
        return json.load(file), read_newest(str(saved), "params").state["params"], len(lives) - len(left)


def compare(kills: int, seed: int, folder: pathlib.Path) -> int:
    """Kills so many servers, ten in a run of the script at most, and returns their number."""
    rng = random.Random(seed)
    model = model_folder(folder / "model")
    with rollout_server(folder, model) as address:
        wanted, parameters, _ = played(folder, model, address, "undisturbed", [])
        done = 0
        while done < kills:
            lives = [rng.uniform(0, LONGEST_LIFE) for _ in range(min(kills - done, 10))]
            got, after, killed = played(folder, model, address, f"killed-{done}", lives)
            assert got == wanted
            for leaf, other in zip(leaves(parameters), leaves(after), strict=True):
                np.testing.assert_array_equal(leaf, other)
            done += killed
    return done


def leaves(tree: Any) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_killed_at_any_moment_it_answers_the_same(tmp_path: pathlib.Path) -> None:
    assert compare(2, 0, tmp_path) == 2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(compare(int(sys.argv[1]), int(os.environ.get("SEED", "1")), pathlib.Path(place)), "kills: the same")

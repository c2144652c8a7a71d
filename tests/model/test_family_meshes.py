"""Every family computes on a mesh what it computes on one device."""

import json
import os

import pytest

from scalerl_jax.model.families import FAMILIES
from tests.model import family_meshes
from tests.support.compiled import on_devices
from tests.support.processes import run_command

pytestmark = pytest.mark.slow


IN_FULL = ("qwen3", "llama4_text")  # one without experts and one with; the others are long


@pytest.mark.parametrize(
    "family", [name if name in IN_FULL else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_loss_and_gradient_are_those_of_one_device(family: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": on_devices(8)}
    done = run_command("tests.model.family_meshes", family, environment=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(family_meshes.MESHES)
    for line in found:
        assert line["loss"] < 1e-5 and line["gradient"] < 1e-5, line


def test_bits_are_those_of_one_device() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": on_devices(8)}
    done = run_command("tests.model.family_meshes", "bitwise", environment=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["other_bits"] for line in found] == [0, 0]

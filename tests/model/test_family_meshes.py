"""Every family computes on a mesh what it computes on one device."""

import json
import os
from typing import Any

import pytest

from scalerl_jax.model.families import FAMILIES
from tests.model import family_meshes
from tests.support.compiled import on_devices
from tests.support.processes import run_command

pytestmark = pytest.mark.slow


def lines_of(program: str, case: str) -> list[dict[str, Any]]:
    """The lines that the program prints, with 8 virtual CPU devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": on_devices(8)}
    done = run_command(f"tests.model.{program}", case, environment=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


IN_FULL = ("qwen3", "llama4_text")  # one without experts and one with; the others are long


@pytest.mark.parametrize(
    "family", [name if name in IN_FULL else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_loss_and_gradient_are_those_of_one_device(family: str) -> None:
    found = lines_of("family_meshes", family)
    assert len(found) == len(family_meshes.MESHES)
    for line in found:
        assert line["loss"] < 1e-5 and line["gradient"] < 1e-5, line


def test_bits_are_those_of_one_device() -> None:
    assert [line["other_bits"] for line in lines_of("family_meshes", "bitwise")] == [0, 0]

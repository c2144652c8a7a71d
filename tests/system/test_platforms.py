"""Commands that fit beside a training run leave its accelerator alone."""

import os
import pathlib
import subprocess
import sys

import pytest

from scalerl_jax.system import platforms
from tests.scaling.simulated import curve
from tests.support.paths import ROOT

ROWS = ["x,y"] + [f"{x},{curve(x, 300.0, 1.5, 0.6, 0.2):.6f}" for x in range(0, 4000, 200)]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["scalerl_fit", "scalerl_compare"])
def test_a_fit_is_made_on_the_cpu_alone(tmp_path: pathlib.Path, command: str) -> None:
    """Where JAX_PLATFORMS names an accelerator, JAX would start it, or fail where it cannot be had."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("\n".join(ROWS) + "\n")
    program = f"import atexit; from scalerl_jax.scaling.commands import {command}\n"
    program += "def told():\n    import jax; print('platforms', [device.platform for device in jax.devices()])\n"
    program += f"atexit.register(told)\n{command}.run()"
    arguments = ["a.csv", "b.csv", "--x=x", "--y=y", "--out=out"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "platforms ['cpu']" in done.stdout
    assert (tmp_path / "out" / f"{command.removeprefix('scalerl_')}.json").exists()


@pytest.mark.parametrize(("chosen", "then"), [("cuda", "cuda,cpu"), ("cuda,cpu", "cuda,cpu"), ("cpu", "cpu"), ("", "")])
def test_fits_beside_other_work_find_the_cpu(monkeypatch: pytest.MonkeyPatch, chosen: str, then: str) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", chosen)
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "jax")
    platforms.cpu_too()
    assert os.environ["JAX_PLATFORMS"] == then


def test_a_command_that_starts_others_leaves_the_choice_to_them() -> None:
    program = "import os; from scalerl_jax.system import platforms; platforms.cpu_here(); import jax\n"
    program += "print([device.platform for device in jax.devices()], os.environ['JAX_PLATFORMS'])"
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "['cpu'] cuda\n", done.stderr

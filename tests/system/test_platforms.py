"""Commands that fit beside a training run leave its accelerator alone; and in what dtype a machine computes."""

import os
import pathlib
import subprocess
import sys

import pytest

from scalerl_jax.system import platforms
from tests.scaling.simulated import curve
from tests.support.paths import ROOT

ROWS = ["x,y"] + [f"{x},{curve(x, 300.0, 1.5, 0.6, 0.2):.6f}" for x in range(0, 4000, 200)]
PLAIN = "processor\t: 0\nflags\t\t: fpu avx2 avx512f {}\nbugs\t: spectre amx_bf16\n"


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


@pytest.mark.parametrize(
    ("flags", "dtype", "why"),
    [
        ("", "float32", "without AMX"),
        ("avx512_bf16x amx_int8", "float32", "without AMX"),
        ("avx512_bf16", "bfloat16", "AVX512"),
        ("avx512_bf16 amx_bf16 amx_tile", "bfloat16", "AMX"),
    ],
)
def test_a_cpu_is_asked_for_what_it_multiplies(tmp_path: pathlib.Path, flags: str, dtype: str, why: str) -> None:
    (tmp_path / "cpuinfo").write_text(PLAIN.format(flags))
    found = platforms.fastest_dtype({"JAX_PLATFORMS": "cpu"}, cpuinfo=str(tmp_path / "cpuinfo"))
    assert found[0] == dtype and why in found[1]


def test_a_system_that_does_not_tell_gets_float32(tmp_path: pathlib.Path) -> None:
    assert platforms.fastest_dtype({"JAX_PLATFORMS": "cpu"}, cpuinfo=str(tmp_path / "absent"))[0] == "float32"


def test_an_accelerator_gets_bfloat16(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = str(tmp_path / "absent")
    assert platforms.fastest_dtype({"JAX_PLATFORMS": "tpu,cpu"}, cpuinfo=nothing) == ("bfloat16", "an accelerator")
    monkeypatch.setattr(platforms, "_is_there", lambda module: module.startswith("jax_plugins"))
    gpu = {"CUDA_VISIBLE_DEVICES": "0"}
    assert platforms.fastest_dtype(gpu, cpuinfo=nothing)[0] == "bfloat16"
    assert platforms.fastest_dtype({**gpu, "JAX_PLATFORMS": "cpu"}, cpuinfo=nothing)[0] == "float32"
    monkeypatch.setattr(platforms, "_is_there", lambda module: False)  # jax without CUDA computes on the CPU
    assert platforms.fastest_dtype(gpu, cpuinfo=nothing)[0] == "float32"


def test_looking_imports_no_jax() -> None:
    program = "import sys; from scalerl_jax.system import platforms; platforms.fastest_dtype()"
    program += "; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0

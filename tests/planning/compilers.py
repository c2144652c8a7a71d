"""Where the compilers of TPUs and GPUs are, for tests that need them: in the environment, or where `make plan-packages`
and `make plan-packages-gpu` put them."""

import importlib.util
import json
import pathlib
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_command

TPU, GPU = ROOT / "build" / "plan-packages", ROOT / "build" / "plan-packages-gpu"


def _needs(package: str, folder: pathlib.Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None and not (folder / package).is_dir(),
        reason=f"{package} is not installed (make {folder.name})",
    )


needs_tpu_compiler, needs_gpu_compiler = _needs("libtpu", TPU), _needs("jax_cuda12_plugin", GPU)


def plan(out: pathlib.Path, *arguments: str, seconds: float, packages: pathlib.Path = TPU) -> tuple[Any, str]:
    """(what scalerl-plan writes, what it prints) for these flags."""
    done = run_command("scalerl_jax.plan", *arguments, f"--out={out}", packages=packages, seconds=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return json.loads(out.read_text()), done.stdout

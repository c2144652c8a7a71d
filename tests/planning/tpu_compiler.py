"""Where the TPUs' compiler is, for tests that need it: in the environment, or where `make plan-packages` puts it."""

import importlib.util
import json
import pathlib
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_command

PACKAGES = ROOT / "build" / "plan-packages"

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and not (PACKAGES / "libtpu").is_dir(),
    reason="libtpu is not installed (make plan-packages)",
)


def plan(out: pathlib.Path, *arguments: str, seconds: float) -> tuple[dict[str, Any], str]:
    """(what scalerl-plan writes, what it prints) for these flags."""
    done = run_command("scalerl_jax.plan", *arguments, f"--out={out}", packages=PACKAGES, seconds=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    found: dict[str, Any] = json.loads(out.read_text())
    return found, done.stdout

"""What is carried to a machine with a GPU and no network: enough of it, and nothing that JAX and PyTorch bring."""

import pathlib
import re
import subprocess
import sys

from tests.packaging.sources import ROOT
from tests.packaging.test_imports import declared

LOCK = ROOT / "requirements" / "accelerator-py3.12.lock"
# Of jax[cuda] and torch; and what only draws, logs and renders chats, which the tests there do without.
BROUGHT = {"jax", "ml-dtypes", "numpy", "scipy", "sympy"}
LEFT_OUT = {"matplotlib", "tensorboard", "transformers"}


def locked() -> dict[str, str]:
    return dict(line.split("==") for line in LOCK.read_text(encoding="utf-8").split())


def wheels(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "requirements" / "wheels.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_lock_is_exact_and_holds_what_a_trainer_needs() -> None:
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"[a-z0-9._-]+==[0-9][0-9a-z.]*", line), line
    assert declared("train") - BROUGHT - LEFT_OUT <= set(locked())
    assert {"pytest", "pytest-timeout", "hypothesis"} <= set(locked())
    assert not set(locked()) & {*BROUGHT, "jaxlib", "torch"}


def test_what_is_carried_is_what_is_tested() -> None:
    """But for the two helpers of gRPC: these releases go with every protobuf that a machine may have."""
    tested = {}
    for name in ("train", "test"):
        text = (ROOT / "requirements" / f"{name}-py3.12.lock").read_text(encoding="utf-8")
        tested |= dict(line.split("==") for line in text.split())
    differing = {name for name, version in locked().items() if tested[name] != version}
    assert differing == {"grpcio-health-checking", "grpcio-reflection"}


def test_a_python_that_has_all_is_left_alone(tmp_path: pathlib.Path) -> None:
    done = wheels("install", str(tmp_path / "none"), str(tmp_path / "target"))
    assert (done.returncode, done.stdout) == (0, "wheels: this Python has all that is needed\n"), done.stderr


def test_missing_wheels_are_named_in_one_line(tmp_path: pathlib.Path) -> None:
    program = f"import sys; sys.path[:0] = [{str(ROOT / 'requirements')!r}]; import pathlib, wheels; "
    program += "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; "
    program += f"wheels.install(pathlib.Path({str(tmp_path)!r}), pathlib.Path({str(tmp_path / 'target')!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "lacks absl-py, " in done.stderr and "`make accelerator-wheels`" in done.stderr

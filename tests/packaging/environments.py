"""Real environments for tests: made afresh, the project installed into them as a user would."""

import os
import pathlib
import shutil
import subprocess
import sys

from tests.packaging.sources import PACKAGES, ROOT


def run(command: list[str], *, where: pathlib.Path, seconds: float = 900.0) -> str:
    """Standard output of a command that must succeed, run away from the source tree."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False, timeout=seconds
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def copy_of_the_project(folder: pathlib.Path) -> pathlib.Path:
    """What a wheel is built from. A copy, since a build leaves files where it works."""
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def wheel(folder: pathlib.Path) -> pathlib.Path:
    """The project's wheel, built with this environment's setuptools."""
    source = copy_of_the_project(folder / "source")
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    run([sys.executable, "-c", build], where=source)
    (built,) = folder.glob("*.whl")
    return built


def environment(folder: pathlib.Path, requirements: list[str], *, lock: pathlib.Path | None = None) -> pathlib.Path:
    """The Python of a new environment that holds `requirements`, at the lock's versions where it names them.

    uv takes what `make setup` left in its cache; pip, where there is no uv, needs minutes.
    """
    python = folder / "bin" / "python"
    pinned = ["-c", str(lock)] if lock is not None else []
    uv = pathlib.Path(sys.executable).with_name("uv")
    if uv.exists():
        run([str(uv), "venv", "--quiet", "--python", sys.executable, str(folder)], where=folder.parent)
        install = [str(uv), "pip", "install", "--quiet", "--python", str(python)]
    else:
        run([sys.executable, "-m", "venv", str(folder)], where=folder.parent)
        install = [str(python), "-m", "pip", "install", "--quiet"]
    run([*install, *pinned, *requirements], where=folder.parent)
    return python

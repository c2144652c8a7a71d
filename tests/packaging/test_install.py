"""requirements/install.py on a small project of its own: whole or made afresh, and nothing the second time."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.packaging.sources import ROOT

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SETUP = "from setuptools import setup\nsetup(name='small', version='1', py_modules=['small'])\n"


def pinned(name: str) -> str:
    lines = (ROOT / "requirements" / f"test-py{VERSION}.lock").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}==")]
    return line + "\n"


@pytest.fixture
def project(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "requirements" / "install.py", tmp_path / "requirements")
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "small.py").write_text("")
    (tmp_path / "requirements" / f"train-py{VERSION}.lock").write_text(pinned("setuptools") + pinned("zipp"))
    test_lock = "".join(pinned(name) for name in ("setuptools", "uv", "zipp", "iniconfig"))
    (tmp_path / "requirements" / f"test-py{VERSION}.lock").write_text(test_lock)
    return tmp_path


def install(project: pathlib.Path, name: str = "train", python: str = sys.executable) -> str:
    command = [python, str(project / "requirements" / "install.py"), f"--venv={project / 'env'}", f"--set={name}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def imports(project: pathlib.Path, *names: str) -> bool:
    command = [str(project / "env" / "bin" / "python"), "-c", f"import {', '.join(names)}"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.slow
def test_once_is_enough_until_a_lock_changes_or_a_set_up_is_broken_off(project: pathlib.Path) -> None:
    said = install(project)
    assert "making" in said
    assert "installing 2 packages" in said
    assert imports(project, "small", "zipp")
    assert not imports(project, "iniconfig")
    assert install(project) == ""

    # The larger set counts for the smaller one.
    assert "installing 4 packages" in install(project, "test")
    assert imports(project, "iniconfig")
    assert install(project, "test") == install(project) == ""
    # Run by the environment's own Python, as the Makefile does once it is there.
    environment = project / "env"
    assert install(project, python=str(environment / "bin" / "python")) == ""

    lock = project / "requirements" / f"train-py{VERSION}.lock"
    lock.write_text(lock.read_text() + pinned("mdurl"))
    said = install(project)
    assert "installing 3 packages" in said
    assert "making" not in said
    assert imports(project, "mdurl")

    (environment / ".installing").touch()  # what a killed installer leaves, and a package in part:
    (package,) = environment.glob("lib/python*/site-packages/zipp")
    shutil.rmtree(package)
    assert "making" in install(project, python=str(environment / "bin" / "python"))
    assert imports(project, "small", "zipp", "mdurl")
    assert install(project) == ""


@pytest.mark.slow
def test_an_environment_without_pip_is_made_afresh_and_pip_alone_will_do(
    project: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SETUP_INSTALLER", "pip")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(project / "env")], check=True)
    assert "making" in install(project)
    assert imports(project, "small", "zipp")
    assert not (project / "env" / "bin" / "uv").exists()


@pytest.mark.slow
def test_a_package_that_cannot_be_had_fails_and_can_be_tried_again(project: pathlib.Path) -> None:
    lock = project / "requirements" / f"train-py{VERSION}.lock"
    good = lock.read_text()
    lock.write_text(good + "zipp==0.0.0.0.1\n")
    command = [sys.executable, str(project / "requirements" / "install.py"), f"--venv={project / 'env'}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode != 0
    assert result.stderr.strip().splitlines()[-1].startswith("setup: ")
    lock.write_text(good)
    install(project)
    assert imports(project, "small", "zipp")


@pytest.mark.slow
def test_another_python_is_refused_rather_than_mixed_in(project: pathlib.Path) -> None:
    install(project)
    python = project / "env" / "bin" / "python"
    python.unlink()
    # Stands for an environment of another release.
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c \"print('3.10.1 (other)')\"\n")
    python.chmod(0o755)
    (project / "setup.py").write_text(SETUP + "\n")
    command = [sys.executable, str(project / "requirements" / "install.py"), f"--venv={project / 'env'}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode != 0
    assert "is of Python 3.10.1, not " in result.stderr

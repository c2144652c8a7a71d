"""The Dockerfiles: sound, and of files, extras and programs that there are."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

FILES = sorted((pathlib.Path(ROOT) / "launch" / "docker").glob("*.Dockerfile"))


def instructions(path: pathlib.Path) -> list[tuple[str, str]]:
    """(name, arguments), continued lines in one, the values of ARG put in."""
    text = re.sub(r"\\\n\s*", "", "".join(line for line in path.read_text().splitlines(True) if line[0] != "#"))
    values: dict[str, str] = {}
    found = []
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        rest = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], rest)
        if name == "ARG" and "=" in rest:
            values.update([rest.split("=", 1)])
        found.append((name, rest))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing(path: pathlib.Path) -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    assert hadolint, "it is in the lock"
    result = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_copied_and_installed_is_there(path: pathlib.Path) -> None:
    found = instructions(path)
    copied = [source for name, rest in found if name == "COPY" for source in rest.split()[:-1]]
    for source in copied:
        assert (pathlib.Path(ROOT) / source).exists(), source
    assert {"launch", "rollout_server", "scalerl_jax", "setup.py"} <= set(copied)  # what a wheel is built from
    (extras,) = [extra for _, rest in found for extra in re.findall(r'"\.\[([\w,]+)\]"', rest)]
    known = (pathlib.Path(ROOT) / "setup.py").read_text()
    assert [extra for extra in extras.split(",") if f'"{extra}":' not in known] == []


def test_what_pods_run_is_installed_by_both() -> None:
    scripts = {script.name for script in importlib.metadata.entry_points(group="console_scripts")}
    assert {"scalerl-train", "scalerl-serve"} <= scripts
    assert len(FILES) == 2


def test_the_trainers_versions_are_the_locked_ones() -> None:
    (trainer,) = [instructions(path) for path in FILES if path.stem == "trainer"]
    copied = [rest.split() for name, rest in trainer if name == "COPY"]
    (lock,) = [source for source, target in [pair for pair in copied if len(pair) == 2] if target == "constraints.txt"]
    (install,) = [rest for name, rest in trainer if name == "RUN" and "pip install" in rest]
    assert "--constraint=constraints.txt" in install
    assert lock == "requirements/train-py3.12.lock"

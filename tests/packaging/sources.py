"""Reads the project's own files: which module imports what, without running any of them."""

import ast
import functools
import pathlib
import sys

from tests.support.paths import ROOT

PACKAGES = ("launch", "rollout_server", "scalerl_jax")


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Dotted name -> file, of everything that is installed."""
    return {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Every module that the file imports, also inside a function; ours by file, others as written."""
    path, found = modules()[module], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(_ours(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from package import name`: the name may be a module of its own.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(_ours(name) if name in modules() else _ours(node.module) for name in names)
    return frozenset(found)


def _ours(name: str) -> str:
    """For ours, the longest part of a dotted name that is a file; anything else as it is."""
    while name.split(".")[0] in PACKAGES and name not in modules():
        name = name.rpartition(".")[0]
    return name


def parents_of(module: str) -> set[str]:
    """The packages whose __init__ runs before the module."""
    parts = module.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


def reached_from(*modules_: str) -> set[str]:
    """Ours and others': all that importing these can bring in, function-level imports included."""
    reached: set[str] = set()
    waiting = list(modules_)
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        if module in modules():
            waiting += [*imports_of(module), *parents_of(module)]
    return reached


def others(names: set[str]) -> set[str]:
    """Top-level names among `names` that are neither ours nor the standard library's."""
    tops = {name.split(".")[0] for name in names}
    return {"google.protobuf" if top == "google" else top for top in tops - set(PACKAGES) - sys.stdlib_module_names}

"""reference/api.md: the public Python API, rendered from its docstrings by mkdocstrings."""

import ast
from collections.abc import Iterator

from docs.generate import ROOT

# Package -> what a reader does with it. What is public is what the package exports.
PACKAGES = {
    "scalerl_jax.scaling": "Fit and forecast a curve of your own. Needs numpy, scipy and JAX (`scalerl-jax[fit]`), no "
    "trainer and no model. [The fit](../algorithms/fit.md) explains the maths.",
    "scalerl_jax.model": "The policy: load a Hugging Face folder, run it, score tokens.",
    "scalerl_jax.objective": "Advantages, token weights and losses as pure functions of arrays. "
    "[Losses](../algorithms/losses.md) has the formulas.",
    "scalerl_jax.environments": "What an [environment of your own](../how_to/environments.md) is made of.",
}
INTRODUCTION = """# Python API

These names stay. Everything else in the packages may move between releases.
"""


def exported(package: str) -> Iterator[tuple[str, str]]:
    """(name, where it is defined) of what a package exports: by imports and __all__, or by a table of homes."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    homes = dict[str, str]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: node.module or "" for alias in node.names}
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            homes = {name: f"{package}.{home}" for name, home in ast.literal_eval(node.value).items()}
            yield from ((name, f"{home}.{name}") for name, home in homes.items())
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            yield from ((name, f"{homes[name]}.{name}") for name in ast.literal_eval(node.value))


def page() -> str:
    parts = [INTRODUCTION]
    for package, said in PACKAGES.items():
        parts.append(f"\n## {package}\n\n{said}\n")
        for name, home in exported(package):
            parts.append(f"\n::: {home}\n    options:\n      heading: {package}.{name}\n      toc_label: {name}\n")
    return "".join(parts)

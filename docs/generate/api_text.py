"""The Python API as plain Markdown, for programs that read; the site's own is by mkdocstrings."""

import ast
from collections.abc import Iterator

from docs.generate import ROOT
from docs.generate.api_page import INTRODUCTION, PACKAGES, exported


def page() -> str:
    parts = [INTRODUCTION]
    for package, said in PACKAGES.items():
        parts.append(f"\n## {package}\n\n{said}\n")
        for name, home in exported(package):
            module, _, own = home.rpartition(".")
            parts.append(f"\n### {package}.{name}\n\n```python\n{_definition(module, own)}\n```\n")
    return "".join(parts)


def _definition(module: str, name: str) -> str:
    """Signature and docstring; of a class its fields with their comments and its public methods; of a value all."""
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    node = next(node for node in ast.parse(source).body if name in _names(node))
    if isinstance(node, ast.ImportFrom):
        return _definition(node.module or "", name)
    lines = source.splitlines()
    if isinstance(node, ast.ClassDef):
        inside = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
        first = min((inner.lineno - 1 - len(inner.decorator_list) for inner in inside), default=node.end_lineno)
        methods = [_function(inner, lines) for inner in inside if not inner.name.startswith("_")]
        return "\n\n".join(["\n".join(lines[node.lineno - 1 : first]).rstrip(), *methods])
    if isinstance(node, ast.FunctionDef):
        return _function(node, lines)
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _function(node: ast.FunctionDef, lines: list[str]) -> str:
    """As it is written, up to the end of its docstring."""
    said = ast.get_docstring(node) is not None
    last = node.body[0].end_lineno if said else node.body[0].lineno - 1
    return "\n".join(lines[node.lineno - 1 : last]) if last and last >= node.lineno else lines[node.lineno - 1]

"""The state of a server, and of what the trainer sends it, is changed by its own methods alone."""

import ast
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDER = Path(ROOT) / "scalerl_jax"
OWNERS = {
    "rollouts/servers/server_state.py": ["ServerState"],
    "rollouts/servers/client.py": ["ServerClient"],
    "rollouts/servers/pool.py": ["ServerPool"],
    "rollouts/servers/offences.py": ["Record"],
    "rollouts/weights/publisher.py": ["Publisher"],
}


def assigned(tree: ast.AST) -> list[tuple[str, str, int]]:
    """(object, attribute, line) of every attribute that is written to or deleted."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [(ast.unparse(n.value), n.attr, n.lineno) for n in nodes if isinstance(n.ctx, ast.Store | ast.Del)]


def own() -> set[str]:
    """The attributes of those classes."""
    names = set()
    for file, classes in OWNERS.items():
        for node in ast.parse((FOLDER / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                names |= {name for owner, name, _ in assigned(node) if owner == "self"}
    return names


def test_owner_classes_exist() -> None:
    assert {"state", "evaluation", "samples", "patience", "step", "until", "latest", "clients"} <= own()


@pytest.mark.parametrize("file", sorted(FOLDER.glob("rollouts/**/*.py")), ids=lambda file: file.name)
def test_nobody_else_writes_to_it(file: Path) -> None:
    names = own()
    said = [
        f"{file.name}:{line}: {owner}.{name}"
        for owner, name, line in assigned(ast.parse(file.read_text()))
        if owner != "self" and name in names
    ]
    assert said == []


def test_who_writes_is_found() -> None:
    tree = ast.parse("client.evaluation = None\nself.a.patience -= 1\ndel client.step\na, c.samples = 1, 2")
    assert {name for _, name, _ in assigned(tree)} == {"evaluation", "patience", "step", "samples"}

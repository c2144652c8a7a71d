"""A file imports only from floors below its own, or from its own package, and never in a circle."""

import pytest

from tests.packaging.sources import PACKAGES, ROOT, imports_of, modules, others, reached_from

FLOORS = {
    # floor: packages and files, by dotted name
    0: "scalerl_jax.contract scalerl_jax.system scalerl_jax.config_bounds",
    1: "scalerl_jax.config",
    2: "scalerl_jax.config_check scalerl_jax.objective",
    3: "scalerl_jax.config_io",
    4: "scalerl_jax.cli",
    5: "scalerl_jax.scaling scalerl_jax.model scalerl_jax.environments.base",
    6: "scalerl_jax.learner scalerl_jax.environments launch.local launch.machines launch.rendered launch.launch_flags",
    7: "scalerl_jax.rollouts rollout_server launch.starting",
    8: "scalerl_jax.run scalerl_jax.hosts launch.settings",
    9: "scalerl_jax.report scalerl_jax.traces launch.kubernetes launch.slurm",
    10: "scalerl_jax.planning",
    11: "scalerl_jax.early_checks scalerl_jax.gateway rollout_server.engines.jax.plan",
    12: "scalerl_jax.evaluate scalerl_jax.export scalerl_jax.plan scalerl_jax.sft scalerl_jax.tinker scalerl_jax.train "
    "scalerl_jax.verify launch.render",
    13: "scalerl_jax.study",
    14: "launch.commands",
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}


def entry_of(module: str) -> str:
    """The longest prefix that has a floor."""
    name = module
    while name and name not in FLOOR_OF:
        name = name.rpartition(".")[0]
    assert name, f"{module}: give it a floor in FLOORS"
    return name


def ours(module: str) -> set[str]:
    """What a file of ours imports of ours; the empty files that only make a folder a package are nothing."""
    found = {name for name in imports_of(module) if name.split(".")[0] in PACKAGES}
    return found - {"scalerl_jax", "rollout_server", "launch"}


@pytest.mark.parametrize("module", sorted(set(modules()) - {"scalerl_jax", "launch"}))
def test_imports_go_down(module: str) -> None:
    entry = entry_of(module)
    for target in ours(module):
        other = entry_of(target)
        assert other == entry or FLOOR_OF[other] < FLOOR_OF[entry], (
            f"{module} (floor {FLOOR_OF[entry]}) imports {target} (floor {FLOOR_OF[other]})"
        )


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Every circle found by walking the arrows from each name once."""
    found, done = list[list[str]](), set[str]()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(arrows.get(name, ())):
                walk(target, [*path, name])
            done.add(name)

    for name in sorted(arrows):
        walk(name, [])
    return found


def test_no_file_imports_itself_through_others() -> None:
    assert [" -> ".join(circle) for circle in circles({module: ours(module) for module in modules()})] == []


def place_of(module: str) -> str:
    """The folder, where it is in another one and has none inside; else the file: a wing is between files of a house."""
    folder = modules()[module].parent
    has_wings = any(inside.is_dir() and (inside / "__init__.py").exists() for inside in folder.iterdir())
    return module if has_wings or folder.parent == ROOT else ".".join(folder.relative_to(ROOT).parts)


def test_no_folder_imports_itself_through_others() -> None:
    arrows: dict[str, set[str]] = {}
    for module in modules():
        arrows.setdefault(place_of(module), set()).update(place_of(target) for target in ours(module))
    assert [" -> ".join(circle) for circle in circles({a: b - {a} for a, b in arrows.items()})] == []


def test_the_package_itself_imports_nothing() -> None:
    assert imports_of("scalerl_jax") == imports_of("rollout_server") == frozenset()


def test_the_trainer_does_not_import_the_server() -> None:
    for module in modules():
        if module.startswith("scalerl_jax"):
            assert not [name for name in ours(module) if name.startswith("rollout_server")], module


def test_the_objective_needs_the_config_alone() -> None:
    files = [module for module in modules() if module.startswith("scalerl_jax.objective")]
    reached = {name for name in reached_from(*files) if name.split(".")[0] in PACKAGES}
    allowed = ("scalerl_jax.objective", "scalerl_jax.config")
    assert {name for name in reached if not name.startswith(allowed)} == {"scalerl_jax"}


@pytest.mark.parametrize("package", ["scalerl_jax.contract", "scalerl_jax.system"])
def test_what_stands_alone(package: str) -> None:
    files = [module for module in modules() if module.startswith(package)]
    reached = {name for name in reached_from(*files) if name.split(".")[0] in PACKAGES}
    assert {name for name in reached if not name.startswith(package)} == {"scalerl_jax"}


def test_the_curves_need_no_trainer() -> None:
    files = [module for module in modules() if module.startswith("scalerl_jax.scaling")]
    reached = {name for name in reached_from(*files) if name.split(".")[0] in PACKAGES}
    allowed = ("scalerl_jax.scaling", "scalerl_jax.cli", "scalerl_jax.system", "scalerl_jax.config")
    assert {name for name in reached if not name.startswith(allowed)} == {"scalerl_jax"}


def test_the_contract_needs_only_numpy_and_protobuf() -> None:
    files = [module for module in modules() if module.startswith("scalerl_jax.contract")]
    assert others(reached_from(*files)) <= {"numpy", "google.protobuf", "grpc", "zlib_ng"}
    without_stubs = [
        module for module in files if not module.endswith(("_pb2_grpc", ".rpc", ".security", ".weight_stream"))
    ]
    assert others(reached_from(*without_stubs)) <= {"numpy", "google.protobuf", "zlib_ng"}

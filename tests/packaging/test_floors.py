"""The house has floors: a file imports only from floors below its own, or from its own room.

A room is a package on one floor, or the files of one floor that stand in a package beside others (the entries).
"""

import pytest

from tests.packaging.sources import PACKAGES, imports_of, modules, others, reached_from

ENTRIES = (
    "alarms command_flags compare evaluate export fit launch live_forecast plan report report_page scrutiny sft study "
    "summary train trainer watch"
)
FLOORS = {
    # floor: rooms, by the dotted name of a package or of a single file
    0: "rollout_server.contract scalerl_jax.config scalerl_jax.entry scalerl_jax.telemetry scalerl_jax.ledger "
    "scalerl_jax.eventfile scalerl_jax.files scalerl_jax.memory scalerl_jax.platforms scalerl_jax.progress "
    "scalerl_jax.command_help scalerl_jax.compare_flags scalerl_jax.continuing scalerl_jax.fit_flags "
    "scalerl_jax.ledger_repair scalerl_jax.signals",
    1: "scalerl_jax.objective scalerl_jax.scaling",
    2: "scalerl_jax.model",
    3: "scalerl_jax.learner scalerl_jax.tasks",
    4: "launch rollout_server scalerl_jax.rollouts",
    5: "launch.commands " + " ".join(f"scalerl_jax.{name}" for name in ENTRIES.split()),
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms.split()}
# Files of one floor that make up one thing between them.
SHARED_ROOMS = {**dict.fromkeys(FLOORS[5].split(), "entries"), **dict.fromkeys(FLOORS[0].split()[1:], "base")}


def room_of(module: str) -> str:
    """The longest prefix that has a floor."""
    name = module
    while name and name not in FLOOR_OF:
        name = name.rpartition(".")[0]
    assert name, f"{module}: give it a floor in FLOORS"
    return name


@pytest.mark.parametrize("module", sorted(set(modules()) - {"scalerl_jax"}))
def test_imports_go_down(module: str) -> None:
    room = room_of(module)
    for target in imports_of(module) - {"scalerl_jax"}:
        if target.split(".")[0] not in PACKAGES:
            continue
        other = room_of(target)
        same_room = SHARED_ROOMS.get(room, room) == SHARED_ROOMS.get(other, other)
        assert same_room or FLOOR_OF[other] < FLOOR_OF[room], (
            f"{module} (floor {FLOOR_OF[room]}) imports {target} (floor {FLOOR_OF[other]})"
        )


def test_the_package_itself_imports_nothing() -> None:
    assert imports_of("scalerl_jax") == imports_of("rollout_server") == frozenset()


@pytest.mark.parametrize("package", ["scalerl_jax.objective", "scalerl_jax.scaling"])
def test_the_mathematics_stands_alone(package: str) -> None:
    files = [module for module in modules() if module.startswith(package)]
    ours = {name for name in reached_from(*files) if name.split(".")[0] in PACKAGES}
    assert {name for name in ours if not name.startswith(package)} == {"scalerl_jax"}


def test_the_contract_needs_only_numpy_and_protobuf() -> None:
    files = [module for module in modules() if module.startswith("rollout_server.contract")]
    assert others(reached_from(*files)) <= {"numpy", "google.protobuf", "grpc", "zlib_ng"}
    without_stubs = [module for module in files if not module.endswith(("_pb2_grpc", ".rpc", ".security"))]
    assert others(reached_from(*without_stubs)) <= {"numpy", "google.protobuf", "zlib_ng"}

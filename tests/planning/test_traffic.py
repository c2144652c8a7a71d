"""Machines by name, and what a group of devices can receive over their links and the network."""

import pytest

from launch.machines import CHIPS, parse
from scalerl_jax.planning import layout_plan
from scalerl_jax.planning.collectives import Collective
from scalerl_jax.planning.roofline import Traffic, by_axes
from scalerl_jax.planning.workload import find_machine

KNOWN = "v5e, v5p, v6e, a100-80gb, l4, l40s, h100, h200, b200"
V5P, V5E = CHIPS["v5p"], CHIPS["v5e"]


def group(*devices: int) -> tuple[tuple[int, int], ...]:
    return tuple((devices[0], other) for other in devices[1:])


def seconds(machine, mesh, devices, size=10**9, kind="all-gather"):
    (found,) = by_axes([Collective(kind, size, group(*devices))], mesh, machine)
    return found


@pytest.mark.parametrize(
    ("topology", "slices", "devices", "shown"),
    [("v5p:4x4x8", 1, 128, "v5p:4x4x8"), ("v5e:8x8", 2, 128, "v5e:8x8, 2 slices"), ("h200:2x8", 1, 16, "h200:2x8"),
     ("b200:8", 1, 8, "b200:8")],
)  # fmt: skip
def test_a_machine_by_its_name(topology, slices, devices, shown):
    machine = find_machine(topology, slices)
    assert (machine.devices, str(machine)) == (devices, shown)


@pytest.mark.parametrize(
    ("topology", "slices", "said"),
    [
        ("v9:4x4", 1, "'v9' is not one of v5e, v5p, v6e, a100, a100-80gb, l4, l40s, h100, h200, b200, gpu, cpu"),
        ("v5p:4x4", 1, "a v5p slice is written like v5p:4x4x4"),
        ("v5e", 1, "a v5e slice is written like v5e:4x4"),
        ("v5e:0x4", 1, "a v5e slice is written like v5e:4x4"),
        ("v5e:3x1", 1, "3 chips are no whole number of hosts with 4"),
        ("h100:2x8x2", 1, "'2x8' is not a number of nodes"),
        ("h100:32", 1, "32 GPUs on one node: two nodes of 8 are written h100:2x8"),
        ("h100:8", 2, "slices are TPUs'; 2 nodes of 8 GPUs are written h100:2x8"),
        ("cpu:4", 1, f"a plan needs the figures of a chip, which are known of {KNOWN}"),
        ("gpu:8", 1, f"a plan needs the figures of a chip, which are known of {KNOWN}"),
    ],
)
def test_no_such_machine(topology, slices, said):
    with pytest.raises(ValueError) as error:
        find_machine(topology, slices)
    assert str(error.value) == f"--topology={topology}: {said}"


def test_a_ring_has_both_directions_and_a_line_one():
    torus = parse("v5p:4x4x4")
    mesh = {"fsdp": 16, "tensor": 4}
    assert seconds(torus, mesh, range(4)).link_seconds == pytest.approx(1e9 / (2 * V5P.link_rate))
    assert seconds(torus, mesh, range(0, 64, 4)).link_seconds == pytest.approx(1e9 / (4 * V5P.link_rate))
    # Two neighbors of a ring of four cannot use the way round it.
    assert seconds(torus, {"fsdp": 32, "tensor": 2}, range(2)).link_seconds == pytest.approx(1e9 / V5P.link_rate)
    line = parse("v5e:8x8")
    assert seconds(line, {"fsdp": 8, "tensor": 8}, range(8)).link_seconds == pytest.approx(1e9 / V5E.link_rate)
    ring = parse("v5e:16x16")
    assert seconds(ring, {"fsdp": 16, "tensor": 16}, range(16)).link_seconds == pytest.approx(1e9 / 2 / V5E.link_rate)


def test_what_crosses_slices_goes_over_the_network():
    two = parse("v5e:4x4", slices=2)
    mesh = {"replica": 2, "fsdp": 16}
    across = seconds(two, mesh, (0, 16), kind="all-reduce")
    assert (across.over_network, across.link_seconds) == (1e9, 0)
    assert across.network_seconds == pytest.approx(1e9 / V5E.network_rate)
    inside = seconds(two, mesh, range(16))
    assert (inside.over_network, inside.network_seconds) == (0, 0)
    both = seconds(two, mesh, range(32))
    assert both.over_network == pytest.approx(1e9 / 31)
    nodes = parse("h200:2x8")
    assert seconds(nodes, {"fsdp": 16}, range(16)).over_network == pytest.approx(1e9 / 15)
    assert seconds(nodes, {"fsdp": 2, "tensor": 8}, range(8)).network_seconds == 0


def test_what_is_found_has_the_network_of_the_formula_beside_it():
    found = (Traffic(("fsdp",), 100, 0.0, 0.1, 0.0),)
    formula = (Traffic(("fsdp",), 90, 30.0, 0.3, 0.2), Traffic(("replica",), 7, 7.0, 0.4, 0.5))
    merged = {one.axes: one for one in layout_plan._with_network(found, formula)}
    assert merged[("fsdp",)] == Traffic(("fsdp",), 130, 30.0, 0.1, 0.2)
    assert merged[("replica",)] == Traffic(("replica",), 7, 7.0, 0.0, 0.5)


def test_one_axis_is_one_row():
    machine, mesh = parse("v5e:4x4"), {"fsdp": 4, "tensor": 4}
    some = [Collective("all-gather", 100, group(0, 1, 2, 3)), Collective("all-reduce", 50, group(4, 5))]
    (found,) = by_axes(some, mesh, machine)
    assert (found.axes, found.received) == (("tensor",), 150)

"""The least time of a step: each part takes as long as its slowest resource, and everything that can overlap does.

    micro-batch   max(layers + head, links, network)        layers, head: max(products at the peak rate, memory)
    optimizer     memory: 28 bytes of each parameter of the device's part
    step          micro-batches x micro-batch + optimizer

No real run reaches it; the sum of all four parts is the time without any overlap. Model FLOPs utilization uses the
model's FLOPs as a run's ledger counts them, without recomputation.

Communication times are by mesh axis: over the links inside a slice or node, and over the network.

A group of devices uses, in each dimension of the torus in which its members differ, both directions of the links if the
dimension is a ring and the group fills it, else one. GPUs of a node use all their links to its switch. In a collective
over n devices in m slices (or nodes), a share (m - 1) / (n - 1) of the bytes that a device receives comes over the
network; collectives run one after another. These are the least times: latency and contention are left out.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from launch.machines import Machine
from scalerl_jax.planning.analytic import Flops
from scalerl_jax.planning.collectives import Collective, axes_of


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a device receives in one micro-batch along some axes of the mesh."""

    axes: tuple[str, ...]
    received: int  # bytes, over links and network
    over_network: float  # bytes of these between slices or nodes
    link_seconds: float
    network_seconds: float


def by_axes(collectives: Iterable[Collective], mesh: Mapping[str, int], machine: Machine) -> list[Traffic]:
    """mesh: axis -> devices, the last axis varies fastest; devices are numbered slice by slice, x fastest."""
    found: dict[tuple[str, ...], Traffic] = {}
    for one in collectives:
        axes = axes_of(one.pairs, mesh)
        if not axes or not one.received:
            continue
        share, rate = _network_share(one, machine), _link_rate(one, machine)
        network = one.received * share
        inside = one.received - network
        before = found.get(axes, Traffic(axes, 0, 0.0, 0.0, 0.0))
        found[axes] = Traffic(
            axes,
            before.received + one.received,
            before.over_network + network,
            before.link_seconds + (inside / rate if inside else 0.0),
            before.network_seconds + network / machine.chip.network_rate,
        )
    return sorted(found.values(), key=lambda traffic: -traffic.received)


def seconds_of(one: Collective, machine: Machine) -> tuple[float, str]:
    """Seconds of a collective on LINKS or NETWORK, whichever takes longer, and which of them."""
    if not one.pairs or not one.received:
        return 0.0, LINKS
    network = one.received * _network_share(one, machine)
    on_links = (one.received - network) / _link_rate(one, machine)
    return max((on_links, LINKS), (network / machine.chip.network_rate, NETWORK), key=lambda found: found[0])


def _network_share(one: Collective, machine: Machine) -> float:
    per_part = machine.devices // machine.parts
    if one.kind == "collective-permute":
        return sum(a // per_part != b // per_part for a, b in one.pairs) / len(one.pairs)
    members = {device for pair in one.pairs for device in pair}
    parts = len({device // per_part for device in members})
    return (parts - 1) / (len(members) - 1)


def _link_rate(one: Collective, machine: Machine) -> float:
    """Bytes a second into a device over the links that the group can use."""
    chip = machine.chip
    if not chip.is_tpu:
        return chip.link_rate
    per_part = machine.devices // machine.parts
    pairs = [(a, b) for a, b in one.pairs if a // per_part == b // per_part] or list(one.pairs)
    places = np.array([np.unravel_index(np.array(pair) % per_part, machine.sizes[::-1]) for pair in pairs])
    rate = 0.0
    for dimension, size in enumerate(machine.sizes[::-1]):  # places: [pairs, dimensions, 2]
        if (places[:, dimension, 0] != places[:, dimension, 1]).any():
            whole = len(np.unique(places[:, dimension])) == size
            rate += chip.link_rate * (2 if whole and size % chip.wraps_at == 0 else 1)
    return rate or chip.link_rate


PARTS = PRODUCTS, MEMORY, LINKS, NETWORK = "matrix products", "memory", "links", "network"
_OPTIMIZER_BYTES = 28  # per parameter: gradient, value and both moments read, and the last three written


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step."""

    step: float
    in_turn: float  # without any overlap
    parts: dict[str, float]  # seconds of each of the four parts alone
    binds: str  # the limiting one of the four


def of(
    machine: Machine,
    *,
    flops: Flops,
    memory_bytes: tuple[float, float],
    traffic: list[Traffic],
    micro_batches: int,
    parameters: float,
    dtype: str = "bfloat16",
    peak_share: float = 1.0,
) -> Roofline:
    """flops: of a micro-batch on all devices, of products of this dtype. memory_bytes: of layers and head, on a device.
    parameters: on a device. peak_share: of the chip's rate that products reach."""
    of_chip = machine.chip.float32_flops if dtype == "float32" else machine.chip.flops
    rate = of_chip * peak_share * machine.devices
    products = ((flops.layers + flops.attention) / rate, flops.head / rate)
    memory = tuple(size / machine.chip.memory_rate for size in memory_bytes)
    links = sum(one.link_seconds for one in traffic)
    network = sum(one.network_seconds for one in traffic)
    on_chip = sum(map(max, products, memory))
    optimizer = _OPTIMIZER_BYTES * parameters / machine.chip.memory_rate
    parts = {
        PRODUCTS: micro_batches * sum(products),
        MEMORY: micro_batches * sum(memory) + optimizer,
        LINKS: micro_batches * links,
        NETWORK: micro_batches * network,
    }
    if max(links, network) > on_chip:
        binds = LINKS if links >= network else NETWORK
    else:
        by_products = sum(p for p, m in zip(products, memory) if p >= m)
        binds = PRODUCTS if 2 * by_products >= on_chip else MEMORY
    step = micro_batches * max(on_chip, links, network) + optimizer
    return Roofline(step, sum(parts.values()), parts, binds)

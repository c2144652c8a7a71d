"""What the collectives of a compiled program bring to a device, read from its HLO: bytes by kind and by mesh axis.

Each collective counts as often as the loops around it run. An axis is one along which the devices of a group differ;
products that the compiler has cut into steps, so that a weight travels while its part before is used, are permutes.
A collective that goes on beside other work stands in the fusions of these, under one channel: there it counts once.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}

IN_FLOAT32 = "all-gather in float32"  # those of them


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str  # of _KINDS
    received: int  # bytes that a device receives in one call of the program
    pairs: tuple[tuple[int, int], ...]  # devices, by their place in the mesh, that exchange: of the first group, or all
    float32: bool


def collectives(text: str) -> dict[str, int]:
    """Bytes by kind that a device receives in one call of a compiled program, given its HLO."""
    total = dict.fromkeys((*_KINDS, IN_FLOAT32), 0)
    for one in found_in(text):
        total[one.kind] += one.received
        if one.kind == "all-gather" and one.float32:
            total[IN_FLOAT32] += one.received
    return {kind: value for kind, value in total.items() if value}


def by_axes(text: str, mesh: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    """Bytes that a device receives in one call, by the axes of the mesh along which they travel.

    mesh: axis -> devices, in the order in which devices are numbered (the last axis varies fastest).
    """
    total: dict[tuple[str, ...], int] = {}
    for one in found_in(text):
        axes = axes_of(one.pairs, mesh)
        total[axes] = total.get(axes, 0) + one.received
    return {axes: value for axes, value in sorted(total.items()) if value}


def axes_of(pairs: tuple[tuple[int, int], ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Of the mesh, along which the two devices of a pair differ, in any of the pairs."""
    if not pairs:
        return ()
    ends = np.array(pairs)
    where = [np.stack(np.unravel_index(ends[:, side], tuple(mesh.values()))) for side in (0, 1)]
    differs = (where[0] != where[1]).any(axis=1)
    return tuple(axis for axis, differ in zip(mesh, differs) if differ)


def found_in(text: str) -> Iterator[Collective]:
    """Every collective of a program, with the bytes of all the times that it runs."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if begins := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = begins[2]
            computations[name] = []
            entry = name if begins[1] else entry
        elif name and line.startswith("  "):
            computations[name].append(line)

    found_once: dict[tuple[object, ...], tuple[int, Collective]] = {}  # of one channel: how often, and it

    def count(name: str, times: int, fused: bool = False) -> Iterator[Collective]:
        for line in computations.get(name, ()):
            found = re.search(r"= (.*?) ([\w\-]+)\(", line)
            if not found:
                continue
            kind = found[2].removesuffix("-start")
            if kind in _KINDS:
                scattered = name.startswith("all-reduce-scatter")  # the sum, of which each device keeps its part
                kind = "reduce-scatter" if scattered else kind
                pairs = pairs_of(line)
                operands = line[found.end() :].split(")", 1)[0].count("%")
                size = size_of(found[1], operands)
                one = Collective(kind, times * received(kind, scattered, size, line), pairs, "f32[" in found[1])
                channel = re.search(r"channel_id=(\d+)", line)
                if channel is None or not fused:  # outside of fusions different ones may share a channel
                    yield one
                else:  # it counts where it begins; where it goes on may be in a loop of its own
                    key = (channel[1], kind, pairs, one.received // times)
                    if key not in found_once or times < found_once[key][0]:
                        found_once[key] = (times, one)
            for called in re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", line):
                inside = fused or kind == "fusion"
                yield from count(called, times * trips(line) if kind == "while" else times, inside)
            for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
                for called in branches.split(","):
                    yield from count(called.strip().lstrip("%"), times, fused)

    def trips(line: str) -> int:
        """Of a loop: what its condition compares the counter with, over the counter's steps."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
            return int(known[1])
        named = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
        assert named, line
        condition, body = computations[named[1]], computations[named[2]]
        ends = [int(x) for part in condition for x in re.findall(r" constant\((\d+)\)", part)]
        return -(-max(ends, default=1) // _step(condition, body))

    yield from count(entry, 1)
    yield from (one for _, one in found_once.values())


def _step(condition: list[str], body: list[str]) -> int:
    """What the body adds to the counter that the condition compares; 1 where that is no constant."""
    place = next(
        (found[1] for line in condition if (found := re.search(r"get-tuple-element.*index=(\d+)", line))), None
    )
    results = next((found[1] for line in body if (found := re.search(r"ROOT .*[ )]tuple\((.*?)\)", line))), "")
    names = re.findall(r"%([\w.\-]+)", results)
    if place is None or int(place) >= len(names):
        return 1
    made = {found[1]: line for line in body if (found := re.search(r"%([\w.\-]+) = ", line))}
    counted = re.search(r" add\(%([\w.\-]+), %([\w.\-]+)\)", made.get(names[int(place)], ""))
    added = [re.search(r" constant\((\d+)\)", made.get(name, "")) for name in (counted.groups() if counted else ())]
    return max([int(number[1]) for number in added if number], default=1)


def size_of(result: str, operands: int) -> int:
    """Bytes of the arrays that one operation gives. Before those of one that ends in a line of its own (-start) may
    stand its operands."""
    found = [found.groups() for found in re.finditer(rf"({'|'.join(_BYTES)})\[([\d,]*)\]", result)]
    sizes = [math.prod(map(int, filter(None, dims.split(",")))) * _BYTES[of] for of, dims in found]
    return sum(sizes[operands : 2 * operands] if len(sizes) >= 2 * operands else sizes)


def received(kind: str, scattered: bool, size: int, line: str) -> int:
    """Bytes, by the usual rings: of the parts of n devices a device has its own already."""
    if kind == "collective-permute":
        return size
    group = len(group_of(line) or (0, 0))
    others = group - 1
    if kind == "all-reduce":
        return 2 * size * others // group
    return size * others if kind == "reduce-scatter" and not scattered else size * others // group


def pairs_of(line: str) -> tuple[tuple[int, int], ...]:
    """(device, device) of a collective: those of a permute, and each of a group with the group's first."""
    if found := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        ends = [int(number) for number in re.findall(r"\d+", found[1])]
        return tuple(zip(ends[::2], ends[1::2]))
    group = group_of(line)
    return tuple((group[0], other) for other in group[1:])


def group_of(line: str) -> tuple[int, ...]:
    """The first of the groups of devices among which a collective goes; the ways in which HLO writes them."""
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        order = np.arange(int(found[1]) * int(found[2])).reshape([int(size) for size in found[3].split(",")])
        if found[4]:
            order = order.transpose([int(axis) for axis in found[4].split(",")])
        return tuple(int(device) for device in order.reshape(int(found[1]), int(found[2]))[0])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(int(device) for device in found[1].split(","))
    ids = r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))?"
    if found := re.search(rf"replica_groups=mesh\[([^\]]*)\]{ids} ?\{{([^}}]*)\}}", line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        own = re.findall(r"'(\w+)'", found[4])
        places = np.arange(math.prod(sizes.values()))
        if found[2]:
            grid = places.reshape([int(size) for size in found[2].split(",")])
            places = grid.transpose([int(axis) for axis in found[3].split(",")])
        places = places.reshape(tuple(sizes.values()))
        names = list(sizes)
        others = tuple(slice(None) if axis in own else 0 for axis in names)
        return tuple(int(device) for device in places[others].reshape(-1))
    assert "replica_groups=" not in line.replace("replica_groups={}", ""), line
    return ()

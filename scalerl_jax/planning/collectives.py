"""Bytes that a device receives by the collectives of a compiled program, read from its HLO, by kind and mesh axis.

Each collective counts as often as the loops around it run. Its axes are those along which the devices of a group
differ. Products that the compiler splits into steps, so that one part of a weight is sent while the previous one is
used, count as permutes. A collective that overlaps other work appears in several fusions under one channel, and counts
once.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from scalerl_jax.planning.hlo import Instruction, Program

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str  # of _KINDS
    received: int  # bytes that a device receives in one call of the program
    pairs: tuple[tuple[int, int], ...]  # devices that exchange, by position in the mesh: of the first group, or all


def axes_of(pairs: tuple[tuple[int, int], ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the two devices of any of the pairs differ."""
    if not pairs:
        return ()
    ends = np.array(pairs)
    where = [np.stack(np.unravel_index(ends[:, side], tuple(mesh.values()))) for side in (0, 1)]
    differs = (where[0] != where[1]).any(axis=1)
    return tuple(axis for axis, differ in zip(mesh, differs) if differ)


def found_in(program: Program) -> Iterator[Collective]:
    """Every collective of a program, with the bytes of all its runs."""
    found_once: dict[tuple[object, ...], tuple[float, Collective]] = {}  # by channel: its runs, and the collective

    for name, one, times in program.walk():
        yield from of_instruction(name, one, times)
        for inner, part in program.inside(one) if one.op not in ("while", "call", "conditional") else ():
            # Count it where it starts; its continuation may be in another loop.
            for found in of_instruction(inner, part, times):
                channel = re.search(r"channel_id=(\d+)", part.line)
                if channel is None:
                    yield found
                    continue
                key = (channel[1], found.kind, found.pairs, found.received // times)
                if key not in found_once or times < found_once[key][0]:
                    found_once[key] = (times, found)
    yield from (found for _, found in found_once.values())


def of_instruction(computation: str, one: Instruction, times: float) -> list[Collective]:
    """The collective of an instruction, if it is one; times: how often it runs."""
    kind = one.op.removesuffix("-start")
    if kind not in _KINDS:
        return []
    scattered = computation.startswith("all-reduce-scatter")  # the sum, of which each device keeps its part
    kind = "reduce-scatter" if scattered else kind
    # In an asynchronous one (-start) the operands may precede the results.
    count = len(one.operands)
    results = one.arrays[count : 2 * count] if len(one.arrays) >= 2 * count else one.arrays
    size = sum(array.size for array in results)
    return [Collective(kind, int(times * received(kind, scattered, size, one.line)), pairs_of(one.line))]


def received(kind: str, scattered: bool, size: int, line: str) -> int:
    """Bytes that a device receives in a ring algorithm, in which it already has its own part."""
    if kind == "collective-permute":
        return size
    group = len(group_of(line) or (0, 0))
    others = group - 1
    if kind == "all-reduce":
        return 2 * size * others // group
    return size * others if kind == "reduce-scatter" and not scattered else size * others // group


def pairs_of(line: str) -> tuple[tuple[int, int], ...]:
    """Pairs (device, device) of a collective: those of a permute, or the group's first device with each other one."""
    if found := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        ends = [int(number) for number in re.findall(r"\d+", found[1])]
        return tuple(zip(ends[::2], ends[1::2]))
    group = group_of(line)
    return tuple((group[0], other) for other in group[1:])


def group_of(line: str) -> tuple[int, ...]:
    """The first group of devices of a collective, in any notation of HLO."""
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

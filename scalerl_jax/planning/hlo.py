"""Parser of a compiled program's optimised text: computations, their instructions, and how often each runs.

The text is that of `compiled.as_text()`, for GPUs, TPUs and CPUs. A fusion is one instruction here; its contents are
in another computation, which `Program.inside` returns.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BYTES = {
    "pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2,
    "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "c64": 8,
}  # fmt: skip
_ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\](\{{[^}}]*\}})?")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: str
    dims: tuple[int, ...]
    on_chip: bool  # in a TPU's own vector or scalar memory

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * BYTES[self.dtype]

    @property
    def moved(self) -> int:
        """Bytes of the device's memory that reading or writing it moves."""
        return 0 if self.on_chip else self.size


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    op: str
    result: str  # its shape, as written
    operands: tuple[str, ...]
    line: str  # after the opening parenthesis of the operands

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result: one, or those of a tuple."""
        return tuple(
            Array(dtype, tuple(map(int, filter(None, dims.split(",")))), bool(re.search(r"S\([1-9]", layout or "")))
            for dtype, dims, layout in _ARRAY.findall(self.result)
        )

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs, in this order; for a loop its body."""
        found = re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", self.line)
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", self.line):
            found += [branch.strip().lstrip("%") for branch in branches.split(",")]
        found += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.line)
        return tuple(found)

    @property
    def op_name(self) -> str:
        """Its place in the source, as JAX names it."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else ""

    def sizes(self, key: str) -> tuple[int, ...]:
        """The numbers of `key={1,2}` or `key=1x2`; empty without this key."""
        found = re.search(rf"\b{key}=\{{?([\dx,]*)", self.line)
        return tuple(map(int, re.findall(r"\d+", found[1]))) if found else ()


class Program:
    """computations: name -> its instructions, in the order in which they run."""

    def __init__(self, text: str, *, rounds: float = 1.0) -> None:
        """rounds: assumed trip count of loops whose count is only known at run time."""
        self._rounds = rounds
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if begins := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                name = begins[2]
                self.computations[name] = []
                self.entry = name if begins[1] else self.entry
            elif name and (found := _INSTRUCTION.match(line)):
                operands = tuple(re.findall(r"%([\w.\-]+)", found[4].split(")", 1)[0]))
                self.computations[name].append(Instruction(found[1], found[3], found[2], operands, found[4]))
        self._by_name = {name: {one.name: one for one in made} for name, made in self.computations.items()}

    def named(self, computation: str, name: str) -> Instruction | None:
        return self._by_name.get(computation, {}).get(name)

    def walk(self) -> Iterator[tuple[str, Instruction, float]]:
        """(computation, instruction, how often it runs) of all instructions; a fusion counts as one. Includes all
        branches of a conditional."""
        yield from self._walk(self.entry, 1)

    def _walk(self, computation: str, times: float) -> Iterator[tuple[str, Instruction, float]]:
        for one in self.computations.get(computation, ()):
            yield computation, one, times
            if one.op in ("while", "call", "conditional"):
                for called in one.called:
                    yield from self._walk(called, times * self.trips(one))

    def inside(self, one: Instruction) -> Iterator[tuple[str, Instruction]]:
        """(computation, instruction) of everything that a fusion, or an asynchronous start, computes."""
        for called in one.called:
            for part in self.computations.get(called, ()):
                yield called, part
                yield from self.inside(part)

    def trips(self, loop: Instruction) -> float:
        """How often the body of a loop runs: the bound that its condition compares the counter with, divided by the
        counter's step; 1 for other instructions."""
        if loop.op != "while":
            return 1
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
            return int(known[1])
        named = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", loop.line)
        assert named, loop
        ends = [number for one in self.computations[named[1]] if (number := _constant(one)) is not None]
        return -(-max(ends) // self._step(named[1], named[2])) if ends else self._rounds

    def _step(self, condition: str, body: str) -> int:
        """The constant that the body adds to the counter that the condition compares; 1 if it is not a constant."""
        counter = next((one for one in self.computations[condition] if one.op == "get-tuple-element"), None)
        results = self.computations[body][-1]
        place = counter.sizes("index")[0] if counter else len(results.operands)
        if place >= len(results.operands):
            return 1
        counted = self.named(body, results.operands[place])
        if counted is None or counted.op != "add":
            return 1
        added = [made for name in counted.operands if (made := self.named(body, name))]
        return max([number for one in added if (number := _constant(one)) is not None], default=1)


def _constant(one: Instruction) -> int | None:
    """The value of an integer constant, else None."""
    found = re.match(r"(\d+)\)", one.line) if one.op == "constant" else None
    return int(found[1]) if found else None

"""The least seconds of a compiled program on a described chip, from its optimised text, and where they are spent.

    an instruction   max(FLOPs / the chip's rate, bytes / the memory's rate), as often as its loops run
    a program        its instructions one after another, as scheduled; a collective overlaps the instructions between
                     its start and its end, and the rest of it is waited for

FLOPs are those of the products and of attention: 2 for each pair of elements, in bfloat16 at the chip's full rate, in
float32 at `float32_flops`. Bytes are those that each kernel reads and writes in the device's memory, counted once: for
a slice the slice, for an update in place the update, for data that a TPU keeps on the chip none. The text of an
attention kernel does not show what it skips: `attended` gives the keys that a query is compared with on average.

Left out: launches, latencies, the cost of exponentials and reductions, tiles that are not full, and caches, which can
make a program faster than this bound if a kernel finds the previous kernel's output there. Otherwise no real program
reaches the bound, since a chip does not reach its maker's figures.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from launch.machines import Machine
from scalerl_jax.planning import roofline
from scalerl_jax.planning.collectives import of_instruction
from scalerl_jax.planning.hlo import Array, Instruction, Program

_NOTHING = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "while", "call", "conditional", "add-dependency", "domain", "iota",
)  # fmt: skip
_SCRATCH = ("s8", "u8")  # result dtypes that are a library kernel's scratch memory
_FLOATS = ("bf16", "f16", "f32")
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME = ("bitcast", "reshape", "transpose", "copy", "convert", "reduce-precision")
# Attention kernel, as named in its line -> its FLOPs in units of the forward pass, which has two products.
_ATTENTION = {
    r"fmha\w*Backward": 2.5, r"fmha": 1.0, r"splash_\w*dkv\w*fused|splash_\w*dqkv": 2.5, r"splash_\w*dkv": 2.0,
    r"splash_\w*dq": 1.5, r"splash_\w*fwd": 1.0,
}  # fmt: skip
_PALLAS = 'custom_call_target="tpu_custom_call"'  # a TPU's kernel
_NOT_IN_SCOPES = re.compile(
    r"while|body|cond|closed_call|checkpoint|rematted_computation|branch_\d+_fun|shard_map|remat2|eval_jaxpr|\w+\(.*|.*\)"
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction in one call of the program."""

    name: str
    scope: str  # the pass (forward, again or backward) of a gradient, and the place in the source
    calls: float
    flops: float
    products: float  # seconds of these FLOPs
    moved: float  # bytes
    seconds: float  # for a collective: those waited for
    binds: str  # the limiting part, of roofline.PARTS

    def __add__(self, other: "Kernel") -> "Kernel":
        longer = max(self, other, key=lambda one: one.seconds)
        return Kernel(
            longer.name, longer.scope, max(self.calls, other.calls), self.flops + other.flops,
            self.products + other.products, self.moved + other.moved, self.seconds + other.seconds, longer.binds,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ProgramRoofline:
    kernels: tuple[Kernel, ...]

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.kernels)

    @property
    def flops(self) -> float:
        return sum(one.flops for one in self.kernels)

    @property
    def products(self) -> float:
        """Seconds of the products alone."""
        return sum(one.products for one in self.kernels)

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return sum(one.moved for one in self.kernels)

    @property
    def waited(self) -> float:
        """Seconds waited for collectives."""
        return self.bound_by[roofline.LINKS] + self.bound_by[roofline.NETWORK]

    @property
    def bound_by(self) -> dict[str, float]:
        """Seconds limited by each of roofline.PARTS."""
        return {part: sum(one.seconds for one in self.kernels if one.binds == part) for part in roofline.PARTS}

    def places(self, most: int = 10) -> list[Kernel]:
        """The most expensive source scopes."""
        found: dict[str, Kernel] = {}
        for one in self.kernels:
            found[one.scope] = found[one.scope] + one if one.scope in found else one
        return sorted(found.values(), key=lambda one: -one.seconds)[:most]


def of(program: Program, machine: Machine, *, attended: float = 0.0) -> ProgramRoofline:
    """The roofline of a program on one device of the machine. attended: keys that a query is compared with in
    attention, on average."""
    reader = _ProgramReader(program, machine, attended)
    reader.run(program.entry, 1)
    return ProgramRoofline(tuple(reader.kernels))


class _ProgramReader:
    """Walks a program as it is scheduled."""

    def __init__(self, program: Program, machine: Machine, attended: float) -> None:
        self.program, self.machine, self.attended = program, machine, attended
        self.kernels: list[Kernel] = []
        self._channels: set[str] = set()  # channels of fused collectives already counted

    def run(self, computation: str, times: float) -> float:
        """Seconds of one run of a computation; its kernels are recorded `times` times."""
        now = links = 0.0  # time when the previous work is done; when the links are free
        ends, part = dict[str, tuple[float, str]](), roofline.LINKS  # of collectives; the last one's limit
        for one in self.program.computations.get(computation, ()):
            if one.op in ("while", "call"):
                trips = self.program.trips(one)
                now += sum(trips * self.run(called, times * trips) for called in one.called)
                continue
            if one.op == "conditional":  # assume the longest branch
                kept, longest = self.kernels, (0.0, list[Kernel]())
                for branch in one.called:
                    self.kernels = []
                    longest = max(longest, (self.run(branch, times), self.kernels), key=lambda found: found[0])
                self.kernels = kept + longest[1]
                now += longest[0]
                continue
            begun = one.operands[0] if one.op.endswith("-done") and one.operands else ""
            if begun in ends:
                end, limit = ends[begun]
                self._wait(self.program.named(computation, begun) or one, limit, times, end - now)
                now = max(now, end)
                continue
            for (sent, part), inner in self._sent(computation, one):
                links = max(now, links) + sent
                if inner or ('"is_sync":true' not in one.line and one.op.endswith("-start")):
                    ends[one.name] = links, part
                else:
                    self._wait(one, part, times, links - now)
                    now = links
            now += self._kernel(computation, one, times)
        if links > now:  # a collective that continues in fusions has no named end
            self._wait(self.program.computations[computation][-1], part, times, links - now)
        return max(now, links)

    def _sent(self, computation: str, one: Instruction) -> Iterable[tuple[tuple[float, str], bool]]:
        """((seconds, LINKS or NETWORK), whether inside a fusion) of the collectives of an instruction."""
        for found in of_instruction(computation, one, 1):
            yield roofline.seconds_of(found, self.machine), False
        for inner, part in self.program.inside(one):
            channel = re.search(r"channel_id=(\d+)", part.line)
            for found in of_instruction(inner, part, 1):
                if channel is None or channel[1] not in self._channels:
                    self._channels |= {channel[1]} if channel else set()
                    yield roofline.seconds_of(found, self.machine), True

    def _wait(self, one: Instruction, part: str, times: float, seconds: float) -> None:
        """Records seconds waited for a collective that this instruction started. part: LINKS or NETWORK."""
        if seconds > 0:
            scope = f"{scope_of(one)}, waited for"
            self.kernels.append(Kernel(one.name, scope, times, 0.0, 0.0, 0.0, times * seconds, part))

    def _kernel(self, computation: str, one: Instruction, times: float) -> float:
        chip = self.machine.chip
        flops, float32 = self._flops(computation, one)
        moved = self._moved(computation, one)
        products = flops / chip.flops + float32 / chip.float32_flops
        memory = moved / chip.memory_rate
        seconds = max(products, memory)
        if seconds > 0:
            binds = roofline.PRODUCTS if products > memory else roofline.MEMORY
            numbers = (times * (flops + float32), times * products, times * moved, times * seconds)
            self.kernels.append(Kernel(one.name, scope_of(one), times, *numbers, binds))
        return seconds

    # ---- FLOPs

    def _flops(self, computation: str, one: Instruction) -> tuple[float, float]:
        """FLOPs: (at the chip's full rate, in float32)."""
        full = float32 = 0.0
        for where, part in ((computation, one), *(self.program.inside(one) if one.op not in _NOTHING else ())):
            if part.op == "dot":
                found = self._dot(where, part)
            elif part.op == "convolution":
                found = self._convolution(where, part)
            elif part.op == "custom-call":
                found = self._call(where, part)
            else:
                continue
            if any(array.dtype == "f32" for array in self._operands(where, part)[:2]):
                float32 += found
            else:
                full += found
        return full, float32

    def _operands(self, computation: str, one: Instruction) -> list[Array]:
        """The first array of each operand."""
        found = (self.program.named(computation, name) for name in one.operands)
        return [made.arrays[0] for made in found if made is not None and made.arrays]

    def _dot(self, computation: str, one: Instruction) -> float:
        left = self._operands(computation, one)[0]
        return 2.0 * one.arrays[0].elements * math.prod(left.dims[axis] for axis in one.sizes("lhs_contracting_dims"))

    def _call(self, computation: str, one: Instruction) -> float:
        if "cublas" in one.line:
            numbers = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', one.line)
            left = self._operands(computation, one)[0]
            axes = map(int, re.findall(r"\d+", numbers[1] if numbers else ""))
            return 2.0 * one.arrays[0].elements * math.prod(left.dims[axis] for axis in axes)
        # On a TPU: counts all rows, even those of no expert.
        if one.name.startswith("ragged-dot") and len(one.arrays) == 1:
            rows = self._operands(computation, one)[-2]
            return 2.0 * one.arrays[0].elements * rows.dims[-1]
        if "splash" in one.line and _PALLAS not in one.line:  # an array that a loop over rows sets aside
            return 0.0
        for kernel, times in _ATTENTION.items():
            if re.search(kernel, one.line) or re.match(kernel, one.name):
                # The queries come first, on a TPU after what says which blocks are skipped.
                arrays = self._operands(computation, one)
                queries = next(array for array in arrays if len(array.dims) > 2 and array.dtype in _FLOATS)
                return times * 4.0 * queries.elements * self.attended
        return 0.0

    def _convolution(self, computation: str, one: Instruction) -> float:
        """FLOPs of a convolution, a TPU's form of a product. Pairs with padding do not count."""
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.line)
        left, right = self._operands(computation, one)[:2]
        assert labels, one
        window = re.search(r"window=\{([^}]*)\}", one.line)
        given = dict(re.findall(r"(\w+)=([\w\-]+)", window[1])) if window else {}
        places = sorted(label for label in labels[1] if label.isdigit())

        def numbers(key: str, otherwise: int) -> list[int]:
            return [int(number) for number in given[key].split("x")] if key in given else [otherwise] * len(places)

        pads = [list(map(int, pad.split("_"))) for pad in given["pad"].split("x")] if "pad" in given else []
        pairs = 1.0
        for i, place in enumerate(places):
            size, out = left.dims[labels[1].index(place)], one.arrays[0].dims[labels[3].index(place)]
            low, stride = (pads[i][0] if pads else 0), numbers("stride", 1)[i]
            spread, apart = numbers("lhs_dilate", 1)[i], numbers("rhs_dilate", 1)[i]
            at = [o * stride + k * apart - low for o in range(out) for k in range(numbers("size", 1)[i])]
            pairs *= sum(0 <= x <= (size - 1) * spread and x % spread == 0 for x in at)
        others = math.prod(n for n, label in zip(one.arrays[0].dims, labels[3]) if not label.isdigit())
        return 2.0 * others * pairs * right.dims[labels[2].index("i")]

    # ---- bytes

    def _moved(self, computation: str, one: Instruction) -> float:
        if one.op in _NOTHING or one.op.endswith(("-done", "-update")) or of_instruction(computation, one, 1):
            return 0.0
        if one.op == "copy-start":  # the copy, what is copied
            return float(sum(array.moved for array in one.arrays[:2]))
        if one.op.endswith("-start") and one.op.removesuffix("-start") in _SLICES:
            # Its arrays are the operands, the slice, and data for its end.
            part = one.arrays[len(one.operands)]
            return float(part.size + part.moved)
        begun = one.op.endswith("-start")  # its result lists the operands, the results, and data for its end
        if not one.called or (one.op != "fusion" and not begun):
            return self._alone(computation, one)
        (inner,) = one.called
        read = sum(self._read(inner, place, made) for place, made in self._made(computation, one))
        results = one.arrays[len(one.operands) : -1] if begun else one.arrays
        return read + self._written(inner, self.program.computations[inner][-1], results)

    def _made(self, computation: str, one: Instruction) -> list[tuple[int, Array]]:
        found = [(i, self.program.named(computation, name)) for i, name in enumerate(one.operands)]
        return [(i, made.arrays[0]) for i, made in found if made is not None and len(made.arrays) == 1]

    def _alone(self, computation: str, one: Instruction) -> float:
        """Bytes of an instruction that is not a fusion."""
        if '"AllocateBuffer"' in one.line:
            return 0.0
        operands = self._operands(computation, one)
        ignored = _SCRATCH if one.op == "custom-call" else ()
        written = sum(array.moved for array in one.arrays if array.dtype not in ignored)
        if one.op in _SLICES:
            return 2.0 * written
        if one.op == "dynamic-update-slice":
            return 2.0 * operands[1].moved
        if one.op == "scatter":
            return 2.0 * operands[-1].moved + sum(array.moved for array in operands[1:-1])
        return float(written + sum(array.moved for array in operands))

    def _read(self, inner: str, place: int, array: Array) -> float:
        """Bytes of a fusion's operand that it reads."""
        mark = f"{place})"
        made = next(
            (p for p in self.program.computations[inner] if p.op == "parameter" and p.line.startswith(mark)), None
        )
        return 0.0 if made is None or array.on_chip else min(array.moved, self._used(inner, made.name, array.moved))

    def _used(self, inner: str, name: str, whole: float) -> float:
        total = 0.0
        for user in self.program.computations[inner]:
            if name not in user.operands:
                continue
            if user.op in _SLICES and user.operands[0] == name:
                total += sum(array.size for array in user.arrays)
            elif user.op in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
                continue  # in place
            elif user.op in _SAME:
                total += self._used(inner, user.name, whole)
            elif user.op == "fusion":
                for place, operand in enumerate(user.operands):
                    if operand == name:
                        total += self._read(user.called[0], place, Array("u8", (int(whole),), False))
                        if self._passes_on(user.called[0], place):
                            total += self._used(inner, user.name, whole)
            else:
                return whole
        return total

    def _passes_on(self, inner: str, place: int) -> bool:
        """Whether a fusion's result is this operand, at most reshaped or converted."""
        root: Instruction | None = self.program.computations[inner][-1]
        while root is not None and root.op in _SAME:
            root = self.program.named(inner, root.operands[0])
        return root is not None and root.op == "parameter" and root.line.startswith(f"{place})")

    def _written(self, inner: str, root: Instruction, arrays: tuple[Array, ...]) -> float:
        """Bytes that a fusion writes; for a result updated in place only the update."""
        if root.op == "tuple":
            parts = [self.program.named(inner, name) for name in root.operands]
            return sum(self._written(inner, part, (array,)) for part, array in zip(parts, arrays) if part)
        on_chip = all(array.on_chip for array in arrays)
        while root.op in _SAME and (before := self.program.named(inner, root.operands[0])):
            root = before
        if root.op == "fusion":
            called = root.called[0]
            return self._written(called, self.program.computations[called][-1], arrays)
        if root.op in ("dynamic-update-slice", "scatter") and not on_chip:
            update = self.program.named(inner, root.operands[1 if root.op == "dynamic-update-slice" else -1])
            if update is not None:
                return float(sum(array.size for array in update.arrays)) * (2 if root.op == "scatter" else 1)
        return float(sum(array.moved for array in arrays))


def scope_of(one: Instruction) -> str:
    """Its origin: the pass of a gradient, the scopes and the operation; the instruction's op without these."""
    name = one.op_name
    # A scope around a differentiated function appears as jvp(scope).
    named = (re.sub(r"^(?:transpose\()?jvp\((\w+)\)+$", r"\1", part) for part in name.split("/"))
    parts = [part for part in named if part and not _NOT_IN_SCOPES.fullmatch(part)]
    phase = "again: " if "rematted_computation" in name else "backward: " if "transpose(" in name else "forward: "
    return (phase if "jvp(" in name else "") + (" ".join(parts) or one.op.removesuffix("-start"))


def summed(programs: Mapping[str, tuple[ProgramRoofline, int]]) -> ProgramRoofline:
    """The roofline of a step: each program as often as it runs in it; scopes start with the program's name."""
    return ProgramRoofline(
        tuple(
            dataclasses.replace(
                one, scope=f"{name}, {one.scope}", calls=n * one.calls, flops=n * one.flops, products=n * one.products,
                moved=n * one.moved, seconds=n * one.seconds,
            )
            for name, (program, n) in programs.items()
            for one in program.kernels
        )
    )  # fmt: skip

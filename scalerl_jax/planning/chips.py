"""Accelerators and how they are joined: what a plan is measured against.

    v5p:4x4x4      TPUs: chips along each dimension of the torus, as their maker names a slice
    h200:2x8       GPUs: nodes, and those of each; h200:8 is one node

Figures are the makers' own, one direction at a time. A TPU's memory is what its compiler lets a program have; a GPU's
what JAX may take of it with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. Rates are of dense bfloat16 products.

Left out on purpose: switched-off links, twisted tori, and traffic of other jobs.
"""

import dataclasses
import math
import re

GIB = 2**30
_GPU_SHARE = 0.95  # of a GPU's memory: the CUDA context and the libraries' work space take the rest


@dataclasses.dataclass(frozen=True)
class Chip:
    name: str
    memory: int  # bytes that a program can have
    flops: float  # a second
    memory_rate: float  # bytes a second
    link_rate: float  # bytes a second, one direction: of one link of a torus; of a GPU's all links to its node's switch
    network_rate: float  # bytes a second, one direction: a chip's share of its host's network
    dimensions: int  # of the torus; 0: a switch joins the chips of a node
    wraps_at: int = 0  # a dimension of this many chips, or a multiple, is a ring; others are lines

    @property
    def is_tpu(self) -> bool:
        return self.dimensions > 0


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", int(15.75 * GIB), 197e12, 819e9, 50e9, 3.125e9, 2, wraps_at=16),
        Chip("v5p", int(95.74 * GIB), 459e12, 2765e9, 100e9, 6.25e9, 3, wraps_at=4),
        Chip("v6e", int(31.25 * GIB), 918e12, 1640e9, 100e9, 12.5e9, 2, wraps_at=16),
        Chip("h100", int(_GPU_SHARE * 80e9), 989e12, 3350e9, 450e9, 50e9, 0),
        Chip("h200", int(_GPU_SHARE * 141e9), 989e12, 4800e9, 450e9, 50e9, 0),
        Chip("b200", int(_GPU_SHARE * 180e9), 2250e12, 7700e9, 900e9, 50e9, 0),
    )
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Chips that one trainer runs on."""

    chip: Chip
    sizes: tuple[int, ...]  # of a TPU slice by dimension; of GPUs (of a node,)
    parts: int = 1  # slices, or nodes: between them is the network

    @property
    def devices(self) -> int:
        return math.prod(self.sizes) * self.parts

    @property
    def topology(self) -> str:
        """Of one slice, as the compiler names it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.sizes))}"

    def __str__(self) -> str:
        if self.chip.is_tpu:
            return self.topology + (f", {self.parts} slices" if self.parts > 1 else "")
        return f"{self.chip.name}:{self.parts}x{self.sizes[0]}" if self.parts > 1 else self.topology


def parse(topology: str, slices: int = 1) -> Machine:
    """Of --topology and --slices. Raises ValueError (one line) where there is no such machine."""
    name, colon, shape = topology.partition(":")
    if name not in CHIPS:
        raise ValueError(f"--topology={topology}: {name!r} is not one of {', '.join(CHIPS)}")
    chip = CHIPS[name]
    example = f"{name}:{'x'.join(['4'] * chip.dimensions)}" if chip.is_tpu else f"{name}:8 or {name}:2x8"
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ValueError(f"--topology={topology}: chips are missing, as in {example}")
    sizes = tuple(map(int, shape.split("x")))
    if chip.is_tpu:
        if len(sizes) != chip.dimensions:
            raise ValueError(f"--topology={topology}: a {name} slice has {chip.dimensions} dimensions, as in {example}")
        return Machine(chip, sizes, slices)
    if len(sizes) > 2:
        raise ValueError(f"--topology={topology}: nodes and the GPUs of each, as in {example}")
    if slices != 1:
        raise ValueError(f"--slices={slices}: is for TPUs; GPU nodes stand in --topology, as in {name}:{slices}x8")
    return Machine(chip, sizes[-1:], sizes[0] if len(sizes) == 2 else 1)

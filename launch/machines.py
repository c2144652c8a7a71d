"""Machines as written in a flag: v5p:4x4x4, h200:2x8, cpu:4.

    TPU : TOPOLOGY        a slice, as the cloud names it: chips along each dimension of the torus; they imply its hosts
    GPU : [NODESx]COUNT   COUNT GPUs on each of NODES nodes
    cpu : [NODES]         nodes without an accelerator

Labels are those that Google's clusters put on their nodes; nodes elsewhere, and GPUs of other names, are selected by
--trainer_nodes and --generator_nodes.

Figures are the makers', for one direction. A TPU's memory is what its compiler lets a program use; a GPU's is what JAX
may use with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. FLOP rates are of dense bfloat16 products.

Left out on purpose: switched-off links, twisted tori, and traffic of other jobs.
"""

import dataclasses
import math
import re

GIB = 2**30
_GPU_SHARE = 0.95  # of a GPU's memory; the CUDA context and the libraries' workspace use the rest


@dataclasses.dataclass(frozen=True)
class Chip:
    name: str
    label: str  # of nodes with this chip; empty: any node
    memory: int = 0  # bytes that a program can use; 0: this chip's figures are not known here
    flops: float = 0.0  # a second
    memory_rate: float = 0.0  # bytes a second
    float32_flops: float = 0.0  # a second; on a TPU by six passes in bfloat16
    # Bytes a second, one direction: of one link of a torus, or of all links of a GPU to its node's switch.
    link_rate: float = 0.0
    network_rate: float = 0.0  # bytes a second, one direction: a chip's share of its host's network
    dimensions: int = 0  # of the torus; 0: a switch connects the chips of a node
    wraps_at: int = 0  # a dimension whose size is a multiple of this is a ring; others are lines
    one_host: tuple[int, ...] = ()  # sizes of slices that are one host; other slices have 4 chips a host

    @property
    def is_tpu(self) -> bool:
        return self.dimensions > 0


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu-v5-lite-podslice", int(15.75 * GIB), 197e12, 819e9, 33e12, 50e9, 3.125e9, 2, 16, (1, 4, 8)),
        Chip("v5p", "tpu-v5p-slice", int(95.74 * GIB), 459e12, 2765e9, 76e12, 100e9, 6.25e9, 3, 4, (4,)),
        Chip("v6e", "tpu-v6e-slice", int(31.25 * GIB), 918e12, 1640e9, 153e12, 100e9, 12.5e9, 2, 16, (1, 4, 8)),
        Chip("a100", "nvidia-tesla-a100"),
        Chip("a100-80gb", "nvidia-a100-80gb", int(_GPU_SHARE * 80e9), 312e12, 2039e9, 19.5e12, 300e9, 25e9),
        Chip("l4", "nvidia-l4", int(_GPU_SHARE * 24e9), 121e12, 300e9, 30.3e12, 32e9, 3.125e9),
        Chip("l40s", "", int(_GPU_SHARE * 48e9), 362e12, 864e9, 91.6e12, 32e9, 25e9),
        Chip("h100", "nvidia-h100-80gb", int(_GPU_SHARE * 80e9), 989e12, 3350e9, 67e12, 450e9, 50e9),
        Chip("h200", "nvidia-h200-141gb", int(_GPU_SHARE * 141e9), 989e12, 4800e9, 67e12, 450e9, 50e9),
        Chip("b200", "nvidia-b200", int(_GPU_SHARE * 180e9), 2250e12, 7700e9, 80e12, 900e9, 50e9),
        Chip("gpu", ""),
        Chip("cpu", ""),  # none
    )
}
_CHIPS_OF_A_HOST = 4  # in a slice of several hosts
_MOST_GPUS = 16  # of one node


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine of one process, or all hosts of a multi-host process group."""

    chip: Chip
    sizes: tuple[int, ...]  # chips of a TPU slice by dimension; (GPUs of a node,); (0,): no accelerators
    parts: int  # slices or nodes, connected by the network
    text: str  # as the user wrote it

    @property
    def devices(self) -> int:
        """Number of devices of all hosts."""
        return math.prod(self.sizes) * self.parts

    @property
    def hosts(self) -> int:
        """Number of hosts of one slice, or of nodes."""
        if not self.chip.is_tpu:
            return self.parts
        chips = math.prod(self.sizes)
        return 1 if chips in self.chip.one_host else chips // _CHIPS_OF_A_HOST

    @property
    def devices_of_host(self) -> int:
        slices = self.parts if self.chip.is_tpu else 1
        return self.devices // (self.hosts * slices)

    @property
    def least(self) -> int:
        """The fewest devices that a host is given with: one, or all chips of a TPU's smallest slice."""
        return min(self.chip.one_host, default=1)

    @property
    def kind(self) -> str:
        return "tpu" if self.chip.is_tpu else "cpu" if self.chip.name == "cpu" else "gpu"

    @property
    def resource(self) -> str:
        """Name of the Kubernetes resource of its devices; "" for a CPU."""
        return {"tpu": "google.com/tpu", "gpu": "nvidia.com/gpu", "cpu": ""}[self.kind]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the nodes with this accelerator."""
        if not self.chip.label:
            return {}
        if not self.chip.is_tpu:
            return {"cloud.google.com/gke-accelerator": self.chip.label}
        topology = "x".join(map(str, self.sizes))
        return {"cloud.google.com/gke-tpu-accelerator": self.chip.label, "cloud.google.com/gke-tpu-topology": topology}

    @property
    def topology(self) -> str:
        """One slice as the TPU compiler names it, or one node."""
        return f"{self.chip.name}:{'x'.join(map(str, self.sizes))}"

    def __str__(self) -> str:
        return self.text + (f", {self.parts} slices" if self.kind == "tpu" and self.parts > 1 else "")


def parse(text: str, *, slices: int = 1) -> Machine:
    """Reads a flag's value. slices: number of TPU slices, connected by the data center's network.

    Raises ValueError, one line without the flag's name, where there is no such machine.
    """
    name, _, size = text.partition(":")
    if name not in CHIPS:
        raise ValueError(f"{name!r} is not one of {', '.join(CHIPS)}")
    chip = CHIPS[name]
    if name == "cpu":
        return Machine(chip, (0,), _number(size or "1", "hosts"), text)
    if not chip.is_tpu:
        nodes, several, count = size.rpartition("x")
        devices = _number(count if size else "1", "GPUs")
        if devices > _MOST_GPUS:
            raise ValueError(f"{devices} GPUs on one node: two nodes of 8 are written {name}:2x8")
        if slices != 1:
            raise ValueError(f"slices are TPUs'; {slices} nodes of 8 GPUs are written {name}:{slices}x8")
        return Machine(chip, (devices,), _number(nodes if several else "1", "nodes"), text)
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", size) or size.count("x") != chip.dimensions - 1:
        raise ValueError(f"a {name} slice is written like {name}:{'x'.join(['4'] * chip.dimensions)}")
    sizes = tuple(map(int, size.split("x")))
    chips = math.prod(sizes)
    if chips not in chip.one_host and (chips % _CHIPS_OF_A_HOST or chips < 2 * _CHIPS_OF_A_HOST):
        raise ValueError(f"{chips} chips are no whole number of hosts with {_CHIPS_OF_A_HOST}")
    return Machine(chip, sizes, slices, text)


def of_flag(flag: str, text: str, *, slices: int = 1) -> Machine:
    """As parse; the ValueError names the flag."""
    try:
        return parse(text, slices=slices)
    except ValueError as error:
        raise ValueError(f"--{flag}={text}: {error}") from None


def _number(text: str, what: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise ValueError(f"{text!r} is not a number of {what}")
    return int(text)

"""What a process runs on, as a flag says it: v5p:4x4x4, h200:2x8, cpu:4.

    v5e | v5p | v6e : TOPOLOGY    a TPU slice, as the cloud names it: 4x4, 2x2x4; its hosts follow from it
    GPU : [NODESx]COUNT           COUNT GPUs on each of NODES nodes, by the names in GPUS
    cpu : [NODES]                 nodes without an accelerator

The labels are those that Google's clusters put on their nodes; nodes elsewhere are chosen by labels of their own
(--trainer_nodes, --generator_nodes), and GPUs of other names by those alone.
"""

import dataclasses
import math
import re

GKE_TPU = {"v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}
GPUS = {
    "a100": "nvidia-tesla-a100",
    "a100-80gb": "nvidia-a100-80gb",
    "l4": "nvidia-l4",
    "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
    "gpu": "",  # any
}
_DIMENSIONS = {"v5e": 2, "v6e": 2, "v5p": 3}
_CHIPS_OF_A_HOST = 4  # in a slice of several hosts
_ONE_HOST = {"v5e": (1, 4, 8), "v6e": (1, 4, 8), "v5p": (4,)}  # chips of slices that are one host
_MOST_GPUS = 16  # of one node


@dataclasses.dataclass(frozen=True)
class Machine:
    """Of one process, or of the hosts of one."""

    kind: str  # "tpu" | "gpu" | "cpu"
    hosts: int
    devices: int  # of each host; 0: it has no accelerators
    resource: str  # by which Kubernetes hands them out
    labels: dict[str, str]  # of the nodes that have them
    said: str  # as the user wrote it


def parse(text: str) -> Machine:
    """Raises ValueError, one line without the flag's name, where there is no such machine."""
    name, _, size = text.partition(":")
    if name in GKE_TPU:
        return _tpu(text, name, size)
    if name in GPUS:
        return _gpu(text, name, size or "1")
    if name == "cpu":
        return Machine("cpu", _number(size or "1", "hosts"), 0, "", {}, text)
    raise ValueError(f"{name!r} is none of {', '.join([*GKE_TPU, *GPUS, 'cpu'])}")


def _tpu(text: str, name: str, size: str) -> Machine:
    dimensions = _DIMENSIONS[name]
    example = "x".join(["4"] * dimensions)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size) or size.count("x") != dimensions - 1:
        raise ValueError(f"a {name} slice is written like {name}:{example}")
    chips = math.prod(map(int, size.split("x")))
    if chips in _ONE_HOST[name]:
        hosts, devices = 1, chips
    else:
        hosts, devices = chips // _CHIPS_OF_A_HOST, _CHIPS_OF_A_HOST
        if chips % _CHIPS_OF_A_HOST or hosts < 2:
            raise ValueError(f"{chips} chips are no whole number of hosts with {_CHIPS_OF_A_HOST}")
    labels = {"cloud.google.com/gke-tpu-accelerator": GKE_TPU[name], "cloud.google.com/gke-tpu-topology": size}
    return Machine("tpu", hosts, devices, "google.com/tpu", labels, text)


def _gpu(text: str, name: str, size: str) -> Machine:
    nodes, several, count = size.rpartition("x")
    hosts, devices = _number(nodes if several else "1", "nodes"), _number(count, "GPUs")
    if devices > _MOST_GPUS:
        raise ValueError(f"{devices} GPUs on one node: two nodes of 8 are written {name}:2x8")
    labels = {"cloud.google.com/gke-accelerator": GPUS[name]} if GPUS[name] else {}
    return Machine("gpu", hosts, devices, "nvidia.com/gpu", labels, text)


def _number(text: str, what: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise ValueError(f"{text!r} is not a number of {what}")
    return int(text)

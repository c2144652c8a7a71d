"""The trainer's own `accumulate` and `apply`, compiled for TPUs and GPUs that need not be present.

The compiler is the accelerator's (libtpu, or JAX's plug-in for CUDA; neither needs a device to compile); the mesh
consists of devices known only by their description. Memory besides the arguments, and communication between devices,
are read from the compiled programs. Nothing is run.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from launch.machines import Machine
from scalerl_jax.learner import memory_estimate
from scalerl_jax.learner.trainer import Trainer
from scalerl_jax.model.attention import cudnn
from scalerl_jax.planning.hlo import Program

INSTALL = "pip install 'scalerl-jax[plan]'"
INSTALL_GPUS = "make plan-packages-gpu"
# Otherwise libtpu queries the cloud's metadata server and locks the TPU against a second process, and the plug-in for
# CUDA requires a driver and uses this machine's GPUs.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "CUDA_VISIBLE_DEVICES": "-1",
}  # fmt: skip
# Patterns in the compiler's native output that show a loss of speed or memory without an error.
_COSTS = {
    "an array whole on every device, as the partitioner knows no other way": "Involuntary full rematerialization",
    "registers spilled to memory": r"\bspill",
    "memory above the limit, computed again by XLA": "can't reduce memory use below",
}
_CUDNN = 91000  # the cuDNN version assumed for described GPUs, as in their description
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMG])\) exceeds available HBM|Used ([\d.]+)([KMG]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that the compiler's decisions depend on, with which it compiles without such a GPU.

    The figures are those that a driver reports, from XLA's files (openxla/xla,
    xla/backends/gpu/target_config/specs); those of L4 and L40S are the maker's.
    """

    name: str  # the driver's name of it
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units of a core
    shared_memory: int  # bytes of a core
    memory: int  # bytes
    memory_rate: int  # bytes a second
    cache: int  # bytes, second level
    clock: float  # GHz
    extended: bool  # has the instructions of its generation alone (sm_90a, sm_100a)

    @property
    def text(self) -> str:
        """As XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        extension = "ACCELERATED_FEATURES" if self.extended else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block_optin: {self.shared_memory - 1024}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {self.memory_rate}
  l2_cache_size: {self.cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.name}"
"""


GPUS = {  # by the name of the chip in launch/machines.py
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167_936, 85_100_068_864, 2_039_040_000_000,
                     41_943_040, 1.41, False),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 102_400, 24_000_000_000, 300_000_000_000, 50_331_648, 2.04, False),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 128, 102_400, 48_000_000_000, 864_000_000_000, 100_663_296, 2.52, False),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233_472, 84_942_979_072, 3_352_320_000_000, 52_428_800,
                1.98, True),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", (9, 0), 132, 128, 233_472, 151_397_597_184, 4_800_000_000_000, 52_428_800,
                1.98, True),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 233_472, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965,
                True),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Update:
    """The compiler's results for one micro-batch and the optimizer's step, or what stands for them by formula."""

    temporaries: int  # bytes on a device that `accumulate` needs besides its arguments
    ending: int  # of `apply`, likewise
    live: int | None  # bytes of `accumulate` that are in use at once, arguments included; None: it did not compile
    programs: tuple[Program, Program] | None  # `accumulate` and `apply`; None: they did not compile
    attention: str  # its implementation
    seconds: float | None  # compile time; None: by formula
    warnings: dict[str, int]  # costs that the compiler reports, and how often

    @classmethod
    def by_formula(cls, temporaries: int, *, attention: str) -> "Update":
        return cls(temporaries, 0, None, None, attention, None, {})


def is_there(machine: Machine) -> bool:
    """Whether a compiler for this machine is installed."""
    packages = ("libtpu",) if machine.chip.is_tpu else ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(package) is not None for package in packages)


def check_compiler(machine: Machine) -> None:
    """Raises ValueError, one line with the install command, if the machine has TPUs and their compiler is missing."""
    if machine.chip.is_tpu and not is_there(machine):
        raise ValueError(f"--topology: compiling for TPUs needs libtpu, which is not installed: {INSTALL}")


def devices_of(machine: Machine) -> list[jax.Device]:
    """The machine's devices, by description. Raises ValueError where the compiler does not know such a slice."""
    check_compiler(machine)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with _native_messages_kept():
            if machine.chip.is_tpu:
                more: dict[str, Any] = {"num_slices": machine.parts} if machine.parts > 1 else {}
                if machine.devices == 1:  # libtpu assumes four chips a host
                    more["chips_per_host_bounds"] = (1, 1, 1)
                found = topologies.get_topology_desc(machine.topology, platform="tpu", **more)
            else:
                target = GPUS[machine.chip.name].text
                shape = f"1x{machine.parts}x{machine.devices_of_host}"
                found = topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape)
    except jax.errors.JaxRuntimeError as error:
        message = " ".join(str(error).split())
        raise ValueError(f"--topology={machine.topology}: {message}") from None
    return list(found.devices)


def cudnn_of(device: jax.Device) -> contextlib.AbstractContextManager[None]:
    """Makes JAX compile for the cuDNN version and the compute capability of this described device."""
    described = getattr(device, "compute_capability", "0.0")
    return cudnn.compiled_for(tuple(map(int, described.split("."))), version=_CUDNN)


def compile_update(trainer: Trainer, *, rounds: float = 1.0) -> Update:
    """Compiles an update: minutes, and a few GiB of this machine's memory, for a large model. rounds: as in Program."""
    start = time.perf_counter()
    try:
        with compiling(trainer.mesh.devices.flat[0]) as output:
            trainer.compile_update()
    except jax.errors.JaxRuntimeError as error:
        # For TPUs the message counts the arguments too: the gradients are as large as what is trained.
        params, device = trainer.abstract_state["params"], trainer.mesh.devices.flat[0]
        given = (params, params, trainer.abstract_frozen) if device.platform == "tpu" else ()
        temporaries = max(0, needed(error) - memory_estimate.bytes_on_one_device(given))
        return Update(temporaries, 0, None, None, trainer.attention_note, time.perf_counter() - start, {})
    needs, (accumulate, apply) = memory_estimate.needs_of(trainer), trainer.compile_update()
    return Update(
        temporaries=needs.temporaries,
        ending=needs.ending,
        live=accumulate.memory_analysis().peak_memory_in_bytes,
        programs=(Program(accumulate.as_text(), rounds=rounds), Program(apply.as_text())),
        attention=trainer.attention_note,
        seconds=time.perf_counter() - start,
        warnings={what: n for what, words in _COSTS.items() if (n := len(re.findall(words, output[0], re.IGNORECASE)))},
    )


def needed(error: jax.errors.JaxRuntimeError) -> int:
    """The bytes that the compiler needed when it ran out of memory. Raises the error if it is of another kind."""
    found = _OUT_OF_MEMORY.search(str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
        raise error
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * _UNITS[unit])


@contextlib.contextmanager
def compiling(device: jax.Device) -> Iterator[list[str]]:
    """Prepares compiling for a device that is not present; yields native output as _native_messages_kept does."""
    # Programs for absent devices cannot be loaded from a cache.
    jax.config.update("jax_enable_compilation_cache", False)
    with _native_messages_kept() as output, cudnn_of(device):
        yield output


@contextlib.contextmanager
def _native_messages_kept() -> Iterator[list[str]]:
    """Yields a list that at the end holds the native code's stderr output. It is printed only after an error other than
    the compiler's, since libtpu reports at length that this is no TPU."""
    sys.stderr.flush()
    own = os.dup(2)
    output = list[str]()
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield output
            kept.seek(0)
            output.append(kept.read().decode(errors="replace"))
        except jax.errors.JaxRuntimeError:
            raise
        except BaseException:
            kept.seek(0)
            os.write(own, kept.read())
            raise
        finally:
            os.dup2(own, 2)
            os.close(own)

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
from scalerl_jax.config import Config
from scalerl_jax.learner import memory_estimate
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.learner.trainer import Trainer
from scalerl_jax.model.attention import cudnn
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.planning import gpu_targets
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
class Update:
    """The compiler's results for one micro-batch and the optimizer's step."""

    temporaries: int  # bytes on a device that `accumulate` needs besides its arguments
    ending: int  # of `apply`, likewise
    live: int | None  # bytes of `accumulate` that are in use at once, arguments included; None: it did not compile
    programs: tuple[Program, Program] | None  # `accumulate` and `apply`; None: they did not compile
    attention: str  # its implementation
    seconds: float  # compile time
    warnings: dict[str, int]  # costs that the compiler reports, and how often


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
                target = gpu_targets.TARGETS[machine.chip.name].text
                shape = f"1x{machine.parts}x{machine.devices_of_host}"
                found = topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape)
    except jax.errors.JaxRuntimeError as error:
        message = " ".join(str(error).split())
        raise ValueError(f"--topology={machine.topology}: {message}") from None
    return list(found.devices)


def trainer_for(config: Config, decoder: DecoderConfig, *, longest: int, devices: list[jax.Device]) -> Trainer:
    """The trainer as scalerl-train makes it. Raises ValueError as Trainer does."""
    return make_trainer(config, decoder, max_segment=longest, devices=devices)


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
        return Update(needed(error), 0, None, None, trainer.attention_note, time.perf_counter() - start, {})
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

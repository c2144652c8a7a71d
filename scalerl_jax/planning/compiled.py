"""The trainer's own `accumulate` and `apply`, compiled for TPUs and GPUs that are not here.

The compiler is the accelerator's (libtpu, or JAX's plug-in for CUDA, which need no device for it); the mesh is of
devices that exist by their description only. What the compiler keeps beside the arguments, and what devices send each
other, is read from what it made. Nothing is run.
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
# libtpu asks the cloud's metadata server what machine this is, and guards a TPU against two processes; the plug-in for
# CUDA wants a driver, and would use the GPUs that are here.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "CUDA_VISIBLE_DEVICES": "-1",
}  # fmt: skip
# In what native code writes while it compiles; a loss of speed or memory that no error tells of.
_COSTS = {
    "an array whole on every device, as the partitioner knows no other way": "Involuntary full rematerialization",
    "registers spilled to memory": r"\bspill",
    "memory above the limit, computed again by XLA": "can't reduce memory use below",
}
_CUDNN = 91000  # what cuDNN is taken to be where GPUs are described, as in their description
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMG])\) exceeds available HBM|Used ([\d.]+)([KMG]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True)
class Update:
    """What the compiler made of one micro-batch and the optimizer's step."""

    temporaries: int  # bytes on a device that `accumulate` takes beside its arguments
    ending: int  # of `apply`, likewise
    live: int | None  # bytes of `accumulate` that are in use at once, arguments included; None: it did not compile
    programs: tuple[Program, Program] | None  # `accumulate` and `apply`; None: they did not compile
    attention: str  # what computes it
    seconds: float  # that compiling took
    warnings: dict[str, int]  # what the compiler says that costs, and how often


def is_there(machine: Machine) -> bool:
    """The compiler for it."""
    packages = ("libtpu",) if machine.chip.is_tpu else ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(package) is not None for package in packages)


def check_compiler(machine: Machine) -> None:
    """Raises ValueError, one line with what installs it, where there is no compiler for TPUs and they are asked for."""
    if machine.chip.is_tpu and not is_there(machine):
        raise ValueError(f"--topology: compiling for TPUs needs libtpu, which is not installed: {INSTALL}")


def devices_of(machine: Machine) -> list[jax.Device]:
    """By their description. Raises ValueError where the compiler knows no such slice."""
    check_compiler(machine)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with _native_messages_kept():
            if machine.chip.is_tpu:
                more: dict[str, Any] = {"num_slices": machine.parts} if machine.parts > 1 else {}
                if machine.devices == 1:  # where libtpu takes a host to have four
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
    """As scalerl-train makes it. Raises ValueError as Trainer."""
    return make_trainer(config, decoder, max_segment=longest, devices=devices)


def cudnn_of(device: jax.Device) -> contextlib.AbstractContextManager[None]:
    """Inside, JAX compiles for the cuDNN and the capability that this device is described with."""
    described = getattr(device, "compute_capability", "0.0")
    return cudnn.compiled_for(tuple(map(int, described.split("."))), version=_CUDNN)


def compile_update(trainer: Trainer, *, rounds: float = 1.0) -> Update:
    """Minutes, and a few GiB of this machine's memory, for a large model. rounds: as Program."""
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
    """The bytes for want of which the compiler gave up. Raises the error where that is not what it says."""
    found = _OUT_OF_MEMORY.search(str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
        raise error
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * _UNITS[unit])


@contextlib.contextmanager
def compiling(device: jax.Device) -> Iterator[list[str]]:
    """For one that is not here. Gives what native code has said, as _native_messages_kept."""
    # Programs for devices that are not here cannot be read back from a cache.
    jax.config.update("jax_enable_compilation_cache", False)
    with _native_messages_kept() as output, cudnn_of(device):
        yield output


@contextlib.contextmanager
def _native_messages_kept() -> Iterator[list[str]]:
    """Gives a list that holds at the end what native code has written to stderr inside; it is shown only where it ends
    in an error of another kind, since libtpu tells at length that this is no TPU."""
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

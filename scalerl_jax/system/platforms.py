"""On which of JAX's platforms a command computes. To be called before JAX computes anything; JAX is not imported.

The fits compute on the CPU, in float64. But the first thing that a process computes has JAX start every platform there
is, and take three quarters of each GPU's memory, from a training run beside it for example.
"""

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def cpu_only() -> None:
    """For commands that only fit and draw: no accelerator is touched, whatever JAX_PLATFORMS says."""
    _set("cpu")


def cpu_here() -> None:
    """For a command that starts others which compute: it touches no accelerator, they do as JAX_PLATFORMS says."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def cpu_too() -> None:
    """For commands that fit beside other work: where JAX_PLATFORMS names accelerators only, the CPU comes last."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if chosen and "cpu" not in chosen.split(","):
        _set(f"{chosen},cpu")


def _set(platforms: str) -> None:
    os.environ["JAX_PLATFORMS"] = platforms  # which JAX reads when it is imported
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", platforms)


def accelerated(environment: Mapping[str, str]) -> bool:
    """Whether JAX, started in this environment, computes on an accelerator. Imports nothing of it."""
    chosen = environment.get("JAX_PLATFORMS", "").split(",")[0]
    if chosen:
        return chosen != "cpu"
    tpus = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(tpus and _is_there("libtpu")) or bool(jax_uses_gpus(environment) and visible_gpus(environment))


def jax_uses_gpus(environment: Mapping[str, str]) -> bool:
    """Whether JAX, started in this environment, looks for NVIDIA GPUs. Imports nothing of it."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any(_is_there(plugin) for plugin in _PLUGINS)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them, in CUDA's order. The driver is not started."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names  # CUDA stops at the first that is none
    count = len(glob.glob("/dev/nvidia[0-9]*"))
    if not count and (program := shutil.which("nvidia-smi")):  # as in WSL
        try:
            answer = subprocess.run([program, "-L"], capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):  # a driver that hangs: JAX will say what it finds
            return []
        count = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    return [str(i) for i in range(count)]

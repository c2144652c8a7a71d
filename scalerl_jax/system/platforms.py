"""The JAX platforms that a command computes on. To be called before JAX computes anything; JAX is not imported.

The fits compute on the CPU, in float64. But at the first computation of a process JAX starts every available platform,
and takes three quarters of each GPU's memory, for example from a training run on the same machine.

Also the fastest dtype for this machine's matrix products. It starts nothing of JAX.

bfloat16 operands are fast on accelerators and on CPUs with instructions for them, AMX or AVX512: seven times as fast as
float32 in a product, twice as fast in an update of some 30M parameters. Other CPUs convert each of them to float32
first.
"""

import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def cpu_only() -> None:
    """For commands that only fit and draw: no accelerator is used, whatever JAX_PLATFORMS says."""
    _set("cpu")


def cpu_here() -> None:
    """For a command whose child processes compute: it uses no accelerator itself; they follow JAX_PLATFORMS."""
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
    """Whether JAX, started in this environment, computes on an accelerator. Does not import JAX."""
    chosen = environment.get("JAX_PLATFORMS", "").split(",")[0]
    if chosen:
        return chosen != "cpu"
    tpus = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(tpus and _is_there("libtpu")) or bool(jax_uses_gpus(environment) and visible_gpus(environment))


def jax_uses_gpus(environment: Mapping[str, str]) -> bool:
    """Whether JAX, started in this environment, looks for NVIDIA GPUs. Does not import JAX."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any(_is_there(plugin) for plugin in _PLUGINS)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing, too
        return False


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them, in CUDA's order. The driver is not started."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names  # CUDA stops at the first invalid one
    count = len(glob.glob("/dev/nvidia[0-9]*"))
    if not count and (program := shutil.which("nvidia-smi")):  # as in WSL
        try:
            answer = subprocess.run([program, "-L"], capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):  # a driver that hangs: JAX will report what it finds
            return []
        count = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    return [str(i) for i in range(count)]


# Names as in Linux. ARM's are left out: no kernel of XLA for them has been measured.
_MULTIPLIES_BFLOAT16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX512"}


def fastest_dtype(
    environment: Mapping[str, str] | None = None, *, cpuinfo: str = "/proc/cpuinfo", on_accelerator: bool | None = None
) -> tuple[str, str]:
    """(dtype of matrix products, why), for a process that is started in this environment (default: ours).

    on_accelerator: whether it computes on an accelerator; None: determined as JAX does.
    """
    environment = os.environ if environment is None else environment
    if accelerated(environment) if on_accelerator is None else on_accelerator:
        return "bfloat16", "an accelerator"
    for flag in _cpu_flags(cpuinfo):
        if flag in _MULTIPLIES_BFLOAT16:
            return "bfloat16", f"a CPU with {_MULTIPLIES_BFLOAT16[flag]} for it"
    return "float32", "a CPU without AMX and AVX512 for bfloat16"


def _cpu_flags(path: str) -> list[str]:
    """The CPU's flags, the best first; none where the system does not report them."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = re.search(r"^flags\s*:(.*)", file.read(), re.MULTILINE)
    except OSError:
        return []
    return sorted(found[1].split()) if found else []

"""On which of JAX's platforms a command computes. To be called before JAX computes anything; JAX is not imported.

The fits compute on the CPU, in float64. But the first thing that a process computes has JAX start every platform there
is, and take three quarters of each GPU's memory, from a training run beside it for example.
"""

import os
import sys


def cpu_only() -> None:
    """For commands that only fit and draw: no accelerator is touched, whatever JAX_PLATFORMS says."""
    _set("cpu")


def cpu_too() -> None:
    """For commands that fit beside other work: where JAX_PLATFORMS names accelerators only, the CPU comes last."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if chosen and "cpu" not in chosen.split(","):
        _set(f"{chosen},cpu")


def _set(platforms: str) -> None:
    os.environ["JAX_PLATFORMS"] = platforms  # which JAX reads when it is imported
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", platforms)

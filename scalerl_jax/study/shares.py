"""What each of N members that run at a time gets of this machine: cores, and GPUs where there are some.

All shares are alike, so that device-hours of members can be compared: cores that are left over stay idle, and GPUs have
to divide.
"""

import dataclasses
import os
from collections.abc import Mapping

from scalerl_jax.cli.entry import UserError
from scalerl_jax.system import platforms


@dataclasses.dataclass(frozen=True)
class Share:
    cores: frozenset[int]  # none: as this process has them
    environment: dict[str, str]  # added to this process's


def shares(parallel: int, environment: Mapping[str, str]) -> list[Share]:
    """One for each member at a time. Raises UserError where there are not enough cores, or GPUs do not divide."""
    if parallel == 1:
        return [Share(frozenset(), {})]
    asked = f"--parallel={parallel}"
    gpus = platforms.visible_gpus(environment) if platforms.jax_uses_gpus(environment) else []
    if not gpus and platforms.accelerated(environment):
        raise UserError(f"{asked}: a member has all accelerators of this machine to itself")
    if len(gpus) % parallel:
        raise UserError(f"{asked}: {len(gpus)} GPUs do not divide into {parallel} equal shares")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores and len(cores) < parallel:
        raise UserError(f"{asked}: this process has {len(cores)} cores")
    each, cards = len(cores) // parallel, len(gpus) // parallel
    return [
        Share(
            frozenset(cores[n * each : (n + 1) * each]),
            {"CUDA_VISIBLE_DEVICES": ",".join(gpus[n * cards : (n + 1) * cards])} if gpus else {},
        )
        for n in range(parallel)
    ]

"""compute_dtype=auto: the compute dtype is chosen once, at the start of a run, and written into its config.json.

config.model.compute_dtype   auto: float32 with sync_dtype=float32; else as in the run folder's config.json, if the run
                             has begun; else the fastest dtype on this machine (system/platforms.py)
config.fleet.compute_dtype   auto: as the trainer's, so that both sides run one policy
"""

import os
from typing import Literal

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.system import platforms
from scalerl_jax.system.files import read_object

AUTO = "auto"
Dtype = Literal["bfloat16", "float32"]
_DTYPES: dict[str, Dtype] = {"bfloat16": "bfloat16", "float32": "float32"}


def settle(config: Config, workdir: str = "") -> list[str]:
    """Replaces auto by the chosen dtypes. Returns the lines to log: none if nothing was chosen.

    workdir: the folder of the run, which may have begun; empty without one.
    """
    lines = []
    if config.model.compute_dtype == AUTO:
        config.model.compute_dtype, why = _choose(config, workdir)
        lines = [f"config.model.compute_dtype=auto: {config.model.compute_dtype} ({why})"]
    if config.fleet.compute_dtype == AUTO:
        config.fleet.compute_dtype = config.model.compute_dtype
    return lines


def _choose(config: Config, workdir: str) -> tuple[Dtype, str]:
    if config.model.sync_dtype == "float32":
        return "float32", "as config.model.sync_dtype is"
    try:
        begun = config_check.saved_leaves(read_object(os.path.join(workdir, "config.json"))) if workdir else {}
    except (OSError, ValueError):  # the run has not begun, or its folder is refused later in the start
        begun = {}
    if (before := str(begun.get("model.compute_dtype"))) in _DTYPES:
        return _DTYPES[before], "as the run was begun"
    dtype, why = platforms.fastest_dtype()
    return _DTYPES[dtype], why

"""The steps to a target pass rate, from a fit written by scalerl-fit.

    compute to the target   (R0, A, B, C_mid of fit.json)       steps = compute / compute of a step

The unit of compute is that of the fit's x: device-hours, FLOPs or steps, by its name. Device-hours are not converted:
they are those of the machines that ran it.
"""

import dataclasses
import math
import re
from typing import Any

from scalerl_jax.system.files import read_object

_UNITS = {  # names of x, as scalerl-fit writes them
    "device-hours": {"h": 1.0, "s": 1 / 3600, "min": 1 / 60, "day": 24.0, "": 1.0},
    "FLOPs": {
        "FLOP": 1.0, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15, "EFLOP": 1e18, "ZFLOP": 1e21,
        "PFLOP/s-day": 1e15 * 86400, "": 1.0,
    },
    "steps": {"": 1.0},
}  # fmt: skip
_NAMES = {"device-hours": r"hour|gpu_h|tpu_h", "FLOPs": r"flop", "steps": r"step|update"}


@dataclasses.dataclass(frozen=True)
class Target:
    pass_rate: float
    kind: str  # device-hours, FLOPs or steps
    compute: float  # from the start of the run to the target
    run: str  # the fitted run


def read(path: str, pass_rate: float) -> Target:
    """Reads a fit. Raises ValueError, one line with the file, where it is no fit or its curve never reaches the pass
    rate; and OSError."""
    document = read_object(path)
    x, fits = document.get("x"), document.get("fits")
    if not isinstance(x, str) or not isinstance(fits, list) or not fits or not isinstance(fits[0], dict):
        raise ValueError(f"--fit={path}: is not a fit.json that scalerl-fit has written")
    if len(fits) > 1:
        names = ", ".join(str(one.get("run")) for one in fits if isinstance(one, dict))
        raise ValueError(f"--fit={path}: holds {len(fits)} runs ({names}); fit one of them alone")
    name, _, unit = x.partition(", in ")
    kind = next((kind for kind, words in _NAMES.items() if re.search(words, name, re.IGNORECASE)), None)
    if kind is None or unit not in _UNITS[kind]:
        raise ValueError(f"--fit={path}: its x is {x!r}, which is neither device-hours, FLOPs nor steps")
    fit = fits[0]
    a, b, middle, start = (_number(fit, key, path) for key in ("asymptote", "exponent", "midpoint", "initial_reward"))
    if not start < pass_rate < a:
        raise ValueError(
            f"--target={pass_rate:g}: the curve of --fit={path} goes from {start:.3f} to {a:.3f}, and not through it"
        )
    # pass_rate = R0 + (A - R0) / (1 + (C_mid / C)^B)
    compute = middle / ((a - start) / (pass_rate - start) - 1) ** (1 / b)
    return Target(pass_rate, kind, compute * _UNITS[kind][unit], str(fit.get("run", "")))


def _number(fit: dict[str, Any], key: str, path: str) -> float:
    value = fit.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"--fit={path}: {key} is {value!r}: the scores of that run do not rise, or it is no fit.json")
    return float(value)


def steps(target: Target, *, device_hours_a_step: float, flops_a_step: float) -> float:
    """Steps to the target. device_hours_a_step, flops_a_step (the model's): of trainer and generators together."""
    return target.compute / {"device-hours": device_hours_a_step, "FLOPs": flops_a_step, "steps": 1.0}[target.kind]

"""The generators beside a trainer, the steps to a target pass rate, and the cost of a run.

    needed      tokens sampled a step / (seconds of the trainer's step x tokens a second of one generator)
    given n     a step takes max(trainer's, tokens sampled / (n x tokens a second)); the faster side idles meanwhile
    to a target (R0, A, B, C_mid of a fit.json that scalerl-fit has written)       steps = compute / compute of a step

Uses means of both sides; the spread of lengths is left out. The JAX engine's memory on a machine is computed by a
separate process of rollout_server. The unit of compute is that of the fit's x: device-hours, FLOPs or steps, by its
name. Device-hours are not converted: they are those of the machines that ran it.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
from typing import Any

from launch.machines import Machine
from launch.settings import maximum_tokens
from scalerl_jax.config import Config
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.planning import compiled, workload
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
class FleetSpeed:
    """Step time of a trainer with a number of generators."""

    generators: int
    step_seconds: float
    trainer_idle: float  # share of its time
    generators_idle: float


def needed(*, sampled: float, trainer_seconds: float, tokens_per_second: float) -> int:
    """The smallest number of generators with which the trainer never waits."""
    return max(1, math.ceil(sampled / (trainer_seconds * tokens_per_second) - 1e-9))


def beside(generators: int, *, sampled: float, trainer_seconds: float, tokens_per_second: float) -> FleetSpeed:
    sampling = sampled / (generators * tokens_per_second)
    step = max(trainer_seconds, sampling)
    return FleetSpeed(generators, step, 1 - trainer_seconds / step, 1 - sampling / step)


def find_server(topology: str) -> Machine:
    """The machine of --generator. Raises ValueError, one line, where there is none or an engine cannot be compiled."""
    machine = workload.find_machine(topology, 1, flag="generator")
    if not compiled.is_there(machine):
        needed = compiled.INSTALL if machine.chip.is_tpu else compiled.INSTALL_GPUS
        raise ValueError(f"--generator={topology}: its compiler is not installed: {needed}")
    return machine


def memory_on(machine: Machine, config: Config, decoder: DecoderConfig) -> dict[str, Any]:
    """A JAX engine server's memory on a device there: `line`, `fits`, and the numbers as `memory`.

    Compiles its programs, which takes a minute or more. Raises ValueError, one line, where the compiler does not know
    such a machine.
    """
    fleet = config.fleet
    options = {
        "slots": fleet.slots, "maximum_tokens": maximum_tokens(config), "decode_chunk": fleet.decode_chunk,
        "compute_dtype": fleet.compute_dtype, "sync_dtype": config.model.sync_dtype,
        "head_precision": config.model.head_precision, "numerics": config.numerics,
        "router_replay": config.rollout.router_replay,
    }  # fmt: skip
    question = {"topology": machine.text, "model": decoder.to_hf(), "options": options}
    command = [sys.executable, "-m", "rollout_server.engines.jax.plan"]
    done = subprocess.run(command, input=json.dumps(question), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        error = answer["error"].removeprefix(f"--topology={machine.topology}: ")
        raise ValueError(f"--generator={machine.text}: {error}")
    return answer


@dataclasses.dataclass(frozen=True)
class Target:
    pass_rate: float
    kind: str  # device-hours, FLOPs or steps
    compute: float  # from the start of the run to the target
    run: str  # the fitted run


def read_target(path: str, pass_rate: float) -> Target:
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
    if not (b > 0 and middle > 0):
        raise ValueError(f"--fit={path}: exponent {b:g} and midpoint {middle:g} are of no curve that rises")
    if not start < pass_rate < a:
        raise ValueError(
            f"--target={pass_rate:g}: the curve of --fit={path} goes from {start:.3f} to {a:.3f}, and not through it"
        )
    # pass_rate = R0 + (A - R0) / (1 + (C_mid / C)^B)
    try:
        compute = middle / ((a - start) / (pass_rate - start) - 1) ** (1 / b)
    except ArithmeticError as error:
        raise ValueError(f"--target={pass_rate:g}: is out of reach of --fit={path}, whose exponent is {b:g}") from error
    return Target(pass_rate, kind, compute * _UNITS[kind][unit], str(fit.get("run", "")))


def _number(fit: dict[str, Any], key: str, path: str) -> float:
    value = fit.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"--fit={path}: {key} is {value!r}: the scores of that run do not rise, or it is no fit.json")
    return float(value)


def steps_to(target: Target, *, device_hours_a_step: float, flops_a_step: float) -> float:
    """Steps to the target. device_hours_a_step, flops_a_step (the model's): of trainer and generators together."""
    return target.compute / {"device-hours": device_hours_a_step, "FLOPs": flops_a_step, "steps": 1.0}[target.kind]


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a run from its first step to its last."""

    steps: float
    hours: float
    trainer_hours: float  # device-hours
    generator_hours: float
    money: float | None  # None without prices


def of_run(
    steps: float,
    *,
    step_seconds: float,
    chips: int,
    generators: int,
    generator_devices: int,
    chip_price: float,
    generator_price: float,
) -> Cost:
    """chip_price, generator_price: price of a chip, and of a generator, per hour."""
    hours = steps * step_seconds / 3600
    money = hours * (chips * chip_price + generators * generator_price)
    return Cost(
        steps, hours, hours * chips, hours * generators * generator_devices,
        money if chip_price or generator_price else None,
    )  # fmt: skip

"""The number of generators that keep a trainer busy, the step time with a given number, and the cost of a run.

    needed      tokens sampled a step / (seconds of the trainer's step x tokens a second of one generator)
    given n     a step takes max(trainer's, tokens sampled / (n x tokens a second)); the faster side idles meanwhile

Uses means of both sides; the spread of lengths is left out.

The JAX engine's memory on a machine is computed by a separate process of rollout_server.
"""

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

from launch.machines import Machine
from launch.settings import maximum_tokens
from scalerl_jax.config import Config
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.planning import compiled, workload


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Step time of a trainer with a number of generators."""

    generators: int
    step_seconds: float
    trainer_idle: float  # share of its time
    generators_idle: float


def needed(*, sampled: float, trainer_seconds: float, tokens_per_second: float) -> int:
    """The smallest number of generators with which the trainer never waits."""
    return max(1, math.ceil(sampled / (trainer_seconds * tokens_per_second) - 1e-9))


def beside(generators: int, *, sampled: float, trainer_seconds: float, tokens_per_second: float) -> Fleet:
    sampling = sampled / (generators * tokens_per_second)
    step = max(trainer_seconds, sampling)
    return Fleet(generators, step, 1 - trainer_seconds / step, 1 - sampling / step)


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
class Cost:
    """The cost of a run from its first step to its last."""

    steps: float
    hours: float
    trainer_hours: float  # device-hours
    generator_hours: float
    money: float | None  # None without prices


def cost(
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

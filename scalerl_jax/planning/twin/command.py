"""scalerl-plan without --topology: how many generators keep a trainer busy, by simulation.

    scalerl-plan --run=WORKDIR [--servers=1,2,3,4] [--max_off_policy_steps=4,8] [--cores=2]
    scalerl-plan --config=F.py --lengths_quantiles=0.5:4000,0.9:11000,1:14000 --tokens_per_second=2500 --step_seconds=60

The first fits the simulation to a run and changes the fleet; the second takes every speed from flags.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from absl import flags

from scalerl_jax import config_check
from scalerl_jax.cli import entry
from scalerl_jax.cli import twin_flags as given
from scalerl_jax.config_io import GivenConfig
from scalerl_jax.planning.twin.calibrate import Calibration, calibrate
from scalerl_jax.planning.twin.choose import choose, sweep
from scalerl_jax.planning.twin.lengths import Lengths, parse_quantiles
from scalerl_jax.planning.twin.observed import Observed, observe, recipe_of
from scalerl_jax.planning.twin.outcome import Outcome
from scalerl_jax.planning.twin.simulation import Scenario
from scalerl_jax.planning.twin.speeds import Machine, ServerSpeed, TrainerSpeed
from scalerl_jax.scaling.commands.results import make_console, new_table, say
from scalerl_jax.system.files import write_whole

STEPS = 40  # that an outcome tells of, at least
_FALLEN_FAR = 0.05  # of what was measured: the simulation of the run itself should be as near as this


def main(config_given: GivenConfig, *, out: str) -> None:
    """out: JSON file to write, or ""."""
    servers = _numbers(given.SERVERS)
    off_policy = _numbers(given.OFF_POLICY)
    machine = _machine()
    lengths: Lengths | None = None
    if given.LENGTHS.value:
        with entry.user_mistakes(before=f"--{given.LENGTHS.name}={given.LENGTHS.value}: "):
            lengths = parse_quantiles(given.LENGTHS.value)
    if out:
        entry.check_out("--out", out)
    console = make_console()
    document: dict[str, Any]
    if given.RUN.value:
        if config_given.path or config_given.overrides:
            raise entry.UserError("--config: goes without --run, which has its own")
        with entry.user_mistakes(before=f"--{given.RUN.name}: "):
            observed = observe(given.RUN.value)
            found = calibrate(observed, machine, lengths=lengths, seed=given.SEED.value)
        scenario = _changed(found.scenario)
        for line in _of_run(observed, found, machine):
            say(console, line)
        document = {"run": given.RUN.value, "measured": measured(observed), "fitted": found.errors}
    else:
        scenario = _of_flags(config_given, machine, lengths)
        document = {"config": config_given.path}
    outcomes = sweep(
        scenario,
        servers=servers,
        off_policy=off_policy or [scenario.recipe.max_off_policy_steps],
        steps=STEPS,
        seed=given.SEED.value,
    )
    _tell(console, outcomes)
    document |= {"speeds": _speeds(scenario), "outcomes": [outcome_json(outcome) for outcome in outcomes]}
    if out:
        write_whole(out, json.dumps(document, indent=2) + "\n")


def outcome_json(found: Outcome) -> dict[str, Any]:
    fields = dataclasses.asdict(found) | {
        "steps_per_hour": found.steps_per_hour,
        "device_hours_per_step": _hours(found),
    }
    return fields | {"staleness": {str(steps): share for steps, share in found.staleness.items()}}


def measured(observed: Observed) -> dict[str, Any]:
    """In the names of an outcome."""
    return {
        "servers": observed.servers,
        "steps": observed.steps,
        "steps_per_hour": observed.steps_per_hour,
        **observed.shares,
        "staleness": {str(steps): share for steps, share in observed.staleness.items()},
        "evaluation_seconds": observed.evaluation_seconds,
    }


def _numbers(flag: flags.FlagHolder[list[str]]) -> list[int]:
    """Of a flag that lists them; rising, each once."""
    try:
        found = sorted({int(text) for text in flag.value})
    except ValueError:
        raise entry.UserError(f"--{flag.name}={','.join(flag.value)}: whole numbers, with commas between") from None
    if found and found[0] < 1:
        raise entry.UserError(f"--{flag.name}={','.join(flag.value)}: must be at least 1")
    return found


def _machine() -> Machine:
    text, used = given.CORES.value, given.USED.value
    if not text:
        if used:
            raise entry.UserError(f"--{given.USED.name}={used:g}: goes with --{given.CORES.name}")
        return Machine()
    try:
        cores = [float(part) for part in text.split("+")]
        if not all(0 < n < math.inf for n in cores) or len(cores) > 2:
            raise ValueError
    except ValueError:
        raise entry.UserError(f"--{given.CORES.name}={text}: a number of cores, or two with + between") from None
    if len(cores) == 1:
        return Machine(cores=cores[0], used=used)
    return Machine(trainer_cores=cores[0], generator_cores=cores[1], used=used)


def _changed(scenario: Scenario) -> Scenario:
    """With the speeds that flags give in the place of the run's."""
    server, trainer = scenario.server, scenario.trainer
    if given.SLOTS.value is not None:
        server = dataclasses.replace(server, slots=given.SLOTS.value)
    fixed, length = given.FIXED_SHARE.value, scenario.lengths.mean
    if fixed is not None:
        whole = server.slots / server.tokens_per_second(length)
        server = dataclasses.replace(
            server,
            step_seconds=fixed * whole,
            slot_seconds=(1 - fixed) * whole / server.slots,
            completion_seconds=0.0,
        )
    if given.TOKENS_PER_SECOND.value is not None:
        faster = given.TOKENS_PER_SECOND.value / server.tokens_per_second(length)
        each = {name: getattr(server, name) / faster for name in ("step_seconds", "slot_seconds", "completion_seconds")}
        server = dataclasses.replace(server, **each)
    if given.PUSH_SECONDS.value is not None:
        server = dataclasses.replace(server, push_seconds=given.PUSH_SECONDS.value)
    if given.STEP_SECONDS.value is not None:
        trainer = dataclasses.replace(trainer, update_seconds=given.STEP_SECONDS.value)
    return dataclasses.replace(scenario, server=server, trainer=trainer)


def _of_flags(config_given: GivenConfig, machine: Machine, lengths: Lengths | None) -> Scenario:
    """A fleet that there is no run of."""
    for name, flag in given.OF_NO_RUN.items():
        if not flag.value:
            raise entry.UserError(f"--{name}: wanted where there is no --run to take it from")
    speed, seconds = given.TOKENS_PER_SECOND.value, given.STEP_SECONDS.value
    assert lengths is not None and speed and seconds
    if not config_given.path:
        raise entry.UserError("--config: no config file given, for example --config=configs/scalerl_8b.py")
    settings = config_check.leaves(config_given.config())
    slots = given.SLOTS.value or settings["fleet.slots"]
    fixed = 1.0 if given.FIXED_SHARE.value is None else given.FIXED_SHARE.value
    step = slots / speed
    return Scenario(
        recipe=recipe_of(settings),
        trainer=TrainerSpeed(update_seconds=seconds, cores=min(1.0, machine.for_trainer)),
        server=ServerSpeed(
            slots=slots,
            queue=settings["fleet.queue"],
            chunk=settings["fleet.decode_chunk"] if settings["fleet.engine"] == "jax" else 1,
            step_seconds=fixed * step,
            slot_seconds=(1 - fixed) * step / slots,
            push_seconds=given.PUSH_SECONDS.value or 0.0,
        ),
        servers=1,
        lengths=lengths,
        machine=machine,
    )


def _of_run(observed: Observed, found: Calibration, machine: Machine) -> list[str]:
    """What the run measured, and how near the simulation of that very run is."""
    server, trainer = found.scenario.server, found.scenario.trainer
    lines = [
        f"{given.RUN.value}: {observed.steps} steps with {_generators(observed.servers)} of {server.slots} slots, "
        f"{observed.steps_per_hour:,.0f} steps per hour, completions of {observed.lengths.mean:,.0f} tokens",
        f"fitted to it: an update {_seconds(trainer.update_seconds)}"
        + (f" on {trainer.cores:.2f} cores" if math.isfinite(machine.for_trainer) else "")
        + f", a decode step {_seconds(server.step_seconds)}, a completion {_seconds(server.completion_seconds)} beside "
        f"its steps, {server.tokens_per_second(observed.lengths.mean):,.0f} tokens/s with all slots taken",
        "simulated against measured: "
        + ", ".join(f"{name} {100 * error:+.1f} %" for name, error in found.errors.items()),
    ]
    if observed.local and not given.CORES.value:
        lines.append(
            f"its generators ran on the trainer's machine: --{given.CORES.name}=N says how many cores they share; here "
            "each is taken to have its own"
        )
    lines += [
        f"warning: {name} of this run is not reproduced, so other fleets will not be, either"
        for name, error in found.errors.items()
        if abs(error) > _FALLEN_FAR
    ]
    return lines


def _tell(console: Any, outcomes: Sequence[Outcome]) -> None:
    table = new_table(
        "predicted", "generators", "k", "steps/hour", "trainer busy", "idle", "evaluating", "generators busy", "idle",
        "evaluating", "staleness mean", "most", "device-hours a step", justify="right",
    )  # fmt: skip
    for o in outcomes:
        shares = (o.trainer_busy, o.trainer_idle, o.trainer_evaluation,
                  o.generator_busy, o.generator_idle, o.generator_evaluation)  # fmt: skip
        table.add_row(
            str(o.servers), str(o.max_off_policy_steps), f"{o.steps_per_hour:,.1f}",
            *(f"{100 * share:.0f} %" for share in shares),
            f"{o.mean_staleness:.2f}", str(o.most_staleness), f"{_hours(o):.4g}",
        )  # fmt: skip
    console.print(table)
    choice = choose(outcomes, trainer_devices=given.TRAINER_DEVICES.value, server_devices=given.SERVER_DEVICES.value)
    for name, o in (("fastest", choice.fastest), ("cheapest", choice.cheapest)):
        ages = ", ".join(f"{steps}: {100 * share:.0f} %" for steps, share in o.staleness.items() if share >= 0.005)
        say(
            console,
            f"{name:8s}  {_generators(o.servers)}, k {o.max_off_policy_steps}: {o.steps_per_hour:,.1f} steps/hour, "
            f"{_hours(o):.4g} device-hours a step; staleness {ages}",
        )


def _hours(found: Outcome) -> float:
    return found.hours_per_step(trainer_devices=given.TRAINER_DEVICES.value, server_devices=given.SERVER_DEVICES.value)


def _generators(count: int) -> str:
    return f"{count} generator{'s' * (count != 1)}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 or not value else f"{1e3 * value:.3g} ms"


def _speeds(scenario: Scenario) -> dict[str, Any]:
    trainer = dataclasses.asdict(scenario.trainer)
    del trainer["spread"]
    return {"trainer": trainer, "server": dataclasses.asdict(scenario.server), "tokens": scenario.lengths.mean}

"""scalerl-plan: the memory, time and cost of a run on machines that you have not rented yet.

    scalerl-plan --config=configs/scalerl_8b.py --topology=v5p:4x4x4 [--slices=2] [--model_config=FILE] [--out=FILE]
                 [--generator=h100:1] [--generator_tokens_per_second=2500] [--price_per_chip_hour=4.2] [--explain]
                 [--fit=fit.json --target=0.55]

The update that scalerl-train runs is compiled for the named TPUs (scalerl-jax[plan]) or GPUs (make plan-packages-gpu);
none has to be present. Without CUDA's compiler, GPUs are planned by formula. It prints the bytes on a device beside
what the device has, what devices send each other by mesh axis, the least time of a step and what bounds it, the number
of generators that keep the trainer busy, device-hours and cost. If the run does not fit, it searches the nearest mesh,
micro-batch or remat that does. The policy's weights are not needed.
"""

import dataclasses
import json
import sys
from typing import Any

from scalerl_jax import early_checks
from scalerl_jax.cli import entry
from scalerl_jax.cli import plan_flags as given
from scalerl_jax.config_io import GivenConfig
from scalerl_jax.planning import compiled, cost, layout_plan, plan_page, workload
from scalerl_jax.planning.layout_plan import LayoutPlan, Question
from scalerl_jax.scaling.commands.terminal import make_console, print_line
from scalerl_jax.system import platforms
from scalerl_jax.system.files import plain, write_whole


def main(config_given: GivenConfig) -> None:
    # ---- 1. The plan's subject and machine: mistakes are reported before anything is compiled ------------------------
    early_checks.plan(config_given, ())
    config = config_given.config()
    if config.model.compute_dtype == "auto":  # as on the accelerator
        config.model.compute_dtype = "float32" if config.model.sync_dtype == "float32" else "bfloat16"
    if config.fleet.compute_dtype == "auto":
        config.fleet.compute_dtype = config.model.compute_dtype
    if (given.TARGET.value is None) != (not given.FIT.value):
        raise entry.UserError("--fit and --target go together")
    if given.STEPS.value and given.FIT.value:
        raise entry.UserError("--steps: does not go with --fit and --target, which say how many steps there are")
    for flag in (given.GENERATORS, given.GENERATOR_DEVICES, given.GENERATOR_PRICE):
        if flag.value != flag.default and not given.TOKENS_PER_SECOND.value:
            raise entry.UserError(f"--{flag.name}: requires --generator_tokens_per_second")
    if given.OUT.value:
        entry.prepare_out("--out", given.OUT.value)
    with entry.user_mistakes():
        machine = workload.find_machine(given.TOPOLOGY.value, given.SLICES.value)
        decoder, source = workload.find_decoder(
            config, config_file=config_given.path, model_config=given.MODEL_CONFIG.value
        )
        choice = layout_plan.own_choice(config, machine.devices)
        work = workload.of(
            config,
            prompt_tokens=given.PROMPT_TOKENS.value,
            completion_tokens=given.COMPLETION_TOKENS.value,
            row_use=given.ROW_USE.value,
        )
        pass_rate = given.TARGET.value
        aim = cost.read_target(given.FIT.value, pass_rate) if pass_rate is not None else None
        compiled.check_compiler(machine)
        server = cost.find_server(given.GENERATOR.value) if given.GENERATOR.value else None
    question = Question(config, decoder, machine, work, given.PEAK_SHARE.value)

    # ---- 2. The config's own layout, and if it does not fit the nearest that does ------------------------------------
    console = make_console()
    print_line(console, f"decoder of {source}")
    with entry.user_mistakes():
        own = layout_plan.plan(question, choice)
    plan_page.show_layout(console, question, own)
    best, tried = own, list[LayoutPlan]()
    if own.bytes.over > 0 and given.COMPILES.value:
        found, tried = layout_plan.search(
            question, own, compiles=given.COMPILES.value, report=lambda line: print(line, file=sys.stderr)
        )
        if found is None:
            print_line(console, _nothing_fits(own, tried))
        else:
            best = found
            print_line(console, f"the nearest that fits: {best.choice}")
            plan_page.show_layout(console, question, best)
    plan_page.show_step(console, question, best)
    if given.EXPLAIN.value:
        plan_page.show_places(console, best)

    # ---- 3. Generators, device-hours, money --------------------------------------------------------------------------
    seconds, count = best.roofline.step, 0
    written: dict[str, Any] = {}
    if server is not None:
        with entry.user_mistakes():
            found_there = cost.memory_on(server, config, decoder)
        fits = "" if found_there["fits"] else "does not fit: "
        where = f"{'each device of ' * (server.devices > 1)}{server.text}"
        print_line(console, f"a generator on {where}: {fits}{found_there['line']}")
        written["generator"] = {"topology": server.text, "fits": found_there["fits"], **found_there["memory"]}
    if speed := given.TOKENS_PER_SECOND.value:
        numbers = {"sampled": work.sampled, "trainer_seconds": seconds, "tokens_per_second": speed}
        fed = cost.needed(**numbers)
        fleet = cost.beside(given.GENERATORS.value or fed, **numbers)
        plan_page.show_fleet(console, fed, fleet)
        seconds, count = fleet.step_seconds, fleet.generators
        written["fleet"] = {"keep_the_trainer_fed": fed, **dataclasses.asdict(fleet)}
    steps = float(given.STEPS.value or config.max_steps)
    devices = machine.devices + count * given.GENERATOR_DEVICES.value
    if aim is not None:
        steps = cost.steps_to(
            aim,
            device_hours_a_step=devices * seconds / 3600,
            flops_a_step=work.model_flops(decoder) + work.sampling_flops(decoder),
        )
        print_line(console, f"to a pass rate of {aim.pass_rate:g} {aim.run} needs {aim.compute:.4g} {aim.kind}")
    whole = cost.of_run(
        steps,
        step_seconds=seconds,
        chips=machine.devices,
        generators=count,
        generator_devices=given.GENERATOR_DEVICES.value,
        chip_price=given.CHIP_PRICE.value,
        generator_price=given.GENERATOR_PRICE.value,
    )
    plan_page.show_cost(console, whole)

    # ---- 4. The file -------------------------------------------------------------------------------------------------
    if given.OUT.value:
        written |= {
            "machine": {"topology": machine.topology, "parts": machine.parts, **dataclasses.asdict(machine.chip)},
            "decoder": {"file": source, **dataclasses.asdict(decoder)},
            "workload": {**dataclasses.asdict(work), "tokens": work.tokens, "sampled": work.sampled},
            "plan": plan_page.document(question, own),
            "tried": [plan_page.document(question, one) for one in tried],
            "chosen": plan_page.document(question, best),
            "cost": dataclasses.asdict(whole),
        }
        write_whole(given.OUT.value, json.dumps(plain(written), indent=2, allow_nan=False) + "\n")


def _nothing_fits(own: LayoutPlan, tried: list[LayoutPlan]) -> str:
    size = own.bytes
    kept = size.state + size.gradients + size.sent
    if kept > size.limit:
        times = -(-kept // size.limit)
        return f"state, gradients and weights sent alone do not fit: at least {times} times as many chips along fsdp"
    if tried:
        return f"nor do the {len(tried)} nearest layouts that were compiled: more chips, shorter rows, or --compiles"
    return "nor does any other mesh, micro-batch or remat, by formula: more chips, or shorter rows"


def run() -> None:
    given.define()
    platforms.cpu_only()
    entry.run_with_config_later(main)


if __name__ == "__main__":
    run()

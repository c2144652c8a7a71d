"""The output of scalerl-plan: lines and tables for a terminal, and one JSON document."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from scalerl_jax.planning import compiled
from scalerl_jax.planning.cost import Cost, FleetSpeed
from scalerl_jax.planning.layout_plan import LayoutPlan, Question
from scalerl_jax.planning.roofline import Traffic
from scalerl_jax.scaling.commands.terminal import new_table, print_line
from scalerl_jax.scaling.units import short_number
from scalerl_jax.system.memory import gib


def show_layout(console: Console, question: Question, plan: LayoutPlan) -> None:
    machine, size, update = question.machine, plan.bytes, plan.update
    axes = " x ".join(f"{axis} {n}" for axis, n in plan.choice.mesh if n > 1) or "one device"
    how = f"compiled in {update.seconds:.0f} s" if update.seconds is not None else "by formula"
    print_line(console, f"{machine}: {machine.devices} devices, mesh {axes}, remat {plan.choice.remat}; {how}")
    if update.seconds is None and not machine.chip.is_tpu:
        print_line(
            console, f"compiled for {machine.chip.name}, bytes would be the compiler's own: {compiled.INSTALL_GPUS}"
        )
    for what, count in update.warnings.items():
        print_line(console, f"the compiler says, {count} times: {what}")
    print_line(
        console, f"{update.attention}; a micro-batch is {plan.rows} rows of {question.config.learner.seq_len} tokens"
    )

    table = _table("bytes on a device", "class", "GiB", "")
    for name, value in _classes(plan).items():
        table.add_row(name, gib(value), "" if name != "temporaries" else f"by formula {gib(plan.by_formula)}")
    verdict = "fits" if size.over <= 0 else f"does not fit, by {gib(size.over)} GiB"
    table.add_row("needed at once", gib(size.needed), f"of {gib(size.limit)}: {verdict}")
    console.print(table)

    if plan.traffic is None:
        print_line(console, "compilation ran out of memory; communication below is estimated")
    table = _table("a device receives in a micro-batch, along", "axes", "GB", "GB by formula", "ms", "ms of network")
    formula = {one.axes: one for one in plan.formula_traffic}
    for one in plan.traffic if plan.traffic is not None else plan.formula_traffic:
        other = formula.get(one.axes)
        table.add_row(
            " + ".join(one.axes), f"{one.received / 1e9:.2f}", f"{other.received / 1e9:.2f}" if other else "",
            f"{1e3 * one.link_seconds:.1f}", f"{1e3 * one.network_seconds:.1f}" if one.network_seconds else "",
        )  # fmt: skip
    if table.rows:
        console.print(table)


def show_step(console: Console, question: Question, plan: LayoutPlan) -> None:
    times, work = plan.roofline, question.workload
    blocks = plan.update.seconds is not None and plan.update.attention.startswith("attention: blocks")
    for there, what in (
        (question.config.numerics == "bitwise", "config.numerics=bitwise: its loops over blocks of rows count"),
        (blocks, "attention in blocks: its loop over spans of keys counts"),
    ):
        if there:
            print_line(console, f"{what} as one turn, so seconds are too few")
    rate = speeds(question, plan)
    table = _table("a step, in seconds", "limit", "by itself", "")
    for name, seconds in times.parts.items():
        table.add_row(name, f"{seconds:.2f}", "binds" if name == times.binds else "")
    table.add_row("roofline", f"{times.step:.2f}", f"in turn {times.in_turn:.2f}")
    console.print(table)
    print_line(
        console,
        f"a step: {work.completions} completions, {short_number(work.tokens)} tokens, {plan.micro_batches} "
        f"micro-batch{'es' * (plan.micro_batches > 1)}; model {short_number(rate['model_flops'])} FLOPs, hardware "
        f"{short_number(plan.flops.total * plan.micro_batches)}",
    )
    print_line(
        console,
        f"at the roofline: {rate['tokens_per_second_per_chip']:.0f} tokens/s a chip, MFU {rate['mfu']:.0%}"
        + (f" (products at {question.peak_share:.0%} of their peak rate)" if question.peak_share < 1 else ""),
    )


def show_places(console: Console, plan: LayoutPlan) -> None:
    """Prints where a step's least seconds are spent, from the optimised text of its programs."""
    if plan.program is None:
        print_line(console, "--explain: requires what was compiled; this plan is by formula")
        return
    title = "the most expensive places of a step, at the least, on each device"
    table = _table(title, "place", "share", "seconds", "TFLOP", "GB", "binds")
    for one in plan.program.places():
        table.add_row(
            one.scope, f"{one.seconds / plan.program.seconds:.1%}", f"{one.seconds:.2f}", f"{one.flops / 1e12:.0f}",
            f"{one.moved / 1e9:.0f}", one.binds,
        )  # fmt: skip
    console.print(table)


def show_fleet(console: Console, fed: int, fleet: FleetSpeed) -> None:
    print_line(
        console,
        f"generators: {fed} keep the trainer fed; with {fleet.generators} a step takes {fleet.step_seconds:.2f} s, the "
        f"trainer waits {fleet.trainer_idle:.0%} and they wait {fleet.generators_idle:.0%} of the time",
    )


def show_cost(console: Console, cost: Cost) -> None:
    money = "" if cost.money is None else f", {cost.money:,.0f} in money"
    print_line(
        console,
        f"{cost.steps:,.0f} steps: {cost.hours:,.1f} hours, {cost.trainer_hours:,.0f} device-hours of the trainer"
        + (f", {cost.generator_hours:,.0f} of generators" if cost.generator_hours else "")
        + money,
    )


def speeds(question: Question, plan: LayoutPlan) -> dict[str, float]:
    """Speeds at the roofline."""
    work, machine, seconds = question.workload, question.machine, plan.roofline.step
    model = work.model_flops(question.decoder)
    return {
        "model_flops": model,
        "tokens_per_second_per_chip": work.tokens / seconds / machine.devices,
        "mfu": model / seconds / (machine.devices * machine.chip.flops),
    }


def document(question: Question, plan: LayoutPlan) -> dict[str, Any]:
    """One layout as JSON: bytes, FLOPs, seconds."""
    return {
        "mesh": dict(plan.choice.mesh),
        "micro_batch_rows": plan.choice.rows,
        "remat": plan.choice.remat,
        "attention": plan.update.attention,
        "compiled": plan.update.seconds is not None,
        "compile_seconds": plan.update.seconds,
        "bytes_per_device": {
            **{name.replace(" ", "_"): value for name, value in _classes(plan).items()},
            "temporaries_by_formula": plan.by_formula,
            "live_in_accumulate": plan.update.live,
            "needed": plan.bytes.needed,
            "limit": plan.bytes.limit,
        },
        "fits": plan.bytes.over <= 0,
        "compiler_warnings": plan.update.warnings,
        "rows_of_a_micro_batch": plan.rows,
        "micro_batches": plan.micro_batches,
        "flops_of_a_micro_batch": dataclasses.asdict(plan.flops),
        "received_per_device": None if plan.traffic is None else _by_axes(plan.traffic),
        "received_by_formula": _by_axes(plan.formula_traffic),
        "step_seconds": {
            "roofline": plan.roofline.step, "in_turn": plan.roofline.in_turn, "binds": plan.roofline.binds,
            **plan.roofline.parts,
        },
        "places": None if plan.program is None else [dataclasses.asdict(one) for one in plan.program.places()],
        **speeds(question, plan),
    }  # fmt: skip


def _classes(plan: LayoutPlan) -> dict[str, int]:
    size = plan.bytes
    return {
        "parameters": size.parameters, "optimizer": size.optimizer, "gradients": size.gradients,
        "weights sent": size.sent, **({"reference": size.reference} if size.reference else {}),
        "temporaries": size.temporaries,
    }  # fmt: skip


def _by_axes(found: tuple[Traffic, ...]) -> dict[str, dict[str, float]]:
    return {
        "+".join(one.axes): {"bytes": one.received, "bytes_over_network": one.over_network} for one in found
    }  # fmt: skip


def _table(title: str, *heads: str) -> Table:
    table = new_table(title, *heads)
    for column in table.columns[1:]:
        column.justify = "right"
    return table

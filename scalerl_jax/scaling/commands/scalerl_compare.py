"""scalerl-compare: which of several runs ends higher, which gets there faster, and what to run next.

    scalerl-compare runs/a runs/b --out=compared                        two run folders
    scalerl-compare sweep.csv --x=gpu_hours --y=pass_rate --run_column=recipe --burn_in=1500 --fit_until=8000
        --baseline=ScaleRL --out=compared                               a leave-one-out table
    scalerl-compare runs/a runs/b --forecast --target=0.6 --budget=16000 --out=compared
    scalerl-compare runs/a runs/b --budget=16000 --plan_budget=8000 --out=compared

It reads files as scalerl-fit does, with its flags, fits every run, and only then writes compare.json, compare.png and
compare.svg into --out. A is compared first; if no difference is shown, B with one A for all (scaling/compare.py).
--forecast: compute to a target, score at a budget, gain of a doubling, whether to continue (scaling/forecast.py).
--plan_budget: which run to extend, and by how much, for the safest choice between them (scaling/decide.py).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scalerl_jax.cli import compare_flags as given
from scalerl_jax.cli import fit_flags
from scalerl_jax.cli.entry import UserError, run_command, user_mistakes
from scalerl_jax.scaling import decide
from scalerl_jax.scaling import forecast as forecast_lib
from scalerl_jax.scaling.backtest import hours
from scalerl_jax.scaling.commands import reading, terminal
from scalerl_jax.scaling.commands import scalerl_fit as fit_command
from scalerl_jax.scaling.compare import (
    VERDICTS,
    Comparison,
    Difference,
    compare,
    comparison_document,
    run_document,
)
from scalerl_jax.scaling.compare_plot import plot_comparison
from scalerl_jax.scaling.fit import Run
from scalerl_jax.scaling.forecast import Estimate, Forecast
from scalerl_jax.scaling.units import short_number
from scalerl_jax.system import platforms

_CURVES = 4000  # number of curves drawn for the plan
_SHOWN = 8  # extensions shown in the plan's table


def run() -> None:
    platforms.cpu_only()
    run_command(main)


def main(paths: Sequence[str]) -> None:
    console = terminal.make_console()
    # ------------------------------------------------------------------ arguments
    out = reading.check_arguments(paths, "compare")
    target, grid, seed = fit_flags.TARGET.value, fit_flags.GRID.value, fit_flags.SEED.value
    if target is not None and not given.FORECAST.value:
        raise UserError("--target: is asked of a forecast; add --forecast")
    for ignored in (fit_flags.CALIBRATION, fit_flags.BOOTSTRAP):
        if ignored.value != ignored.default:
            raise UserError(f"--{ignored.name}: is for scalerl-fit alone")
    for flag in (given.BUDGET, given.PLAN_BUDGET):
        if flag.value is not None and not (math.isfinite(flag.value) and flag.value > 0):
            raise UserError(f"--{flag.name}={flag.value:g}: must be a compute above 0")
    if given.BUDGET.value is not None and not given.FORECAST.value and given.PLAN_BUDGET.value is None:
        raise UserError("--budget: is asked of a forecast or of a plan; add --forecast or --plan_budget")

    # ------------------------------------------------------------------ read, fit, compare
    remarks: list[str] = []
    fitted = fit_command.read_and_fit(paths, remarks, parts_too=False)
    remarks += [f"{one.name}: is left out: {one.fit.verdict}" for one in fitted if not one.fit.rises]
    runs = [one for one in fitted if one.fit.rises]
    if not runs:
        raise UserError("; ".join(f"{one.name}: {one.fit.verdict}" for one in fitted))
    names = [run.name for run in runs]
    if len(runs) < 2 and not (given.FORECAST.value and given.PLAN_BUDGET.value is None):
        left_out = "; ".join(f"{one.name}: {one.fit.verdict}" for one in fitted if one not in runs)
        raise UserError(
            f"{paths[0]}: holds one run{' that rises' if left_out else ''}, {names[0]!r}; a comparison needs two "
            f"({left_out or '--run_column tells runs apart'})"
        )
    if given.BASELINE.value is not None and given.BASELINE.value not in names:
        raise UserError(f"--baseline={given.BASELINE.value}: no such run; there are {', '.join(names)}")
    highest, common = max(run.fit.initial_reward for run in runs), given.COMMON.value
    if common is not None and common <= highest:
        raise UserError(f"--common_asymptote={common:g}: is not above the {highest:.3g} that a run begins with")
    baseline = 0 if given.BASELINE.value is None else names.index(given.BASELINE.value)
    with user_mistakes():
        found = None
        if len(runs) > 1:
            found = compare(
                runs,
                baseline=baseline,
                margin=given.MARGIN.value,
                common_asymptote=common,
                grid=grid,
                seed=seed,
            )
        forecasts = [_forecast(run, target) for run in runs] if given.FORECAST.value else []
        plan = None if given.PLAN_BUDGET.value is None else _plan(runs, given.PLAN_BUDGET.value, seed)

    # ------------------------------------------------------------------ print
    label, y_label = reading.axis_labels(runs[0].x)
    for line in remarks:
        terminal.print_line(console, line)
    if found is not None:
        console.print(_table(found, label))
        for pair in found.pairs:
            terminal.print_line(console, f"{pair.sentence}.")
    if forecasts:
        console.print(_forecast_table(runs, forecasts, label))
        for run, forecast in zip(runs, forecasts):
            terminal.print_line(console, f"{run.name}: {forecast.advice}: {forecast.reason}.")
            _print_hours(console, run, forecast.budget)
    if plan is not None:
        console.print(_plan_table(plan, label))
        terminal.print_line(console, f"{plan.reason}.")
        for run in runs:
            extra = {} if plan.recommended is None else plan.recommended.extra
            _print_hours(console, run, run.reached + extra[run.name] / run.seeds if run.name in extra else None)

    # ------------------------------------------------------------------ write
    figure = None
    if found is not None:
        figure = plot_comparison(found, x_label=label, y_label=y_label)
    document: dict[str, Any] = {"x": label, "y": y_label, "grid": grid, "runs": [run_document(run) for run in runs]}
    if found is not None:
        document |= comparison_document(found)
    if forecasts:
        document["forecasts"] = [{"run": run.name, **dataclasses.asdict(one)} for run, one in zip(runs, forecasts)]
    if plan is not None:
        document["plan"] = decide.plan_document(plan)
    terminal.print_line(console, f"written: {', '.join(terminal.write(out, 'compare', document, figure))}")


def _print_hours(console: Console, run: Run, compute: float | None) -> None:
    """Prints the device-hours of so much compute of a run (of each seed), if its rows have them."""
    if compute is not None and (cost := hours(compute, run.rate)):
        each = f"each of {run.seeds} seeds " if run.seeds > 1 else ""
        terminal.print_line(console, f"{run.name}: {each}to {short_number(compute)}{cost}.")


def _forecast(run: Run, target: float | None) -> Forecast:
    with user_mistakes(before=f"{run.name}: --"):
        return forecast_lib.forecast(
            run.fit, run.reached, target=target, budget=given.BUDGET.value, worth=given.MARGIN.value
        )


def _plan(runs: Sequence[Run], budget: float, seed: int) -> decide.Plan:
    contenders = []
    for index, run in enumerate(runs):
        with user_mistakes(before=f"{run.name}: "):
            contenders.append(decide.contender(run.name, run.points, count=_CURVES, seed=seed + index))
    return decide.plan(contenders, budget, at=given.BUDGET.value, margin=given.MARGIN.value, seed=seed)


# ---------------------------------------------------------------------- terminal output


def _run_table(title: str, *heads: str) -> Table:
    table = terminal.new_table(title, "run", *heads, no_wrap=True)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"  # names may be long
    return table


def _table(found: Comparison, label: str) -> Table:
    common = "" if found.common_asymptote is None else f" with A = {found.common_asymptote:.3f}"
    title = f"against {escape(found.baseline.name)}; C is {label}; intervals 95 %, margin {found.margin:g}"
    table = _run_table(title, "A", "difference", "A is", "B", f"B{common}", "difference", "C_mid")
    for row in found.table:
        slope = row.slope
        table.add_row(
            escape(row.run.name),
            f"{row.run.fit.asymptote:.3f} {terminal.ends(row.interval_95, '{:.3f}'.format)}",
            _difference(row.asymptote, 3),
            VERDICTS[row.verdict],
            f"{row.run.fit.exponent:.2f}",
            "" if slope is None else f"{slope.exponent:.2f} {terminal.ends(slope.exponent_95, '{:.2f}'.format)}",
            _difference(row.exponent, 2),
            "" if slope is None else short_number(slope.midpoint),
        )
    return table


def _difference(found: Difference | None, digits: int) -> str:
    if found is None:
        return ""
    form = f"{{:+.{digits}f}}".format
    return f"{form(found.value)} {terminal.ends(found.interval_95, form)}"


def _estimate(found: Estimate | None, form) -> str:
    if found is None:
        return ""
    value = form(found.value) if math.isfinite(found.value) else "never"
    return f"{value} {terminal.ends((found.low, found.high), form, 'never')}"


def _forecast_table(runs: Sequence[Run], forecasts: Sequence[Forecast], label: str) -> Table:
    target, budget = forecasts[0].target, forecasts[0].budget
    heads = ["reached", "score there", "gain of a doubling"]
    heads += [] if target is None else [f"{target:g} at"]
    heads += [] if budget is None else [f"score at {short_number(budget)}"]
    table = _run_table(f"what more compute will buy; C is {label}; intervals 95 %", *heads, "advice")
    for run, one in zip(runs, forecasts):
        cells = [short_number(one.reached), _estimate(one.score, "{:.3f}".format)]
        cells.append(_estimate(one.gain_of_a_doubling, "{:+.3f}".format))
        cells += [] if target is None else [_estimate(one.compute_to_target, short_number)]
        cells += [] if budget is None else [_estimate(one.score_at_budget, "{:.3f}".format)]
        table.add_row(escape(run.name), *cells, one.advice)
    return table


def _plan_table(plan: decide.Plan, label: str) -> Table:
    what = "A" if plan.at is None else f"score at {short_number(plan.at)}"
    title = f"the next experiment: the choice is by {what}, wrong where another is better by more than {plan.margin:g}"
    heads = (f"extend by (C is {label})", "compute", "wrong afterwards", "expected shortfall", "")
    table = terminal.new_table(title, *heads, no_wrap=True)
    table.add_row("nothing", "0", f"{plan.wrong:z.1%}", f"{plan.regret:z.4f}", f"now: {escape(plan.best)}")
    shown = sorted(plan.extensions, key=lambda one: one.wrong)[:_SHOWN]
    if plan.recommended is not None and plan.recommended not in shown:
        shown.append(plan.recommended)
    for one in sorted(shown, key=lambda one: one.cost):
        names = ", ".join(f"{escape(name)} {short_number(extra)}" for name, extra in one.extra.items())
        mark = "<- this" if one is plan.recommended else ""
        table.add_row(names, short_number(one.cost), f"{one.wrong:z.1%}", f"{one.regret:z.4f}", mark)
    return table


if __name__ == "__main__":
    run()

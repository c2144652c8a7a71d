"""scalerl-calibrate: measures on complete runs how often forecasts hold, and fits the numbers that correct them.

    scalerl-calibrate configs/bank.csv --x=flops --y=pass_rate --run_column=recipe --seed_column=seed
        --task_column=task --passes=passes --trials=trials --out=calibrated
    scalerl-calibrate published.csv ... --calibration=calibrated/calibration.json --out=checked

It reads files as scalerl-fit does. Every run is forecast from 30, 50 and 70 % of its compute, by numbers fitted on the
runs of all other tasks, or of all other recipes if there is one task (runs of one name are one recipe), without those
that agree with it, and compared with all later evaluations (scaling/calibrate.py). With --calibration nothing is
fitted: the runs are forecast by the numbers of that file.
It writes calibration.json, the numbers fitted on all runs, for scalerl-fit's --calibration, and calibrate.json, .png
and .svg: coverage of the bands, continuous ranked probability score and error of the last quarter of each law, of their
average, and of the sigmoid as it is fitted without a calibration; and how often "identified" was right.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress
from rich.table import Table

from scalerl_jax.cli import fit_flags as given
from scalerl_jax.cli.entry import UserError, run_command, user_mistakes
from scalerl_jax.scaling import judged, plot, units
from scalerl_jax.scaling.average import read_calibration
from scalerl_jax.scaling.calibrate import (
    FRACTIONS,
    LEVELS,
    Densities,
    calibrate,
    cases,
    judge,
    leave_one_out,
    whole_run,
)
from scalerl_jax.scaling.commands import reading, terminal
from scalerl_jax.scaling.judged import Summary, summaries
from scalerl_jax.scaling.points import TooFewPoints
from scalerl_jax.system import platforms
from scalerl_jax.system.files import write_whole


def run() -> None:
    platforms.cpu_only()
    run_command(main)


def main(paths: Sequence[str]) -> None:
    console = terminal.make_console()
    out = reading.check_arguments(paths, "calibrate")
    for flag in (given.PASSES, given.TRIALS):
        if flag.value is None:
            raise UserError(f"--{flag.name}: no column given; without counts the noise of an evaluation is not known")
    for ignored in (given.R0, given.BURN_IN, given.FIT_UNTIL, given.GRID, given.BOOTSTRAP, given.TARGET):
        if ignored.value != ignored.default:
            raise UserError(
                f"--{ignored.name}: is not for scalerl-calibrate, which takes R0 and all evaluations from the rows"
            )
    path = given.CALIBRATION.value
    with user_mistakes():
        numbers = read_calibration(path) if path is not None else None
    evaluations = reading.read_evaluations(paths, parts_too=False)
    runs = []
    with user_mistakes():
        factor = units.conversion(given.X_UNIT.value)[0]
        for one in evaluations:
            assert one.counts is not None
            name = f"{one.name} {one.seed}".strip()
            passes, trials = one.counts.passes.sum(axis=1), one.counts.total
            with user_mistakes(before=f"{one.source}: {name}: "):
                try:
                    runs.append(whole_run(name, one.name, one.compute * factor, passes, trials, task=one.task))
                except TooFewPoints as error:
                    terminal.print_line(console, f"{one.source}: {name} is left out: {error}")
    recipes, tasks = ({getattr(one, what) for one in runs} for what in ("recipe", "task"))
    with user_mistakes(), Progress(console=console, transient=True) as progress:
        first = progress.add_task("runs foretold", total=len(runs))
        found = cases(runs, tick=lambda: progress.advance(first))
        if numbers is None:
            second = progress.add_task("runs left out", total=len(runs))
            scores = leave_one_out(found, tick=lambda: progress.advance(second))
            numbers, by = calibrate(Densities(found)), f"those of other {'tasks' if len(tasks) > 1 else 'recipes'}"
        else:
            if not found:
                raise ValueError("no run has points enough")
            scores, by = [judge(case, numbers) for case in found], str(path)
        third = progress.add_task("sigmoids fitted", total=len(found))
        sigmoids = [judged.sigmoid(case, tick=lambda: progress.advance(third)) for case in found]

    table = summaries(found, scores, sigmoids)
    what = f"{len(runs)} runs of {len(recipes)} recipes" + (f" on {len(tasks)} tasks" if len(tasks) > 1 else "")
    console.print(_table(table, f"later evaluations of {what}, foretold by {by}"))
    for fraction in FRACTIONS:
        terminal.print_line(console, judged.identified_sentence(found, sigmoids, fraction))
    document: dict[str, Any] = {
        "x": reading.axis_labels(evaluations[0].x)[0],
        "runs": len(runs),
        "recipes": len(recipes),
        "tasks": len(tasks),
        "levels": LEVELS,
        "summaries": [one._asdict() for one in table],
        "cases": [judged.case_document(*both) for both in zip(found, scores, sigmoids)],
    }
    written = terminal.write(out, "calibrate", document, _figure(table))
    if path is None:
        written.insert(0, os.path.join(out, "calibration.json"))
        write_whole(written[0], numbers.text())
    terminal.print_line(console, f"written: {', '.join(written)}")


def _table(rows: Sequence[Summary], title: str) -> Table:
    heads = ["from", "forecast of", *(f"within {level:.0%}" for level in LEVELS), "CRPS"]
    heads += ["|error| mean", "median", "bias", "width"]
    table = terminal.new_table(title, *heads, no_wrap=True)
    last = None
    for row in rows:
        if last not in (None, row.fraction):
            table.add_section()
        covered = ["" if row.covered is None else f"{share:.0%}" for share in row.covered or LEVELS]
        crps = "" if row.crps is None else f"{row.crps:.4f}"
        width = "" if row.width is None else f"{row.width:.3f}"
        table.add_row(
            "" if last == row.fraction else f"{row.fraction:.0%}", row.forecast, *covered, crps,
            f"{row.mean_error:.3f}", f"{row.median_error:.3f}", f"{row.bias:+.3f}", width,
        )  # fmt: skip
        last = row.fraction
    return table


def _figure(rows: Sequence[Summary]) -> Figure:
    """Actual against nominal coverage of the bands, one panel a fraction."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    panels = figure.subplots(1, len(FRACTIONS), sharex=True, sharey=True)
    for axes, fraction in zip(np.atleast_1d(panels), FRACTIONS):
        plot.style_axes(axes, x_label="the band says", y_label="it held")
        axes.plot([0.4, 1], [0.4, 1], color=plot.GREY, linewidth=1, linestyle=(0, (4, 3)))
        shown = [row for row in rows if row.fraction == fraction and row.covered is not None]
        for row, colour in zip(shown, plot.COLOURS):
            wide = 2.6 if row.forecast == "average" else 1.3
            axes.plot(LEVELS, row.covered, "o-", color=colour, linewidth=wide, markersize=4, label=row.forecast)
        axes.xaxis.set_major_formatter(axes.yaxis.get_major_formatter())
        axes.set_title(f"from {fraction:.0%} of the compute", loc="left", fontsize=10)
    handles, labels = np.atleast_1d(panels)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    run()

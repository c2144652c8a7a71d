"""scalerl-fit: fits a scaling law to files of evaluations, and prints what it does and does not identify.

    scalerl-fit runs/a/evals.csv --x=gpu_hours --y=pass_rate --burn_in=1500 --fit_until=half --out=fits/a
    scalerl-fit runs/a runs/b --out=fits/both                    two run folders: x, y and counts are known
    scalerl-fit sweep/*/seed*.csv --seeds=folder --x=step --y=acc --r0=fit --out=fits/sweep
    scalerl-fit trl/checkpoint-500 --y=eval_reward --r0=fit --out=fits/trl        transformers' trainer_state.json
    scalerl-fit runs/a --watch --out=fits/a                      again after each evaluation

It reads every file, fits every run, and only then writes fit.json, fit.png and fit.svg into --out. Wrong input ends it
with one line and exit code 2 before a file is written.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl.flags import FLAGS
from rich.markup import escape
from rich.table import Table

from scalerl_jax.cli import command_flags
from scalerl_jax.cli import fit_flags as given
from scalerl_jax.cli.entry import UserError, run_command, user_mistakes
from scalerl_jax.scaling import fit_sigmoid, readers, units
from scalerl_jax.scaling.average import Calibration, average_forecast, default_calibration, read_calibration
from scalerl_jax.scaling.backtest import HALF, LEVEL, hours, judged, of_asymptote, statement
from scalerl_jax.scaling.commands import reading, terminal, watch
from scalerl_jax.scaling.fit import SEED_MARGIN, Run
from scalerl_jax.scaling.forecast import Estimate
from scalerl_jax.scaling.plot import plot_fits
from scalerl_jax.scaling.profile import PARAMETERS
from scalerl_jax.scaling.units import short_number
from scalerl_jax.system import platforms

# Names of arguments in fit_sigmoid's messages -> the flags that set them.
_FLAG_OF = {"initial_reward": "--r0", "burn_in": "--burn_in", "fit_until": "--fit_until", "grid=": "--grid="}


def run() -> None:
    command_flags.watch()
    platforms.cpu_only()
    run_command(once_or_watching)


def once_or_watching(paths: Sequence[str]) -> None:
    if FLAGS.watch:
        watch.watch(paths, main, every=FLAGS.watch_every, console=terminal.make_console())
    else:
        main(paths)


def main(paths: Sequence[str]) -> None:
    console = terminal.make_console()
    out = reading.check_arguments(paths, "fit")
    remarks: list[str] = []
    with user_mistakes():
        path = given.CALIBRATION.value
        calibration = default_calibration() if path is None else read_calibration(path)
    fitted = read_and_fit(paths, remarks)
    label, y_label = reading.axis_labels(fitted[0].x)
    ahead = [_ahead(one, calibration, label) for one in fitted]

    # ------------------------------------------------------------------ print
    for line in remarks:
        terminal.print_line(console, line)
    console.print(_table(fitted, label, console.width))
    for result, found in zip(fitted, ahead):
        terminal.print_line(console, f"{result.name}: {of_asymptote(result.fit, result.rate)}.")
        if found is not None:
            terminal.print_line(console, f"{result.name}: {found[1]}.")
        if given.TARGET.value is not None and result.fit.rises:
            terminal.print_line(console, f"{result.name}: {_reach(result, given.TARGET.value, label)}.")
    console.print(
        f"±{SEED_MARGIN:g}: what runs that differ only in their seed showed in the paper. The interval of a single run "
        "does not hold it; that of --bootstrap does where there are several seeds.",
        soft_wrap=True,
    )

    # ------------------------------------------------------------------ write
    figure = plot_fits(fitted, x_label=label, y_label=y_label)
    try:
        *pictures, document = terminal.write(out, "fit", _document(fitted, ahead, label, y_label), figure)
    except OSError as error:
        raise UserError(f"--out={out}: {error.strerror}") from error
    console.print(f"written: {', '.join([document, *pictures])}")


def read_and_fit(paths: Sequence[str], remarks: list[str], *, parts_too: bool = True) -> list[Run]:
    """Fits each run in the files, its seeds together, as the flags ask. remarks: gets new remarks, each once.
    parts_too: also fits each environment of a mixture.

    Raises UserError.
    """
    # ------------------------------------------------------------------ arguments
    if (given.PASSES.value is None) != (given.TRIALS.value is None):
        raise UserError("--passes and --trials go together")
    initial = _number_or("r0", given.R0.value, "fit")
    until = _number_or("fit_until", given.FIT_UNTIL.value, "half")
    with user_mistakes():
        factor = units.conversion(given.X_UNIT.value)[0]

    # ------------------------------------------------------------------ read
    evaluations = reading.read_evaluations(paths, parts_too=parts_too)
    remarks += [remark for one in evaluations for remark in one.remarks if remark not in remarks]
    groups = _seeds_together(evaluations)

    # ------------------------------------------------------------------ fit
    # One scale for all runs: if one has rewards below 0, all are rewards.
    every = np.concatenate([one.reward for one in evaluations])
    scale, remark = units.find_scale(every, given.Y_SCALE.value)
    remarks += [remark] if remark and remark not in remarks else []
    fitted = [_fit(name, members, factor, initial, until, scale) for name, members in groups.items()]
    remarks += [
        f"{one.name}: {one.fit.points} rows are fitted as {one.fit.bins} bins of compute, each as heavy as its rows"
        for one in fitted
        if one.fit.bins is not None
    ]
    return fitted


def _seeds_together(evaluations: list[readers.RunPoints]) -> dict[str, list[readers.RunPoints]]:
    """Runs by unique name, each with its seeds. Raises UserError where two files have the same seed of a run."""
    groups: dict[tuple[str, str], list[readers.RunPoints]] = {}
    for index, one in enumerate(evaluations):
        if given.SEEDS.value == "folder":
            apart = one.folder
        elif given.SEED_COLUMN.value is None:
            apart = str(index)
        else:  # only a column tells that rows of several files are of one run
            apart = one.source if given.RUN_COLUMN.value is None else ""
            for other in groups.get((one.name, apart), ()):
                if other.seed == one.seed:
                    raise UserError(f"{one.source}: seed {one.seed!r} of {one.name!r} is in {other.source} too")
        groups.setdefault((one.name, apart), []).append(one)
    named: dict[str, list[readers.RunPoints]] = {}
    names = [name for name, _ in groups]
    for (name, _), members in groups.items():
        apart = f"{name} ({members[0].source})" if names.count(name) > 1 else name
        again = f"{apart} {len(named) + 1}" if apart in named else apart  # the same file given twice
        named[again] = members
    return named


def _number_or(flag: str, text: str | None, word: str) -> float | str | None:
    if text is None or text == word:
        return text
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"--{flag}={text}: must be a number or '{word}'") from None
    if not math.isfinite(number):
        raise UserError(f"--{flag}={text}: must be finite")
    return number


def _fit(name: str, members: list[readers.RunPoints], factor: float, initial, until, scale: str) -> Run:
    """Fits one run, its seeds together."""
    compute, raw, counts, label = readers.seeds_together(members)
    compute = compute * factor
    reward = units.to_accuracy(raw, scale)
    behind = np.cumsum([len(one.compute) for one in members])

    def place_of(row: int) -> str:
        member = int(np.searchsorted(behind, row, side="right"))
        return members[member].place(row - int(behind[member]) + len(members[member].compute))

    outside = (reward < 0) | (reward > 1)
    if outside.any():
        row = int(np.argmax(outside))
        hint = "; --y_scale=percent?" if given.Y_SCALE.value == "auto" and 1 < raw.max() <= 100 else ""
        low, high = units.RANGES[scale]
        raise UserError(f"{place_of(row)}: {scale} {raw[row]:g} is outside its range, {low} to {high}{hint}")
    try:
        fit = fit_sigmoid(
            compute,
            reward,
            initial_reward=initial,
            burn_in=given.BURN_IN.value,
            fit_until=until,
            counts=counts,
            run=label,
            grid=given.GRID.value,
            bootstrap=given.BOOTSTRAP.value,
            population=given.PROMPTS.value == "population",
            seed=given.SEED.value,
        )
    except ValueError as error:
        text = str(error)
        for argument, flag in _FLAG_OF.items():
            text = text.replace(argument, flag)
        named = re.search(r"row (\d+): ", text)
        if named is None:
            place = ", ".join(dict.fromkeys(one.source for one in members))
        else:
            place, text = place_of(int(named[1])), text.replace(named[0], "")
        raise UserError(f"{place}: {text}") from error
    rate = readers.hours_rate(members)
    return Run(name, compute, reward, fit, None if rate is None else rate / factor, members[0].x)


def _table(fitted: list[Run], label: str, width: int) -> Table:
    title = f"R0 + (A - R0) / (1 + (C_mid / C)^B), C is {label}; intervals 95 %"
    heads = ("run", "A", "seeds", "B", "C_mid", "R0", "points", "residual", "identified", "error held out")
    table = terminal.new_table(title, *heads, overflow="fold")
    table.columns[0].min_width = 10
    # Intervals are on the same line as the value if the table is wide enough, else below it.
    between = " " if width >= terminal.WIDE else "\n"
    forms = ("{:.3f}".format, "{:.2f}".format, short_number)
    for one in fitted:
        fit = one.fit
        error, rises = one.held_error, fit.rises
        a, b, c = (
            f"{form(getattr(fit, name))}{between}{terminal.ends(fit.intervals[name], form)}" if rises else fit.trend
            for name, form in zip(PARAMETERS, forms)
        )
        table.add_row(
            escape(one.name),
            a,
            f"±{SEED_MARGIN:g}" if one.seeds == 1 else f"{one.seeds} here",
            b,
            c,
            f"{fit.initial_reward:.3f}",
            f"{fit.points}",
            f"{fit.ssr:.2e}",
            "yes" if fit.identified else "no",
            "" if error is None or not rises else f"{error:+.3f} at {int(one.held.sum())}",
        )
        if fit.samples is not None and rises:
            a, b, c = (terminal.ends(fit.bootstrap_interval(name), form) for name, form in zip(PARAMETERS, forms))
            table.add_row(f"  {len(fit.samples)} resamples", a, "", b, c)
    return table


def _reach(one: Run, target: float, label: str) -> str:
    needed = one.fit.compute_to_reach(target)
    if not math.isfinite(needed):
        return f"the fitted curve never reaches {target:g}"
    return f"the fitted curve reaches {target:g} at {short_number(needed)} {label}{hours(needed, one.rate)}"


def _ahead(one: Run, calibration: Calibration, label: str) -> tuple[dict[str, Any], str] | None:
    """The forecast; None with the paper's procedure, or if the noise cannot be estimated from the points."""
    if given.GRID.value == "paper":
        return None
    try:
        return forecast_ahead(one, calibration, label, half=given.FIT_UNTIL.value == "half")
    except ValueError:
        return None


def _document(fitted: list[Run], ahead: list[tuple[dict[str, Any], str] | None], x_label: str, y_label: str) -> dict:
    fits = []
    for one, forecast in zip(fitted, ahead):
        fit = one.fit
        rises = fit.rises  # otherwise the parameters mean nothing, and are null
        entry = {
            "run": one.name,
            "trend": fit.trend,
            **{name: getattr(fit, name) if rises else None for name in PARAMETERS},
            "initial_reward": fit.initial_reward,
            "intervals_95": {name: ends if rises else None for name, ends in fit.intervals.items()},
            "ssr": fit.ssr,
            "points": fit.points,
            "bins": fit.bins,
            "seeds": one.seeds,
            "identified": fit.identified,
            "compute_to_identify": fit.compute_to_identify,
            "verdict": fit.verdict,
            "held_out": int(one.held.sum()),
            "held_out_error": one.held_error if rises else None,
        }
        if forecast is not None:
            entry["ahead"] = forecast[0]
        if fit.samples is not None and rises:
            entry["bootstrap_95"] = {name: fit.bootstrap_interval(name) for name in PARAMETERS}
        if given.TARGET.value is not None and rises:
            entry["target"] = given.TARGET.value
            entry["compute_to_target"] = fit.compute_to_reach(given.TARGET.value)
        fits.append(entry)
    return {
        "x": x_label,
        "y": y_label,
        "grid": given.GRID.value,
        "burn_in": given.BURN_IN.value,
        "fit_until": _number_or("fit_until", given.FIT_UNTIL.value, "half"),
        "bootstrap": given.BOOTSTRAP.value,
        "bootstrap_prompts": given.PROMPTS.value,
        "seed_margin": SEED_MARGIN,
        "fits": fits,
    }


def forecast_ahead(one: Run, calibration: Calibration, axis: str, *, half: bool) -> tuple[dict[str, Any], str]:
    """The forecast for fit.json, in the fit's units, and in words. half: the points are those up to half the compute.

    Raises ValueError if the noise cannot be estimated from the points.
    """
    ahead = average_forecast(one.points, calibration)
    seen = HALF if half else f"at {short_number(one.reached)}"
    if not one.held.any():
        end = 2 * one.reached
        (low,), (high,) = ahead.band(end, level=LEVEL)
        score = Estimate(float(ahead.predict(end)[0]), float(low), float(high))
        found, text = {}, statement(seen, axis, score, "at twice the compute") + hours(end, one.rate)
    else:
        later = judged(one.compute, one.reward, one.fit, ahead, seen)
        end, score = float(one.compute.max()), later.score
        found = {"measured": later.measured, "held_out_within_90": later.within, "held_out_points": later.later}
        text = f"{later.statement(axis)}; {later.outcome}"
    interval = (score.low, score.high)
    document = {"compute": end, "score": score.value, "interval_90": interval, "weights": ahead.law_weights, **found}
    return document, text


if __name__ == "__main__":
    run()

"""The summary at a run's end: a table, curve.png with the forecast made at half of the compute, completions to read.

The last lines are the signs past their limits, the forecast and its outcome, and where the report is. Everything is
read from the run folder, so that it can be shown again later.
"""

import collections
import os
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scalerl_jax.report.health import collapses
from scalerl_jax.report.page import read_settings, write_report
from scalerl_jax.report.samples import sample_files
from scalerl_jax.report.score import asymptote, backtest
from scalerl_jax.run.alarms import Alarm, alarms
from scalerl_jax.run.jsonl import environments_of, read_rows
from scalerl_jax.scaling.backtest import Backtest
from scalerl_jax.scaling.readers import RUN_FOLDER_X
from scalerl_jax.scaling.units import axis_name
from scalerl_jax.system import files

_AXIS = axis_name(RUN_FOLDER_X)


def show(workdir: str, console: Console | None = None) -> None:
    """Prints the table and three completions of the latest sample, and writes curve.png and report.html."""
    if console is None:
        console = Console(highlight=False, emoji=False)
        if not console.is_terminal:
            console.width = 140  # lines of a log are not wrapped
    evals = read_rows(os.path.join(workdir, "evals.jsonl"))
    metrics = read_rows(os.path.join(workdir, "metrics.jsonl"))
    forecast, why_not = backtest(evals)
    console.print(table(evals, metrics, forecast))
    if why_not:
        console.print(f"no forecast: {why_not}", markup=False)
    _draw(forecast, os.path.join(workdir, "curve.png"), console, evals)
    for name, rows in environments_of(evals).items():
        of_part, why_not = backtest(rows)
        if why_not:
            console.print(f"no forecast of {name}: {why_not}", markup=False)
        _draw(of_part, os.path.join(workdir, f"curve-{name}.png"), console, rows)
    for sample in last_samples(workdir, 3):
        console.print(_completion(sample))
    console.print()
    for alarm in (*collapses(metrics, evals), *_past_limits(workdir, metrics)):
        console.print(f"{'ALARM' if alarm.loud else 'warning'}: {alarm}", markup=False, soft_wrap=True)
    if forecast is not None:
        console.print(f"{forecast.statement(_AXIS)}; {forecast.outcome}", markup=False, soft_wrap=True)
        console.print(asymptote(evals), markup=False, soft_wrap=True)
    try:
        console.print(f"report: {write_report([workdir])}", markup=False, soft_wrap=True)
    except (OSError, ValueError) as error:  # the run is complete without it
        console.print(f"no report.html: {error}", markup=False, soft_wrap=True)


def _past_limits(workdir: str, metrics: list[dict[str, Any]]) -> list[Alarm]:
    try:
        return alarms(metrics, read_settings(workdir))
    except ValueError:  # the config is damaged: the line on the report has the reason
        return []


def _draw(forecast: Backtest | None, path: str, console: Console, evals: list[dict[str, Any]]) -> None:
    if forecast is None:
        return
    samples = " and ".join(map(str, sorted({row["samples"] for row in evals})))  # the number may change at a restart
    from scalerl_jax.scaling.plot import plot_forecast  # matplotlib, which training does not need

    try:
        plot_forecast(
            forecast,
            path,
            axis=_AXIS,
            y_label=f"held-out pass rate, mean@{samples}",
            more=asymptote(evals),
        )
        console.print(f"curve: {path}", markup=False, soft_wrap=True)
    except OSError as error:  # the run is complete without it
        console.print(f"no {os.path.basename(path)}: {files.reason(error)}", markup=False, soft_wrap=True)


def table(evals: list[dict[str, Any]], metrics: list[dict[str, Any]], forecast: Backtest | None) -> Table:
    out = Table(title="the run", show_header=False, title_justify="left")
    out.add_column(style="bold")
    out.add_column()
    if evals:
        first, last = evals[0], evals[-1]
        after = f"step {last['step']}, {len(evals)} evaluations"
        if _asked(first) != _asked(last):
            after += f", {_asked(last)}"
        out.add_row("pass rate before", f"{first['pass_rate']:.3f}   ({_asked(first)})")
        out.add_row("pass rate after", f"{last['pass_rate']:.3f}   ({after})")
        for name, rows in environments_of(evals).items():
            counts = " and ".join(dict.fromkeys(str(row["prompts"]) for row in (rows[0], rows[-1])))
            rates = f"{rows[0]['pass_rate']:.3f} to {rows[-1]['pass_rate']:.3f}"
            out.add_row(f"  of {name}", f"{rates}   ({counts} held-out prompts)")
    if forecast is not None:
        made, _, predicted = forecast.statement(_AXIS).partition(": ")
        measured, came = forecast.outcome.split(" ", 1)
        out.add_row(made, predicted)
        out.add_row(measured, came)
        out.add_row("still to gain at half", f"{forecast.gain_ahead:.0%} of the final gain")
    if metrics:
        compute = metrics[-1]["compute"]
        out.add_row("updates", f"{metrics[-1]['step']}, of them {metrics[-1]['optimizer_step']} with a gradient")
        tokens = f"{compute['sampled_tokens']:,} sampled, {compute['trained_tokens']:,} trained on"
        out.add_row("tokens", f"{tokens}, {compute['evaluation_tokens']:,} for evaluations")
        for side in ("trainer", "generator"):
            busy, idle = compute[f"{side}_busy_hours"], compute[f"{side}_idle_hours"]
            rest = f"evaluation {compute[f'{side}_evaluation_hours']:.4f}, set-up {compute[f'{side}_setup_hours']:.4f}"
            stalled = compute.get(f"{side}_stalled_hours", 0.0)  # rows of older versions have none
            if stalled > 0.05 * (busy + idle):  # every run stalls a little while it saves
                rest += f", stalled {stalled:.4f}"
            out.add_row(f"{side} device-hours", f"busy {busy:.4f}, idle {idle:.4f} ({rest})")
        lags = collections.Counter[int]()
        for row in metrics:
            lags.update({int(lag): count for lag, count in row["lags"].items()})
        total = max(1, lags.total())
        mean = sum(lag * count for lag, count in lags.items()) / total
        shares = ", ".join(f"{lag}: {lags[lag] / total:.0%}" for lag in sorted(lags))
        out.add_row("staleness in updates", f"mean {mean:.2f}, most {max(lags, default=0)}   ({shares})")
        out.add_row("prompts retired", f"{metrics[-1]['prompts_retired']}")
        out.add_row("interrupted, truncated", f"{_mean(metrics, 'interrupted'):.1%}, {_mean(metrics, 'truncated'):.1%}")
        if "repetitive" in metrics[-1]:  # rows of older versions have none
            out.add_row("ended in a loop", f"{_mean(metrics, 'repetitive'):.1%}")
    return out


def _asked(evaluation: dict[str, Any]) -> str:
    return f"{evaluation['prompts']} held-out prompts x {evaluation['samples']}"


def last_samples(workdir: str, count: int) -> list[dict[str, Any]]:
    """Completions of the latest update that has samples."""
    found = sample_files(os.path.join(workdir, "rollouts"))
    return read_rows(found[-1][1])[:count] if found else []


def _completion(sample: dict[str, Any]) -> Text:
    outcome, (branch, branches) = "right" if sample["verdict"] else "wrong", sample.get("branch", (1, 1))
    of_several = f", branch {branch} of {branches}" if branches > 1 else ""
    about = f"answer {sample['answer']}, {sample['finish_reason']}"
    text = Text(f"\nstep {sample['step']}{of_several}, {outcome} ({about})\n", style="bold")
    text.append(sample["prompt"], style="not bold cyan")
    text.append(sample["completion"], style="not bold")
    return text


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows if name in row]))

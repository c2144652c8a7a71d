"""The results of a study as files: study.json, evaluations.csv, study.html. Each is written whole or not at all."""

import csv
import dataclasses
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scalerl_jax.config import Config
from scalerl_jax.report import page
from scalerl_jax.report.log_rows import rounded
from scalerl_jax.report.score import curve
from scalerl_jax.run.jsonl import column
from scalerl_jax.scaling import readers
from scalerl_jax.scaling.commands import terminal
from scalerl_jax.scaling.compare import comparison_document, run_document
from scalerl_jax.scaling.units import axis_name, short_number
from scalerl_jax.study.members import Study
from scalerl_jax.study.study_results import Member, Results, StudyResults
from scalerl_jax.system.files import plain, write_whole

JSON, CSV, PAGE = "study.json", "evaluations.csv", "study.html"
COLUMNS = (
    "run", "recipe", "task", "members", "seed", "config", "step", "device_hours", "flops", "passes", "trials",
    "pass_rate",
)  # fmt: skip
_SCRIPTS = ("dom", "charts", "study", "theme")


def write(
    workdir: str,
    study: Study,
    found: Results,
    *,
    command: str,
    commands: Mapping[str, str],
    finished: Sequence[str],
) -> list[str]:
    """Writes the files and returns their paths. command: the study's. commands: each run's. finished: finished runs."""
    paths = [os.path.join(workdir, name) for name in (CSV, PAGE, JSON)]
    write_whole(paths[0], evaluations(study, found))
    write_whole(paths[1], page.render(_page(workdir, study, found, command, commands, finished), scripts=_SCRIPTS))
    document = _document(study, found, command, commands, finished)
    write_whole(paths[2], json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    return paths


def _members_of(study: Study, run: str) -> list[str]:
    """STUDY/MEMBER of every member that the run belongs to."""
    return [
        f"{name}/{member}" for name, members in study.members.items() for member, runs in members.items() if run in runs
    ]


def evaluations(study: Study, found: Results) -> str:
    """A CSV table with COLUMNS of every evaluation. recipe: the first of the runs that differ only in the seed; task:
    its environments; flops: the row's model FLOPs of trainer and generators. scalerl-fit and scalerl-calibrate read it.
    """
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    recipes: dict[str, str] = {}
    for run, config in study.runs.items():
        recipes.setdefault(_recipe(study, config), run)
    for run, rows in found.rows.items():
        config = study.runs[run]
        given = (flag.removeprefix("--") for flag in study.flags(config))
        flags = " ".join(flag for flag in given if not flag.startswith("config.model.path="))  # a path on this machine
        for row in rows:
            table.writerow([
                run, recipes[_recipe(study, config)], _task(config), " ".join(_members_of(study, run)), config.seed,
                flags, row["step"], _short(row.get("device_hours")), _short(row.get("model_flops")),
                sum(row["passes"]), len(row["passes"]) * row["samples"], _short(row["pass_rate"]),
            ])  # fmt: skip
    return out.getvalue()


def _recipe(study: Study, config: Config) -> str:
    return "\n".join(flag for flag in study.flags(config) if not flag.startswith("--config.seed="))


def _task(config: Config) -> str:
    return " + ".join(dict.fromkeys(part.name for part in (config.mixture or {"": config.environment}).values()))


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"


def _document(
    study: Study, found: Results, command: str, commands: Mapping[str, str], finished: Sequence[str]
) -> dict[str, Any]:
    return {
        "written": time.time(),
        "command": command,
        "x": found.x,
        "y": readers.RUN_FOLDER_Y,
        "runs": {
            name: {
                "members": _members_of(study, name),
                "seed": config.seed,
                "command": commands[name],
                "steps": config.max_steps,
                "step": found.rows[name][-1]["step"] if name in found.rows else None,
                "finished": name in finished,
            }
            for name, config in study.runs.items()
        },
        "studies": {one.name: _study_document(one) for one in found.studies},
    }


def _study_document(one: StudyResults) -> dict[str, Any]:
    return {
        "baseline": one.baseline,
        "members": [_member_document(member) for member in one.members],
        "not_evaluated": one.missing,
        "comparison": None if one.comparison is None else comparison_document(one.comparison),
        "margin": None if one.margin is None else dataclasses.asdict(one.margin),
        "sentences": sentences(one),
    }


def _member_document(one: Member) -> dict[str, Any]:
    return {
        "member": one.name,
        "runs": one.runs,
        "fit": None if one.curve is None else run_document(one.curve),
        "trend": None if one.fitted is None else one.fitted.fit.trend,
        "why": one.why,
        "first": one.first,
        "last_quarter": one.last,
        "last_quarter_by_seed": one.last_by_seed,
        "device_hours": one.device_hours,
    }


# ---------------------------------------------------------------------- the page


def _page(
    workdir: str,
    study: Study,
    found: Results,
    command: str,
    commands: Mapping[str, str],
    finished: Sequence[str],
) -> dict[str, Any]:
    return {
        "written": time.time(),
        "runs": [{"name": os.path.basename(os.path.abspath(workdir))}],  # the page's title
        "x": found.x,
        "finished": len(finished),
        "planned": len(study.runs),
        "heads": HEADS,
        "studies": [
            {
                "name": one.name,
                "baseline": one.baseline,
                "members": [_drawn(member, found) for member in one.members],
                "sentences": sentences(one),
            }
            for one in found.studies
        ],
        "command": command,
        "commands": [[name, commands[name]] for name in study.runs],
    }


def _drawn(one: Member, found: Results) -> dict[str, Any]:
    rows = [row for run in one.runs for row in found.rows[run]]
    x = np.concatenate([column(found.rows[run], found.x) for run in one.runs])
    order = np.argsort(x, kind="stable")
    rows, x = [rows[at] for at in order], x[order]
    return {
        "name": one.name,
        "runs": one.runs,
        "cells": cells(one),
        "step": [row["step"] for row in rows],
        "x": rounded(x),
        "y": rounded(row["pass_rate"] for row in rows),
        "curve": None if one.curve is None else curve(one.curve.fit, x, "all evaluations"),
        "why": one.why,
    }


HEADS = (
    "member", "seeds", "A", "B", "C_mid", "points", "identified", "first", "last quarter", "device-hours",
)  # fmt: skip


def show(console: Console, found: Results) -> None:
    for one in found.studies:
        console.print(_table(one, found.x))
        for line in sentences(one):
            terminal.print_line(console, line)


def sentences(one: StudyResults) -> list[str]:
    """The result lines of one study, in order."""
    lines = [f"{line}." for line in one.left_out]
    if one.missing:
        lines.append(f"not evaluated yet: {', '.join(one.missing)}.")
    if one.comparison is not None:
        lines += [f"{pair.sentence}." for pair in one.comparison.pairs]
    if one.margin is not None:
        lines += [f"{line}." for line in one.margin.sentences()]
    return lines


def cells(one: Member) -> list[str]:
    """The cells of a member's row, one for each of HEADS."""
    seeds = f"{len(one.runs)} of {len(one.all_runs)}" if len(one.runs) < len(one.all_runs) else str(len(one.runs))
    ends = [f"{one.first:.3f}", f"{one.last:.3f}", f"{one.device_hours:.3g}"]
    if one.fitted is None:
        return [one.name, seeds, "", "", "", "", "too few points", *ends]
    fit = one.fitted.fit
    if one.curve is None:
        return [one.name, seeds, "", "", "", str(fit.points), fit.trend, *ends]
    low, high = fit.intervals["asymptote"]
    return [
        one.name, seeds, f"{fit.asymptote:.3f} [{low:.3f}, {high:.3f}]", f"{fit.exponent:.2f}",
        short_number(fit.midpoint), str(fit.points), "yes" if fit.identified else "no", *ends,
    ]  # fmt: skip


def _table(found: StudyResults, x: str) -> Table:
    title = (
        f"{found.name}: R0 + (A - R0) / (1 + (C_mid / C)^B), C is {axis_name(x)}; intervals 95 %; pass rates held out"
    )
    table = terminal.new_table(title, *HEADS, overflow="fold")
    table.columns[0].min_width = 10
    for one in found.members:
        table.add_row(*map(escape, cells(one)))
    return table

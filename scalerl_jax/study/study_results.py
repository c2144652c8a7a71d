"""The results of a study: each member's evaluations and the sigmoid fitted to them, one curve for all its seeds; then
the comparison of every member with the baseline, as in scalerl-compare, and the differences that seeds alone cause.

Reads the run folders as they are: a study that is still running has results too.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.special

from scalerl_jax.cli.entry import user_mistakes
from scalerl_jax.run.jsonl import read_rows
from scalerl_jax.scaling import fit_sigmoid, readers, tables
from scalerl_jax.scaling.compare import Comparison, compare
from scalerl_jax.scaling.fit import Run
from scalerl_jax.study.members import Study, only_seeds

LAST = 0.75  # of a run's compute: evaluations beyond are its last quarter
_NORMAL_95 = 1.96


@dataclasses.dataclass(frozen=True)
class Member:
    """One member of a study, with all its seeds."""

    name: str
    runs: tuple[str, ...]  # runs with evaluations
    all_runs: tuple[str, ...]
    fitted: Run | None  # None: too few evaluations
    why: str  # why there is no rising curve; "" if there is one
    first: float  # pass rate of the first evaluations
    last: float  # mean pass rate of the last quarter of the compute
    last_by_seed: tuple[float, ...]
    last_variance: tuple[float, ...]  # of each seed's mean, from the sampling of completions; NaN: not known
    device_hours: float

    @property
    def curve(self) -> Run | None:
        """The fitted curve if it rises, else None."""
        return self.fitted if self.fitted is not None and self.fitted.fit.rises else None


@dataclasses.dataclass(frozen=True)
class Margin:
    """The spread of members that differ only in their seed, and the spread expected from noise alone."""

    seeds: int
    asymptote: float | None  # the largest difference in A between two of them
    asymptote_noise: float | None  # expected from noise, on average
    last_quarter: float  # the largest difference in the mean of the last quarter
    last_quarter_noise: float | None

    def sentences(self) -> list[str]:
        def one(what: str, value: float | None, noise: float | None) -> str:
            if value is None:
                return f"{what} is not known for two seeds"
            alone = "" if noise is None else f"; noise of the evaluations alone would give {noise:.3f} on average"
            return f"{what} between two of {self.seeds} seeds is {value:.3f}{alone}"

        return [
            one("the largest difference in A", self.asymptote, self.asymptote_noise),
            one("the largest difference in the mean of the last quarter", self.last_quarter, self.last_quarter_noise),
        ]


@dataclasses.dataclass(frozen=True)
class StudyResults:
    name: str
    members: tuple[Member, ...]  # those with evaluations
    missing: tuple[str, ...]  # those without
    baseline: str
    comparison: Comparison | None
    left_out: tuple[str, ...]  # a line on each member left out of the comparison
    margin: Margin | None


@dataclasses.dataclass(frozen=True)
class Results:
    x: str
    rows: dict[str, list[dict[str, Any]]]  # run -> rows of evals.jsonl; only runs with rows
    studies: tuple[StudyResults, ...]


def results(study: Study, runs_folder: str, *, x: str, baseline: str = "") -> Results:
    """Raises UserError where a run's rows cannot be read, or have no column `x`."""
    rows, found = dict[str, list[dict[str, Any]]](), dict[str, readers.RunPoints]()
    for name in study.runs:
        folder = os.path.join(runs_folder, name)
        path = os.path.join(folder, tables.RUN_FOLDER_FILE)
        with user_mistakes():
            there = read_rows(path) if os.path.isfile(path) else []
        if there:
            rows[name] = there
            with user_mistakes(tables.InputError):
                found[name] = readers.read_runs([folder], x=x, y=None, parts_too=False)[0]
    known: dict[tuple[str, ...], Member] = {}  # by runs: members of several studies are fitted once

    def member(name: str, runs: tuple[str, ...]) -> Member | None:
        with_rows = tuple(run for run in runs if run in found)
        if not with_rows:
            return None
        if with_rows not in known:
            known[with_rows] = _member(name, with_rows, runs, found, rows)
        one = known[with_rows]
        fitted = None if one.fitted is None else dataclasses.replace(one.fitted, name=name)
        return dataclasses.replace(one, name=name, all_runs=runs, fitted=fitted)

    studies = []
    for name, given in study.members.items():
        members = {one: member(one, runs) for one, runs in given.items()}
        chosen, beside = _baseline(study, name, baseline)
        studies.append(_study(name, study, members, member(chosen, beside) if beside else None, chosen))
    return Results(x, rows, tuple(studies))


def _baseline(study: Study, name: str, asked: str) -> tuple[str, tuple[str, ...]]:
    """The baseline of a study; and its runs, if it belongs only to another study."""
    given = study.members[name]
    if not asked or asked in given:
        return asked or next(iter(given)), ()
    runs = next(part[asked] for part in study.members.values() if asked in part)
    return next(((one, ()) for one in given if given[one] == runs), (asked, runs))


def _member(
    name: str,
    runs: tuple[str, ...],
    all_runs: tuple[str, ...],
    found: Mapping[str, readers.RunPoints],
    rows: Mapping[str, list[dict[str, Any]]],
) -> Member:
    seeds = [found[run] for run in runs]
    compute, reward, counts, label = readers.seeds_together(seeds)
    fitted, why = None, ""
    try:
        fitted = Run(name, compute, reward, fit_sigmoid(compute, reward, counts=counts, run=label))
        why = "" if fitted.fit.rises else fitted.fit.verdict
    except ValueError as error:  # too few points, or none at compute 0
        why = str(error)
    ends = [one.compute > LAST * one.compute.max() if one.compute.max() else one.compute >= 0 for one in seeds]
    means = tuple(float(one.reward[end].mean()) for one, end in zip(seeds, ends))
    variances = tuple(
        math.nan if one.counts is None else float(one.counts.variance()[end].mean() / end.sum())
        for one, end in zip(seeds, ends)
    )
    hours = sum(float(rows[run][-1].get("device_hours") or 0.0) for run in runs)
    first = float(np.mean([one.reward[0] for one in seeds]))
    return Member(name, runs, all_runs, fitted, why, first, float(np.mean(means)), means, variances, hours)


def _study(
    name: str, study: Study, members: Mapping[str, Member | None], beside: Member | None, baseline: str
) -> StudyResults:
    there = tuple(one for one in members.values() if one is not None)
    compared = [one for one in (*([beside] if beside is not None else []), *there) if one.curve is not None]
    left_out = [f"{one.name}: is left out: {one.why}" for one in there if one.curve is None]
    found = None
    if baseline not in [one.name for one in compared]:
        left_out.append(f"no comparison: {baseline}, the baseline, has no curve that rises yet")
    elif len(compared) > 1:
        at = [one.name for one in compared].index(baseline)
        with user_mistakes():
            found = compare([one.curve for one in compared if one.curve], baseline=at, all_pairs=False)
    missing = tuple(one for one, found_one in members.items() if found_one is None)
    seeds = only_seeds(study.runs[runs[0]] for runs in study.members[name].values())
    margin = _margin(there) if seeds and len(there) > 1 else None
    return StudyResults(name, there, missing, baseline, found, tuple(left_out), margin)


def _margin(members: Sequence[Member]) -> Margin:
    curves = [one.curve for one in members if one.curve is not None]
    asymptotes = [one.fit.asymptote for one in curves]
    widths = [high - low for low, high in (one.fit.intervals["asymptote"] for one in curves)]
    last = [one.last for one in members]
    deviations = [math.sqrt(variance) for one in members for variance in one.last_variance]
    return Margin(
        seeds=len(members),
        asymptote=max(asymptotes) - min(asymptotes) if len(curves) > 1 else None,
        asymptote_noise=_noise([width / 2 / _NORMAL_95 for width in widths]),
        last_quarter=max(last) - min(last),
        last_quarter_noise=_noise(deviations),
    )


def _noise(deviations: Sequence[float]) -> float | None:
    """The mean range of as many normal numbers with these deviations (their quadratic mean); None if not known."""
    if len(deviations) < 2 or not np.all(np.isfinite(deviations)):
        return None
    z = np.linspace(-8, 8, 4001)
    below, count = scipy.special.ndtr(z), len(deviations)
    spread = np.trapezoid(1 - below**count - (1 - below) ** count, z)
    return float(spread * np.sqrt(np.mean(np.square(deviations))))

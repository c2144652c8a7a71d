"""Which of two runs ends higher, and if neither does, which gets there faster: the paper's comparison, with intervals.

    1. A first. Two runs differ in A if the 95 % interval of the difference leaves out 0 and the difference exceeds the
       margin (0.02: what runs that differ only in their seed show).
    2. If they are within the margin, both are refitted with the mean of their A's and B is compared. If they are
       further apart but the interval contains 0, the comparison is undecided, and no B is compared: the common A may be
       one that neither has.

The interval of a difference comes from the two runs' own asymmetric intervals (MOVER; Zou and Donner 2008):

    low  = d - sqrt((a - a_low)^2 + (b_high - b)^2)        d = a - b
    high = d + sqrt((a_high - a)^2 + (b - b_low)^2)

The runs' own intervals are profile likelihood, those of A over all laws that fit the points (family.py); if a run has
several seeds, they are widened to the interval of a bootstrap of whole seeds. The sigmoid's A may be wrong if the truth
is another law, so the interval of a difference of A's also includes the one computed from the A's of the best-fitting
laws. If no law describes the points of a run, the comparison is undecided.

With A fixed at one number for all, B and C_mid are refitted (the paper's leave-one-out procedure), and the
straightened form

    F(R) = C_mid^B / ((A - R0) / (R - R0) - 1) = C^B

turns each run into a line through the origin of (ln C, ln F) whose slope is its B.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalerl_jax.scaling import fit as fit_module
from scalerl_jax.scaling import law, least_squares, profile, resample
from scalerl_jax.scaling.fit import SEED_MARGIN, Run
from scalerl_jax.scaling.law import double_precision
from scalerl_jax.scaling.points import Points

Interval = tuple[float, float]
_SEED_RESAMPLES = 1000
# Verdicts in words: a row's A against the baseline's, or a pair's first against its second.
VERDICTS = {"": "baseline", "first": "higher", "second": "lower", "none": "no difference shown", "open": "undecided"}


@dataclasses.dataclass(frozen=True)
class Difference:
    """first minus second, with intervals."""

    value: float
    interval_95: Interval
    interval_90: Interval

    @property
    def excludes_zero(self) -> bool:
        return self.interval_95[0] > 0 or self.interval_95[1] < 0


@dataclasses.dataclass(frozen=True)
class Slope(law.Sigmoid):
    """A run refitted with A fixed. Intervals are profile likelihood; 0 or infinity where open."""

    ssr: float
    exponent_95: tuple[float, float]
    exponent_90: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs. verdict: "first" or "second" ends higher | "none": no difference shown | "open": undecided."""

    first: Run
    second: Run
    asymptote: Difference
    verdict: str
    slopes: tuple[Slope, Slope] | None  # with a common A, if no difference is shown
    exponent: Difference | None
    sentence: str


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """One row of the leave-one-out table."""

    run: Run
    interval_95: Interval  # of A
    asymptote: Difference | None  # from the baseline; None for the baseline itself
    verdict: str  # "" for the baseline, else as in Pair with the run as first
    slope: Slope | None  # with the common A; None if A differs from the baseline's or is undecided
    exponent: Difference | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    runs: Sequence[Run]
    baseline: Run
    margin: float
    common_asymptote: float | None  # given, or mean A of runs that do not differ from the baseline; None without such
    table: Sequence[LeftOut]
    pairs: Sequence[Pair]


def compare(
    runs: Sequence[Run],
    *,
    baseline: int = 0,
    margin: float = SEED_MARGIN,
    common_asymptote: float | None = None,
    grid: str = "auto",
    seed: int = 0,
    all_pairs: bool = True,
) -> Comparison:
    """Compares all pairs of two or more runs, and makes the table against runs[baseline].

    all_pairs: if False, only pairs with the baseline. common_asymptote: the A with which runs that do not differ are
    refitted; by default the mean of theirs. grid: for those refits. seed: of the bootstrap of runs with seeds.
    """
    assert len(runs) >= 2
    own = {run: asymptote_intervals(run, seed=seed) for run in runs}
    base = runs[baseline]

    @functools.cache
    def slope_of(run: Run, asymptote: float) -> Slope:
        return refit(run.points, asymptote, grid=grid)

    def differ(first: Run, second: Run) -> tuple[Difference, str]:
        return judge(first, own[first], second, own[second], margin)

    alike = [run for run in runs if run is base or differ(run, base)[1] == "none"]
    common = None
    if len(alike) > 1:
        mean = float(np.mean([run.fit.asymptote for run in alike]))
        common = mean if common_asymptote is None else common_asymptote
    table = []
    for run in runs:
        slope = slope_of(run, common) if common is not None and run in alike else None
        found, word = (None, "") if run is base else differ(run, base)
        exponent = None
        if slope is not None and common is not None and run is not base:
            exponent = exponent_difference(slope, slope_of(base, common))
        table.append(LeftOut(run, own[run][0], found, word, slope, exponent))

    pairs = []
    for pair in itertools.combinations(runs, 2):
        if not (all_pairs or base in pair):
            continue
        first, second = sorted(pair, key=lambda run: -run.fit.asymptote)  # so that sentences read well
        found, word = differ(first, second)
        both, exponent = None, None
        if word == "none":
            in_table = common is not None and first in alike and second in alike
            mean = (first.fit.asymptote + second.fit.asymptote) / 2
            chosen = common if in_table else mean if common_asymptote is None else common_asymptote
            assert chosen is not None
            both = (slope_of(first, chosen), slope_of(second, chosen))
            exponent = exponent_difference(*both)
        text = _sentence(first, second, found, word, both, exponent, margin)
        pairs.append(Pair(first, second, found, word, both, exponent, text))
    return Comparison(runs, base, margin, common, table, pairs)


def refit(points: Points, asymptote: float, *, grid: str = "auto") -> Slope:
    """Least squares for B and C_mid with A fixed at `asymptote`; grid as in fit_sigmoid.

    Raises ValueError where the scores do not rise (grid="paper": no cell with B > 0).
    """
    data = fit_module.squares_data(points)
    cells = least_squares.search_cells(data.log_compute)
    constraint = least_squares.free(asymptote, asymptote)
    if grid == "paper":
        estimate, ssr = fit_module.paper_estimate(points, [asymptote], None, "these scores do not rise")
    else:
        estimate, ssr = fit_module.least_squares_estimate(data, cells, constraint)
    state = profile.likelihood(points, cells, constraint, held=1)
    wide, narrow = (state.intervals(level, estimate)["exponent"] for level in (0.95, 0.90))
    return Slope(*estimate, ssr + points.scatter, wide, narrow)


def straightened(compute: np.ndarray, reward: np.ndarray, slope: Slope) -> tuple[np.ndarray, np.ndarray]:
    """ln C and ln F, [M <= N], of the evaluations that lie strictly between R0 and A, where F is defined."""
    above = np.asarray(compute) > 0
    with double_precision():
        straight = np.asarray(law.straighten(np.asarray(reward)[above], **slope.parameters))
    defined = np.isfinite(straight)
    return np.log(np.asarray(compute)[above][defined]), np.log(straight[defined])


def verdict(found: Difference, margin: float) -> str:
    """Verdict on two A's: "first", "second", "none" (no difference shown), or "open" (undecided: more than the margin
    apart, but the interval contains 0)."""
    if abs(found.value) <= margin + 1e-9:  # A's from the paper's grid are often exactly the margin apart
        return "none"
    if not found.excludes_zero:
        return "open"
    return "first" if found.value > 0 else "second"


def difference(first: float, own: tuple[Interval, Interval], second: float, others: tuple[Interval, Interval]):
    """first - second from their values and their (95 %, 90 %) intervals."""
    ends = [_mover(first, a, second, b) for a, b in zip(own, others)]
    return Difference(first - second, ends[0], ends[1])


def judge(
    first: Run, own: tuple[Interval, Interval], second: Run, others: tuple[Interval, Interval], margin: float
) -> tuple[Difference, str]:
    """The difference of A from each run's (95 %, 90 %) intervals, around the sigmoids' A's and the best laws' A's; and
    the verdict."""
    value = first.fit.asymptote - second.fit.asymptote
    best = [run.fit.asymptote if run.fit.laws is None else run.fit.laws.asymptote for run in (first, second)]
    by_sigmoids = difference(first.fit.asymptote, own, second.fit.asymptote, others)
    by_laws = difference(best[0], own, best[1], others)
    found = Difference(
        value,
        profile.around(value, by_sigmoids.interval_95, by_laws.interval_95),
        profile.around(value, by_sigmoids.interval_90, by_laws.interval_90),
    )
    word = verdict(found, margin)
    return found, "open" if word != "none" and (first.fit.misfit or second.fit.misfit) else word


def exponent_difference(first: Slope, second: Slope) -> Difference:
    """The difference of B with a common A."""
    own = (first.exponent_95, first.exponent_90)
    return difference(first.exponent, own, second.exponent, (second.exponent_95, second.exponent_90))


def _mover(first: float, own: Interval, second: float, others: Interval) -> Interval:
    d = first - second
    low = d - math.hypot(first - own[0], others[1] - second)
    return low, d + math.hypot(own[1] - first, second - others[0])


def asymptote_intervals(run: Run, *, seed: int = 0) -> tuple[Interval, Interval]:
    """95 % and 90 % intervals of A: over all laws, widened to the bootstrap of whole seeds if there are several."""
    wide, narrow = (run.fit.interval("asymptote", level=level) for level in (0.95, 0.90))
    if run.seeds > 1:
        data = fit_module.squares_data(run.points)
        estimate = tuple(run.fit.parameters.values())
        cells = least_squares.search_cells(data.log_compute)
        samples = resample.bootstrap(run.points, data, cells, estimate, count=_SEED_RESAMPLES, seed=seed)
        resampled = dataclasses.replace(run.fit, samples=samples)
        wide = profile.around(wide[0], wide, resampled.bootstrap_interval("asymptote", level=0.95))
        narrow = profile.around(narrow[0], narrow, resampled.bootstrap_interval("asymptote", level=0.90))
    return wide, narrow


def _sentence(first: Run, second: Run, found: Difference, word: str, both, exponent, margin: float) -> str:
    """A sentence on a pair; first has the higher A."""
    a, b = first.fit.asymptote, second.fit.asymptote
    apart = f"A {a:.3f} against {b:.3f}, difference {_signed(found)}"
    if word == "first":
        return f"{first.name} ends higher than {second.name}: {apart}"
    if word == "open":
        vague = " and ".join(run.name for run in (first, second) if not run.fit.identified)
        more = f"; A of {vague} is not identified yet" if vague else ""
        if undescribed := " and ".join(run.name for run in (first, second) if run.fit.misfit):
            more = f"; no law describes the points of {undescribed}"
        return f"these points do not decide which of {first.name} and {second.name} ends higher: {apart}{more}"
    start = f"no difference shown in A between {first.name} and {second.name}: {apart}, margin {margin:g}"
    sides = list(zip((first, second), both))
    (faster, fast), (slower, slow) = sides if exponent.value >= 0 else sides[::-1]
    with_one = f"with A = {fast.asymptote:.3f} for both"
    difference_of_both = _signed(exponent_difference(fast, slow), 2)
    values = f"B {fast.exponent:.2f} against {slow.exponent:.2f}, difference {difference_of_both}"
    if exponent.excludes_zero:
        return f"{start}; {with_one}, {faster.name} climbs faster than {slower.name}: {values}"
    return f"{start}; {with_one}, no difference shown in B either: {values}"


def _signed(found: Difference, digits: int = 3) -> str:
    low, high = (f"{end:+.{digits}f}" if math.isfinite(end) else "open" for end in found.interval_95)
    return f"{found.value:+.{digits}f} (95 %: {low} to {high})"


# ---------------------------------------------------------------------- JSON


def run_document(run: Run) -> dict[str, Any]:
    """A run and its fit."""
    fit = run.fit
    return {
        "run": run.name,
        **fit.parameters,
        "intervals_95": fit.intervals,
        "points": fit.points,
        "seeds": run.seeds,
        "reached": run.reached,
        "ssr": fit.ssr,
        "identified": fit.identified,
        "verdict": fit.verdict,
    }


def _difference_document(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"value": found.value, "95": found.interval_95, "90": found.interval_90}


def comparison_document(found: Comparison) -> dict[str, Any]:
    """A comparison as scalerl-compare and scalerl-study write it; infinite and open numbers become null in the file."""
    table = [
        {
            "run": row.run.name,
            "asymptote": row.run.fit.asymptote,
            "asymptote_95": row.interval_95,
            "asymptote_difference": _difference_document(row.asymptote),
            "verdict": VERDICTS[row.verdict],
            "with_common_asymptote": None
            if row.slope is None
            else {
                **row.slope.parameters,
                "ssr": row.slope.ssr,
                "exponent_95": row.slope.exponent_95,
                "exponent_difference": _difference_document(row.exponent),
            },
        }
        for row in found.table
    ]
    pairs = [
        {
            "first": pair.first.name,
            "second": pair.second.name,
            "asymptote_difference": _difference_document(pair.asymptote),
            "verdict": VERDICTS[pair.verdict],
            "common_asymptote": None if pair.slopes is None else pair.slopes[0].asymptote,
            "exponents": None if pair.slopes is None else [slope.exponent for slope in pair.slopes],
            "exponent_difference": _difference_document(pair.exponent),
            "sentence": pair.sentence,
        }
        for pair in found.pairs
    ]
    return {
        "baseline": found.baseline.name,
        "margin": found.margin,
        "common_asymptote": found.common_asymptote,
        "table": table,
        "pairs": pairs,
    }

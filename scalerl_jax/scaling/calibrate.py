"""Fits the numbers of a calibration on complete runs, and shows how often its forecasts hold on runs it has not seen.

From each of FRACTIONS of a run's compute every law foretells all later evaluations (a case). Then

    1. of each law, s and g maximise the mean log density of the logits of those evaluations, over all cases
    2. the prior weights and the rate maximise that of the average of the laws

with weak priors on all of them, so that few runs give a sane answer. Judged leaving out: the cases of a run are
foretold by what the runs of all other recipes gave; runs that differ only in their seed are one recipe.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import scipy.optimize
from scipy.special import logsumexp

from scalerl_jax.scaling import average
from scalerl_jax.scaling.calibration import Calibration, Spread
from scalerl_jax.scaling.laws import LAWS
from scalerl_jax.scaling.points import Points, TooFewPoints, check_points

FRACTIONS = (0.3, 0.5, 0.7)  # of a run's compute, from which the rest is foretold
LEVELS = (0.5, 0.8, 0.9)
_DRAWS = 400
# Normal priors of ln s, ln g, the logs of the prior weights and ln rate: mean and deviation, heard as one case in ten.
_SPREAD_PRIOR = ((-1.0, 1.0), (0.0, 0.5))
_WEIGHT_DEVIATION = 1.5
_RATE_PRIOR = (0.0, 1.0)
_HEARD = 0.1
_FIRST_STEP = 0.3  # of a search, in all of these


@dataclasses.dataclass(frozen=True)
class CompleteRun:
    name: str
    recipe: str  # runs of one recipe are left out together
    points: Points  # all evaluations


@dataclasses.dataclass(frozen=True)
class _Foretold:
    """By one law: what its density needs."""

    away: np.ndarray  # [S, M] logits of the evaluations minus those of the draws
    noise: np.ndarray  # [M] standard deviation of those logits as measured
    distance: np.ndarray  # [M] ln of the compute over that of the last point

    def log_density(self, spread: Spread) -> np.ndarray:
        """[M]"""
        scale = np.hypot(spread.scale * self.distance**spread.growth, self.noise)
        found = average.student(self.away / scale) - np.log(scale)
        return logsumexp(found, axis=0) - np.log(len(found))


@dataclasses.dataclass(frozen=True)
class Case:
    """A run foretold from a fraction of its compute."""

    run: CompleteRun
    fraction: float
    before: Points
    later: Points
    foretold: Mapping[str, _Foretold]  # by each law
    record: Mapping[str, _Foretold] | None  # of the end of `before`; None: too few points


def cases(runs: Iterable[CompleteRun], *, tick: Callable[[], None] = lambda: None) -> list[Case]:
    """All of them; a run with too few points before a fraction has no case there."""
    found = []
    for run in runs:
        for fraction in FRACTIONS:
            try:
                before, later = run.points.split(fraction * run.points.most)
            except TooFewPoints:
                continue
            try:
                record = _foretell(*before.split(average.BACKTEST * before.most))
            except TooFewPoints:
                record = None
            found.append(Case(run, fraction, before, later, _foretell(before, later), record))
        tick()
    return found


def _foretell(before: Points, later: Points) -> dict[str, _Foretold]:
    found = {}
    for name in LAWS:
        drawn = average.draw(name, before, count=_DRAWS, seed=0)
        found[name] = _Foretold(*average.away(drawn, later), np.log(np.sort(later.compute) / before.most))
    return found


def calibrate(given: Sequence[Case], start: Calibration | None = None) -> Calibration:
    """start: one fitted on nearly the same cases, from which it is soon found. Raises ValueError without cases."""
    if not given:
        raise ValueError("no run has points enough to foretell anything from")
    spreads = {name: _fit_spread(name, given, start) for name in LAWS}
    names = list(LAWS)
    density = [np.stack([case.foretold[name].log_density(spreads[name]) for name in names]) for case in given]
    record = np.zeros((len(given), len(names)))
    for row, case in zip(record, given):
        if case.record is not None:
            row[:] = [np.mean(case.record[name].log_density(spreads[name])) for name in names]

    def cost(at: np.ndarray) -> float:
        logs, rate = np.append(at[:-1], 0.0), np.exp(at[-1])
        weights = logs + rate * record
        weights -= logsumexp(weights, axis=1, keepdims=True)
        scores = [np.mean(logsumexp(weight[:, None] + one, axis=0)) for weight, one in zip(weights, density)]
        held = np.sum((at[:-1] / _WEIGHT_DEVIATION) ** 2) + ((at[-1] - _RATE_PRIOR[0]) / _RATE_PRIOR[1]) ** 2
        return -float(np.mean(scores)) + _HEARD / 2 * held

    first = np.zeros(len(names))
    if start is not None:
        logs = np.log([max(start.laws[name].prior, 1e-6) for name in names])
        first = np.append(logs[:-1] - logs[-1], np.log(start.rate))
    best = _minimum(cost, first)
    priors = np.exp(np.append(best[:-1], 0.0))
    priors /= priors.sum()
    laws = {name: dataclasses.replace(spreads[name], prior=float(prior)) for name, prior in zip(names, priors)}
    return Calibration(laws, float(np.exp(best[-1])), runs=len({case.run.name for case in given}))


def _fit_spread(name: str, given: Sequence[Case], start: Calibration | None) -> Spread:
    def cost(at: np.ndarray) -> float:
        spread = Spread(*np.exp(at), prior=1.0)
        scores = [np.mean(case.foretold[name].log_density(spread)) for case in given]
        held = sum(((value - mean) / deviation) ** 2 for value, (mean, deviation) in zip(at, _SPREAD_PRIOR))
        return -float(np.mean(scores)) + _HEARD / 2 * held

    first = [mean for mean, _ in _SPREAD_PRIOR]
    if start is not None:
        first = np.log([start.laws[name].scale, start.laws[name].growth])
    return Spread(*[float(value) for value in np.exp(_minimum(cost, first))], prior=1.0)


def _minimum(cost: Callable[[np.ndarray], float], start: Sequence[float] | np.ndarray) -> np.ndarray:
    start = np.asarray(start, np.float64)
    simplex = start + np.concatenate([np.zeros((1, len(start))), _FIRST_STEP * np.eye(len(start))])
    options = {"xatol": 0.02, "fatol": 1e-4, "maxiter": 400, "initial_simplex": simplex}
    return scipy.optimize.minimize(cost, start, method="Nelder-Mead", options=options).x


# ---------------------------------------------------------------------- how good it is


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one law, or of the average, on one case; over all M later evaluations unless said otherwise."""

    covered: tuple[float, ...]  # share within the band of each of LEVELS
    crps: float  # continuous ranked probability score, in units of the score
    error: float  # forecast minus measured, means of the last quarter of the run's compute
    width: float  # of the widest band there


def judge(case: Case, calibration: Calibration) -> dict[str, Score]:
    """Of "average" and of each law alone, with its own discrepancy."""
    record = None
    if case.record is not None:
        record = {name: float(np.mean(one.log_density(calibration.laws[name]))) for name, one in case.record.items()}
    whole = average.from_record(case.before, calibration, record)
    found = {"average": _score(whole, case)}
    for name in LAWS:
        alone = {other: float(other == name) for other in LAWS}
        found[name] = _score(dataclasses.replace(whole, weights=alone), case)
    return found


def _score(forecast: average.AverageForecast, case: Case) -> Score:
    order = np.argsort(case.later.compute, kind="stable")
    compute, measured = case.later.compute[order], case.later.reward[order]
    made = forecast.evaluations(compute)
    covered = []
    for level in LEVELS:
        low, high = np.quantile(made, [(1 - level) / 2, (1 + level) / 2], axis=0)
        covered.append(float(np.mean((low <= measured) & (measured <= high))))
    last = compute > 0.75 * case.run.points.most
    error = float(np.mean(np.median(made, axis=0)[last]) - measured[last].mean())
    return Score(tuple(covered), float(np.mean(_crps(made, measured))), error, float(np.mean((high - low)[last])))


def _crps(made: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """[M] of draws [S, M]: E|X - y| - E|X - X'| / 2, in units of the score."""
    made, count = np.sort(made, axis=0), len(made)
    rank = 2 * np.arange(1, count + 1)[:, None] - count - 1
    return np.mean(np.abs(made - measured), axis=0) - np.sum(rank * made, axis=0) / count**2


def leave_one_out(given: Sequence[Case], *, tick: Callable[[], None] = lambda: None) -> list[dict[str, Score]]:
    """Of each case, judged by what the runs of other recipes gave. Raises ValueError where there is one recipe only."""
    recipes = {case.run.recipe for case in given}
    if len(recipes) < 2:
        raise ValueError(f"all runs are of one recipe, {next(iter(recipes), 'none')!r}: none is left to judge it by")
    whole = calibrate(given)
    found: dict[int, dict[str, Score]] = {}
    for recipe in sorted(recipes):
        others = calibrate([case for case in given if case.run.recipe != recipe], whole)
        for index, case in enumerate(given):
            if case.run.recipe == recipe:
                found[index] = judge(case, others)
        tick()
    return [found[index] for index in range(len(given))]


def whole_run(name: str, recipe: str, compute, passes, trials) -> CompleteRun:
    """compute [N], one of them 0; passes and trials [N]. Raises ValueError naming the row that cannot be."""
    passes, trials = np.asarray(passes, np.float64), np.asarray(trials, np.float64)
    points = check_points(
        compute, passes / trials, initial_reward=None, burn_in=0.0, fit_until=None, counts=(passes, trials), run=None
    )
    return CompleteRun(name, recipe, points)

"""Fits the numbers of a calibration on complete runs, and shows how often its forecasts hold on runs it has not seen.

From each of FRACTIONS of a run's compute every law foretells all later evaluations (a case). Then

    the prior weights of every law at every scale, the rate and g maximise the mean log density of the logits of those
    evaluations under the average, over all cases but those of runs that had fallen by then, of which one law speaks

with weak priors on all of them, so that few runs give a sane answer. Judged leaving out: the cases of a run are
foretold by what the runs of all other recipes gave; runs that differ only in their seed are one recipe. The shapes that
the law `informed` expects are those of the runs of all other recipes as well. (The prior weights are fitted on cases
whose expected shapes are those of all recipes but their own, the one that is judged among them.)
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import scipy.optimize
from scipy.special import logsumexp

from scalerl_jax.scaling import average
from scalerl_jax.scaling.calibration import SCALES, Calibration
from scalerl_jax.scaling.fit import fit_sigmoid
from scalerl_jax.scaling.laws import LAWS, shapes_of
from scalerl_jax.scaling.points import Points, TooFewPoints, check_points
from scalerl_jax.scaling.shape import Shape
from scalerl_jax.scaling.trend import has_fallen

FRACTIONS = (0.3, 0.5, 0.7)  # of a run's compute, from which the rest is foretold
LEVELS = (0.5, 0.8, 0.9)
_GROWTHS = (0.75, 1.0, 1.5, 2.0, 3.0)  # of which one is chosen
# Normal priors of the logs of the weights (all equal) and of the rate: mean and deviation, heard as one case in fifty.
_WEIGHT_DEVIATION = 1.5
_RATE_PRIOR = (float(np.log(2.0)), 1.0)
_HEARD = 0.02
_SHAPES = 4  # of each complete run


@dataclasses.dataclass(frozen=True)
class CompleteRun:
    name: str
    recipe: str  # runs of one recipe are left out together
    points: Points  # all evaluations
    shapes: tuple[Shape, ...]  # what they leave possible; none of a run that did not rise


@dataclasses.dataclass(frozen=True)
class _Foretold:
    """By one law: what its density needs."""

    away: np.ndarray  # [S, M] logits of the evaluations minus those of the draws
    noise: np.ndarray  # [M] standard deviation of those logits as measured
    distance: np.ndarray  # [M] ln of the compute over that of the last point

    def log_density(self, growth: float) -> np.ndarray:
        """[scales, M]"""
        deviations = (scale * self.distance**growth for scale in SCALES)
        return np.stack([average.log_density(self.away, self.noise, deviation) for deviation in deviations])


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
    runs, found = list(runs), []
    for run in runs:
        shapes = _shapes(other for other in runs if other.recipe != run.recipe)
        for fraction in FRACTIONS:
            try:
                before, later = run.points.split(fraction * run.points.most)
            except TooFewPoints:
                continue
            try:
                record = _foretell(*before.split(average.BACKTEST * before.most), shapes)
            except TooFewPoints:
                record = None
            found.append(Case(run, fraction, before, later, _foretell(before, later, shapes), record))
        tick()
    return found


def _shapes(runs: Iterable[CompleteRun]) -> tuple[Shape, ...]:
    return tuple(shape for run in runs for shape in run.shapes)


def _foretell(before: Points, later: Points, shapes: Sequence[Shape]) -> dict[str, _Foretold]:
    found = {}
    for name in LAWS:
        drawn = average.draw(name, before, shapes, count=average.RECORD_DRAWS, seed=0)
        found[name] = _Foretold(*average.away(drawn, later), np.log(np.sort(later.compute) / before.most))
    return found


class Densities:
    """What a calibration is fitted on, computed once for all the cases that are left out in turn."""

    def __init__(self, given: Sequence[Case]):
        self.given = given
        # By growth and case: [laws * scales, M], and the records [laws * scales].
        self.later = {growth: [_together(case.foretold, growth) for case in given] for growth in _GROWTHS}
        self.record = {
            growth: np.array([
                np.zeros(len(LAWS) * len(SCALES))
                if case.record is None
                else _together(case.record, growth).mean(axis=1)
                for case in given
            ])
            for growth in _GROWTHS
        }  # fmt: skip


def _together(foretold: Mapping[str, _Foretold], growth: float) -> np.ndarray:
    return np.concatenate([foretold[name].log_density(growth) for name in LAWS])


def calibrate(densities: Densities, chosen: Sequence[int] | None = None) -> Calibration:
    """chosen: the cases, by their place; None: all. Raises ValueError without cases."""
    chosen = range(len(densities.given)) if chosen is None else chosen
    rising = [index for index in chosen if not has_fallen(densities.given[index].before)]
    if not rising:
        raise ValueError("no run that rises has points enough to foretell anything from")
    fits = {growth: _fit(densities, growth, rising) for growth in _GROWTHS}
    growth = min(fits, key=lambda one: fits[one].fun)
    *logs, log_rate = fits[growth].x
    weights = np.exp(logs - logsumexp(logs)).reshape(len(LAWS), len(SCALES))
    prior = {name: tuple(row.tolist()) for name, row in zip(LAWS, weights)}
    runs = {densities.given[index].run.name: densities.given[index].run for index in chosen}
    return Calibration(prior, growth, float(np.exp(log_rate)), len(runs), _shapes(runs.values()))


def _fit(densities: Densities, growth: float, chosen: Sequence[int]) -> scipy.optimize.OptimizeResult:
    """Of the logs of the weights and of the rate."""
    later, record = densities.later[growth], densities.record[growth]

    def cost(at: np.ndarray) -> tuple[float, np.ndarray]:
        logs, rate = at[:-1], np.exp(at[-1])
        total, gradient = 0.0, np.zeros(len(at))
        for index in chosen:
            tilted = logs + rate * record[index]
            share = tilted - logsumexp(tilted)
            joint = share[:, None] + later[index]
            mixed = logsumexp(joint, axis=0)
            total += float(mixed.mean())
            moved = np.exp(joint - mixed).mean(axis=1) - np.exp(share)
            gradient[:-1] += moved
            gradient[-1] += rate * moved @ record[index]
        off = np.append(logs / _WEIGHT_DEVIATION, (at[-1] - _RATE_PRIOR[0]) / _RATE_PRIOR[1])
        deviations = np.append(np.full(len(logs), _WEIGHT_DEVIATION), _RATE_PRIOR[1])
        value = -total / len(chosen) + _HEARD / 2 * off @ off
        return value, -gradient / len(chosen) + _HEARD * off / deviations

    start = np.append(np.zeros(len(LAWS) * len(SCALES)), _RATE_PRIOR[0])
    return scipy.optimize.minimize(cost, start, jac=True, method="L-BFGS-B")


# ---------------------------------------------------------------------- how good it is


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one law, or of the average, on one case; over all M later evaluations unless said otherwise."""

    covered: tuple[float, ...]  # share within the band of each of LEVELS
    crps: float  # continuous ranked probability score, in units of the score
    error: float  # forecast minus measured, means of the last quarter of the run's compute
    width: float  # of the widest band there


def judge(case: Case, calibration: Calibration) -> dict[str, Score]:
    """Of "average" and of each law alone, with its own scales."""
    record = None
    if case.record is not None:
        record = {
            name: tuple(one.log_density(calibration.growth).mean(axis=1).tolist()) for name, one in case.record.items()
        }
    whole = average.from_record(case.before, calibration, record)
    found = {"average": _score(whole, case)}
    for name in LAWS:
        alone = calibration.weights(record, alone=name)
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
    """Of each case, judged by what the runs of other recipes gave. Raises ValueError where there are no others."""
    recipes = {case.run.recipe for case in given}
    if not recipes:
        raise ValueError("no run has points enough")
    if len(recipes) < 2:
        raise ValueError(f"all runs are of one recipe, {next(iter(recipes))!r}: none is left to judge it by")
    densities = Densities(given)
    found: dict[int, dict[str, Score]] = {}
    for recipe in sorted(recipes):
        others = calibrate(densities, [i for i, case in enumerate(given) if case.run.recipe != recipe])
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
    rises = fit_sigmoid(compute, passes / trials, counts=(passes, trials)).rises
    return CompleteRun(name, recipe, points, tuple(shapes_of(points, count=_SHAPES)) if rises else ())

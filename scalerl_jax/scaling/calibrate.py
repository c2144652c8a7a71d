"""Fits a calibration on complete runs, and measures how often its forecasts hold on runs not used in the fit.

From each of FRACTIONS of a run's compute every law forecasts all later evaluations (a case). Then

    the prior weights of every law at every scale, the rate and g maximise the mean log density of the logits of those
    evaluations under the average, over all cases except those of runs that had fallen by then, which use one law only

with priors on all of them that weigh as much as a tenth of a task. All tasks weigh the same, however many runs they
have, because which law is right is a property of tasks.

Evaluation leaves out: the cases of a run are forecast by a calibration on the runs of all other tasks (with one task
only: of all other recipes; runs that differ only in their seed are one recipe). Runs whose evaluations agree with the
judged run's within the noise of both are left out too, whatever their name.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import scipy.optimize
from scipy.special import logsumexp

from scalerl_jax.scaling import average
from scalerl_jax.scaling.average import SCALES, Calibration, Hindsight
from scalerl_jax.scaling.law import LAWS
from scalerl_jax.scaling.points import Points, TooFewPoints, check_points
from scalerl_jax.scaling.trend import has_fallen

FRACTIONS = (0.3, 0.5, 0.7)  # of a run's compute, from which the rest is forecast
LEVELS = (0.5, 0.8, 0.9)
_GROWTHS = (0.75, 1.0, 1.5, 2.0, 3.0)  # candidates of g
# Normal priors of the logs of the weights (all equal, mean 0) and of the rate: mean and deviation.
_WEIGHT_DEVIATION = 1.5
_RATE_PRIOR = (float(np.log(2.0)), 1.0)
_HEARD = 0.1  # weight of the priors, in tasks
_AGREE = 3.0  # runs agree up to so many standard errors of their mean square difference in units of the noise
_LEAST_ALIKE = 5  # evaluations in the range of compute that both runs cover


@dataclasses.dataclass(frozen=True, eq=False)
class CompleteRun:
    """Compared by identity: runs of several files may have one name."""

    name: str
    recipe: str  # runs of one recipe differ in their seed
    task: str
    points: Points  # all evaluations


@dataclasses.dataclass(frozen=True)
class Case:
    """A run forecast from a fraction of its compute."""

    run: CompleteRun
    fraction: float
    before: Points
    later: Points
    forecasts: Mapping[str, Hindsight]  # of `later`, by law
    record: Mapping[str, Hindsight] | None  # of the end of `before`; None: too few points


def cases(runs: Iterable[CompleteRun], *, tick: Callable[[], None] = lambda: None) -> list[Case]:
    """All cases of the runs; a run with too few points before a fraction has no case there."""
    found = []
    for run in runs:
        for fraction in FRACTIONS:
            try:
                before, later = run.points.split(fraction * run.points.most)
            except TooFewPoints:
                continue
            forecasts, record = average.hindsight(before, later), average.hindsight_of_end(before)
            found.append(Case(run, fraction, before, later, forecasts, record))
        tick()
    return found


class Densities:
    """Log densities of all cases, computed once for all the leave-one-out fits."""

    def __init__(self, given: Sequence[Case]):
        self.given = given
        # By growth: for each case [laws * scales, M], and the record [laws * scales].
        self.later = {growth: [_together(case.forecasts, growth) for case in given] for growth in _GROWTHS}
        self.record = {
            growth: np.array([
                np.zeros(len(LAWS) * len(SCALES))
                if case.record is None
                else _together(case.record, growth).mean(axis=1)
                for case in given
            ])
            for growth in _GROWTHS
        }  # fmt: skip


def _together(forecasts: Mapping[str, Hindsight], growth: float) -> np.ndarray:
    return np.concatenate([forecasts[name].log_density(growth) for name in LAWS])


def calibrate(densities: Densities, chosen: Sequence[int] | None = None) -> Calibration:
    """Fits a calibration. chosen: indices of the cases; by default all. Raises ValueError without cases."""
    chosen = range(len(densities.given)) if chosen is None else chosen
    rising = [index for index in chosen if not has_fallen(densities.given[index].before)]
    if not rising:
        raise ValueError("no run that rises has points enough to foretell anything from")
    fits = {growth: _fit(densities, growth, rising) for growth in _GROWTHS}
    growth = min(fits, key=lambda one: fits[one].fun)
    *logs, log_rate = fits[growth].x
    weights = np.exp(logs - logsumexp(logs)).reshape(len(LAWS), len(SCALES))
    prior = {name: tuple(row.tolist()) for name, row in zip(LAWS, weights)}
    runs = len({densities.given[index].run for index in chosen})
    return Calibration(prior, growth, float(np.exp(log_rate)), runs)


def _fit(densities: Densities, growth: float, chosen: Sequence[int]) -> scipy.optimize.OptimizeResult:
    """Fits the logs of the weights and of the rate."""
    later, record = densities.later[growth], densities.record[growth]
    tasks = [densities.given[index].run.task for index in chosen]
    many = len(set(tasks))
    heard = _HEARD / many  # weight of the priors, relative to the mean over the tasks
    shares = [1 / (many * tasks.count(task)) for task in tasks]  # of each case in that mean; their sum is 1

    def cost(at: np.ndarray) -> tuple[float, np.ndarray]:
        logs, rate = at[:-1], np.exp(at[-1])
        total, gradient = 0.0, np.zeros(len(at))
        for index, part in zip(chosen, shares):
            tilted = logs + rate * record[index]
            share = tilted - logsumexp(tilted)
            joint = share[:, None] + later[index]
            mixed = logsumexp(joint, axis=0)
            total += part * float(mixed.mean())
            moved = np.exp(joint - mixed).mean(axis=1) - np.exp(share)
            gradient[:-1] += part * moved
            gradient[-1] += part * rate * moved @ record[index]
        off = np.append(logs / _WEIGHT_DEVIATION, (at[-1] - _RATE_PRIOR[0]) / _RATE_PRIOR[1])
        deviations = np.append(np.full(len(logs), _WEIGHT_DEVIATION), _RATE_PRIOR[1])
        return -total + heard / 2 * off @ off, -gradient + heard * off / deviations

    start = np.append(np.zeros(len(LAWS) * len(SCALES)), _RATE_PRIOR[0])
    return scipy.optimize.minimize(cost, start, jac=True, method="L-BFGS-B")


# ---------------------------------------------------------------------- evaluation


@dataclasses.dataclass(frozen=True)
class ForecastScore:
    """The score of one forecast on one case; over all M later evaluations unless noted."""

    covered: tuple[float, ...] | None  # share within the band of each of LEVELS; None if the forecast has no band
    crps: float | None  # continuous ranked probability score, in units of the score; None if it was not computed
    error: float  # forecast minus measured, means of the last quarter of the run's compute
    width: float | None  # of the widest band there; None as for covered


def judge(case: Case, calibration: Calibration) -> dict[str, ForecastScore]:
    """The scores of "average" and of each law alone, with its own scales."""
    record = None
    if case.record is not None:
        record = {name: one.record(calibration.growth) for name, one in case.record.items()}
    whole = average.from_record(case.before, calibration, record)
    found = {"average": _score(whole, case)}
    for name in LAWS:
        alone = calibration.weights(record, alone=name)
        found[name] = _score(dataclasses.replace(whole, weights=alone), case)
    return found


def _score(forecast: average.AverageForecast, case: Case) -> ForecastScore:
    order = np.argsort(case.later.compute, kind="stable")
    compute, measured = case.later.compute[order], case.later.reward[order]
    made = forecast.evaluations(compute)
    covered = []
    for level in LEVELS:
        low, high = np.quantile(made, [(1 - level) / 2, (1 + level) / 2], axis=0)
        covered.append(float(np.mean((low <= measured) & (measured <= high))))
    last = compute > 0.75 * case.run.points.most
    error = float(np.mean(np.median(made, axis=0)[last]) - measured[last].mean())
    return ForecastScore(
        tuple(covered), float(np.mean(_crps(made, measured))), error, float(np.mean((high - low)[last]))
    )


def _crps(made: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The continuous ranked probability score [M] of draws [S, M]: E|X - y| - E|X - X'| / 2, in units of the score."""
    made, count = np.sort(made, axis=0), len(made)
    rank = 2 * np.arange(1, count + 1)[:, None] - count - 1
    return np.mean(np.abs(made - measured), axis=0) - np.sum(rank * made, axis=0) / count**2


def agree(first: CompleteRun, second: CompleteRun) -> bool:
    """Whether the evaluations of two runs are equal within their noise, where both cover the compute. The second run's
    scores are interpolated between its evaluations, and are treated as equally noisy."""
    x, other = first.points.compute, second.points
    order = np.argsort(other.compute)
    both = (x >= other.compute.min()) & (x <= other.compute.max())
    if both.sum() < _LEAST_ALIKE:
        return False
    there = np.log(x[both]), np.log(other.compute[order])
    reward = np.interp(*there, other.reward[order])
    noise = np.interp(*there, other.noise_variance[order])
    squares = (first.points.reward[both] - reward) ** 2 / (first.points.noise_variance[both] + noise)
    return bool(squares.mean() <= 1 + _AGREE * np.sqrt(2 / len(squares)))


def leave_one_out(given: Sequence[Case], *, tick: Callable[[], None] = lambda: None) -> list[dict[str, ForecastScore]]:
    """Scores of each case, with a calibration on the runs of other tasks (of other recipes, if there is only one task)
    that do not agree with the judged run. Calls `tick` after each run. Raises ValueError if no runs are left."""
    runs = list(dict.fromkeys(case.run for case in given))
    if not runs:
        raise ValueError("no run has points enough")
    what = "task" if len({run.task for run in runs}) > 1 else "recipe"
    if len({getattr(run, what) for run in runs}) < 2:
        raise ValueError(f"all runs are of one recipe, {runs[0].recipe!r}: none is left to judge it by")
    densities, made = Densities(given), dict[tuple[CompleteRun, ...], Calibration]()
    found: list[dict[str, ForecastScore]] = [{} for _ in given]
    for run in runs:
        others = [other for other in runs if getattr(other, what) != getattr(run, what)]
        by = tuple(other for other in others if not agree(run, other))
        if not by:
            raise ValueError(f"every run of another {what} agrees with {run.name!r}: none is left to judge it by")
        if by not in made:
            made[by] = calibrate(densities, [i for i, case in enumerate(given) if case.run in by])
        for index, case in enumerate(given):
            if case.run is run:
                found[index] = judge(case, made[by])
        tick()
    return found


def whole_run(name: str, recipe: str, compute, passes, trials, *, task: str = "") -> CompleteRun:
    """Makes a CompleteRun. compute [N], one of them 0; passes and trials [N]. Raises ValueError naming a wrong row."""
    passes, trials = np.asarray(passes, np.float64), np.asarray(trials, np.float64)
    if np.all(compute):
        raise ValueError("no row at compute 0 to take R0 from: evaluate before the first step")
    return CompleteRun(name, recipe, task, check_points(compute, passes / trials, counts=(passes, trials)))

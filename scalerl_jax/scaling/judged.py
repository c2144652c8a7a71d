"""Forecasts compared with outcomes, for a table: of the laws, their average, and the sigmoid without calibration.

"sigmoid, profile"  fit_sigmoid and its profile band, widened by the noise of an evaluation
"paper's procedure" grid="paper" with its axes scaled to the run (A to 1, C_mid to 2.5 times the run's compute, the
                    first 9 % of it left out, as 1,500 of 16,000 GPU-hours are); it has no band
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.scaling.calibrate import FRACTIONS, LEVELS, Case, ForecastScore
from scalerl_jax.scaling.fit import fit_sigmoid

_BURN_IN = 1500 / 16_000  # of the run's compute
_FARTHEST = 2.5  # midpoint, in the run's compute
_PAPER_CELLS = (200, 100)  # of A and C_mid


class Summary(NamedTuple):
    """Means over the cases of one fraction, for one method."""

    fraction: float
    forecast: str
    covered: tuple[float, ...] | None  # by level; None if the forecast has no band
    crps: float | None
    mean_error: float  # of |forecast - measured|, means of the last quarter
    median_error: float
    bias: float  # mean of forecast - measured
    width: float | None  # of the widest band in the last quarter


class SigmoidForecast(NamedTuple):
    """The result of the sigmoid alone on one case."""

    covered: tuple[float, ...]
    error: float
    width: float
    paper_error: float
    identified: bool
    asymptote: float  # fitted on the fraction
    interval: tuple[float, float]  # 95 %
    whole: float  # A fitted on the whole run

    @property
    def missed(self) -> bool:
        """Whether "identified" was wrong."""
        return self.identified and not self.interval[0] <= self.whole <= self.interval[1]


def sigmoid(case: Case, *, tick: Callable[[], None] = lambda: None) -> SigmoidForecast:
    points = case.run.points
    compute = np.concatenate([np.zeros(points.initial_rows), points.compute])
    assert points.counts is not None and points.initial_counts is not None
    passes = np.concatenate([points.initial_counts.passes, points.counts.passes])[:, 0]
    trials = np.concatenate([points.initial_counts.trials, points.counts.trials])[:, 0]
    until, score, counts = case.fraction * points.most, passes / trials, (passes, trials)
    fit = fit_sigmoid(compute, score, counts=counts, fit_until=until)
    order = np.argsort(case.later.compute)
    later, measured = case.later.compute[order], case.later.reward[order]
    variance = float(np.median(case.before.variance))
    covered, low, high = [], measured, measured
    for level in LEVELS:
        low, high = fit.band(later, level=level, evaluation_variance=variance)
        covered.append(float(np.mean((low <= measured) & (measured <= high))))
    last = later > 0.75 * points.most
    asymptotes, midpoints = (np.arange(1, cells + 1) / cells for cells in _PAPER_CELLS)
    try:
        paper = fit_sigmoid(
            compute, score, fit_until=until, burn_in=min(_BURN_IN * points.most, until / 3), grid="paper",
            asymptote_grid=asymptotes, midpoint_grid=midpoints * _FARTHEST * points.most,
        ).predict(later[last])  # fmt: skip
    except ValueError:  # no cell of the grid rises: use the level so far
        paper = np.full(last.sum(), case.before.reward.mean())
    whole = fit_sigmoid(compute, score, counts=counts)
    tick()
    return SigmoidForecast(
        covered=tuple(covered),
        error=float(np.mean(fit.predict(later[last]) - measured[last])),
        width=float(np.mean((high - low)[last])),
        paper_error=float(np.mean(paper - measured[last])),
        identified=fit.identified,
        asymptote=fit.asymptote,
        interval=fit.intervals["asymptote"],
        whole=whole.asymptote,
    )


def summaries(
    cases: Sequence[Case], scores: Sequence[dict[str, ForecastScore]], sigmoids: Sequence[SigmoidForecast]
) -> list[Summary]:
    """The average first, then the laws, then the sigmoid alone."""
    found = []
    for fraction in FRACTIONS:
        rows = [
            {
                **of_laws,
                "sigmoid, profile": ForecastScore(alone.covered, None, alone.error, alone.width),
                "paper's procedure": ForecastScore(None, None, alone.paper_error, None),
            }
            for case, of_laws, alone in zip(cases, scores, sigmoids)
            if case.fraction == fraction
        ]
        if rows:
            found += [_summary(fraction, name, [row[name] for row in rows]) for name in rows[0]]
    return found


def _summary(fraction: float, name: str, ones: Sequence[ForecastScore]) -> Summary:
    errors = [one.error for one in ones]
    size = np.abs(errors)
    return Summary(
        fraction=fraction,
        forecast=name,
        covered=None if ones[0].covered is None else tuple(np.mean([one.covered for one in ones], axis=0).tolist()),
        crps=None if ones[0].crps is None else float(np.mean([one.crps for one in ones])),
        mean_error=float(size.mean()),
        median_error=float(np.median(size)),
        bias=float(np.mean(errors)),
        width=None if ones[0].width is None else float(np.mean([one.width for one in ones])),
    )


def identified_sentence(cases: Sequence[Case], sigmoids: Sequence[SigmoidForecast], fraction: float) -> str:
    """A sentence: how often A was identified, and how often the whole run's A was then outside its interval."""
    rows = [one for case, one in zip(cases, sigmoids) if case.fraction == fraction]
    named = [case.run.name for case, one in zip(cases, sigmoids) if case.fraction == fraction and one.missed]
    missed = f"{len(named)} of these miss the A of the whole run" + (f" ({', '.join(named)})" if named else "")
    return (
        f"from {fraction:.0%}: A is called identified in {sum(one.identified for one in rows)} of {len(rows)}; {missed}"
    )


def case_document(case: Case, scores: dict[str, ForecastScore], alone: SigmoidForecast) -> dict[str, Any]:
    return {
        "run": case.run.name,
        "recipe": case.run.recipe,
        "task": case.run.task,
        "fraction": case.fraction,
        "evaluations": len(case.later.compute),
        "forecasts": {name: dataclasses.asdict(one) for name, one in scores.items()},
        "sigmoid": alone._asdict(),
    }

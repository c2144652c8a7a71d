"""Fits the sigmoid to the evaluations of a run, with the uncertainty of the result.

    fit = fit_sigmoid(gpu_hours, pass_rate, burn_in=1500, fit_until="half", counts=(passes, trials))
    fit.asymptote, fit.intervals["asymptote"], fit.identified, fit.predict(100_000)

R0 is fixed at the score measured at compute 0, or at a given number, or is fitted on request. The fit minimises the sum
of squared residuals in units of the score; with counts of unequal size, each point's weight is its number of trials.
Above 2,000 points, means of neighbours are fitted, weighted by their number of rows (points.py).

grid="paper"  the paper's procedure exactly: a grid over A and C_mid, B by least squares from 1 in each cell
grid="auto"   cells over the whole plane of shapes, then polished to the minimum over all A in [0, 1], B > 0, C_mid > 0

Intervals are 95 % profile likelihood for either grid: for B and C_mid the sigmoid's (profile.py), for A over all laws
that fit the points (family.py).
"""

import dataclasses

import jax
import numpy as np

from scalerl_jax.scaling import identify, law, least_squares, paper_grid, profile, resample, trend
from scalerl_jax.scaling.family import Family, find_family, find_misfit
from scalerl_jax.scaling.identify import SEED_MARGIN as SEED_MARGIN
from scalerl_jax.scaling.law import double_precision
from scalerl_jax.scaling.points import Points, check_points
from scalerl_jax.scaling.profile import LEVEL, FitState

_CURVE_POINTS = 128  # curves and bands are computed at this many points at least


@dataclasses.dataclass(frozen=True)
class SigmoidFit(law.Sigmoid):
    """A fitted curve. Compute is in the unit it was given in."""

    ssr: float  # sum of squared residuals over the points used (times trials / mean trials where counts differ)
    points: int  # number of points used, before binning
    intervals: dict[str, tuple[float, float]]  # 95 %, of asymptote, exponent, midpoint; 0 or inf where open
    identified: bool  # the points identify A (identify.py), and a law describes them (family.py)
    verdict: str  # one sentence: A is identified; or what fits as well and what compute would identify it; or no rise
    used: np.ndarray  # [N] bool over the points given
    dispersion: float  # noise variance of the residuals over that of the counts (without counts: the variance itself)
    state: FitState = dataclasses.field(repr=False)
    samples: np.ndarray | None = dataclasses.field(default=None, repr=False)  # [bootstrap, 4] A, B, C_mid, R0
    trend: str = trend.RISING  # otherwise the parameters have no meaning (trend.py)
    bins: int | None = None  # number of means fitted, if there are too many points (points.py)
    misfit: str = ""  # why no law describes the points (family.py); "" without evidence of it
    compute_to_identify: float = np.inf  # evaluations up to this compute identify A; the points' end if they already do
    laws: Family | None = dataclasses.field(default=None, repr=False)  # all laws; None: the points do not rise

    @property
    def rises(self) -> bool:
        """Whether the run rises, so that the curve has a meaning."""
        return self.trend == trend.RISING

    def predict(self, compute) -> np.ndarray:
        """The curve at compute (a number or an array, 0 allowed): float64 of its shape."""
        compute = np.asarray(compute, np.float64)
        with double_precision():
            curve = np.asarray(_curve(_widened(compute.ravel()), **self.parameters))
        return curve[: compute.size].reshape(compute.shape)

    def band(self, compute, *, level: float = LEVEL, evaluation_variance: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest value of the curves within the threshold at each compute above 0, [M] each.

        evaluation_variance, before the dispersion, widens it from an interval for the curve to one for an evaluation
        with that noise.
        """
        log_compute = np.log(np.atleast_1d(np.asarray(compute, np.float64)))
        asked = len(log_compute)
        log_compute = _widened(log_compute)
        state, rise = self.state, self.state.rise(level)
        with double_precision():
            shapes = profile.band_shapes(state.found)
            ends = profile.band(log_compute, shapes, state.data, state.constraint, state.found.best, rise)
            low, high = (np.asarray(end)[:asked] for end in ends)
        curve = self.predict(np.atleast_1d(compute))
        low, high = np.minimum(low, curve), np.maximum(high, curve)
        if evaluation_variance:
            spread = rise * evaluation_variance
            low, high = curve - np.hypot(curve - low, spread**0.5), curve + np.hypot(high - curve, spread**0.5)
        return np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)

    def interval(self, name: str, *, level: float) -> tuple[float, float]:
        """The interval of asymptote, exponent or midpoint, at any level."""
        if level == LEVEL:
            return self.intervals[name]
        if name == "asymptote" and self.laws is not None:
            return profile.around(self.asymptote, self.laws.interval(level))
        return self.state.intervals(level, tuple(self.parameters.values()))[name]

    def compute_to_reach(self, target: float) -> float:
        """Compute at which the curve reaches `target`; inf if it never does."""
        with double_precision():
            return float(law.compute_to_reach(target, **self.parameters))

    def bootstrap_interval(self, name: str, *, level: float = LEVEL) -> tuple[float, float]:
        """Percentiles of the resamples. Raises ValueError if the fit was made with bootstrap=0."""
        if self.samples is None:
            raise ValueError("bootstrap_interval: the fit was made with bootstrap=0")
        column = self.samples[:, list(self.parameters).index(name)]
        tail = 100 * (1 - level) / 2
        low, high = np.percentile(column, [tail, 100 - tail])
        return float(low), float(high)


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One run or recipe: all evaluations of all its seeds, and the fit of those used. Compared by identity."""

    name: str
    compute: np.ndarray  # [N] in the fit's unit
    reward: np.ndarray  # [N]
    fit: SigmoidFit
    rate: float | None = None  # device-hours per unit of compute, over the whole run; None: not known
    x: str = ""  # the column that compute was read from

    @property
    def points(self) -> Points:
        return self.fit.state.points

    @property
    def seeds(self) -> int:
        """Number of seeds with a point that was used."""
        return len(np.unique(self.points.run))

    @property
    def reached(self) -> float:
        """Compute of the last point used."""
        return self.points.most

    @property
    def held(self) -> np.ndarray:
        """[N] bool: later than the points used."""
        return self.compute > self.reached

    @property
    def held_error(self) -> float | None:
        """Mean of predicted minus measured on the held-out points."""
        if not self.held.any():
            return None
        return float(np.mean(self.fit.predict(self.compute[self.held]) - self.reward[self.held]))


def fit_sigmoid(
    compute,
    reward,
    *,
    initial_reward=None,
    burn_in: float = 0.0,
    fit_until=None,
    counts=None,
    run=None,
    grid: str = "auto",
    asymptote_grid=None,
    midpoint_grid=None,
    bootstrap: int = 0,
    population: bool = False,
    seed: int = 0,
) -> SigmoidFit:
    """Fits R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B).

    Args:
      compute: [N], at least 0, in any unit.
      reward: [N] in [0, 1].
      initial_reward: R0 as a number (exact); None: the row (or the mean of the rows) at compute 0; "fit": fitted too.
      burn_in: points of less compute are dropped (rows at 0 are used for R0 only).
      fit_until: points of more compute are held out; "half" is half of the largest.
      counts: (passes, trials), each [N] or by prompt [N, prompts]; or an array [N, 2].
      run: a label per point, [N]; runs that differ only in their seed are fitted by one curve, and resampled as wholes.
      grid: "paper" uses the best cell of the paper's grid over A and C_mid; "auto" the minimum over the whole plane.
      asymptote_grid, midpoint_grid: the cells; None is the paper's for "paper", and for "auto" comes from the data
        (a grid given with "auto" only adds starting cells, and does not confine the minimum).
      bootstrap: number of resamples to refit.
      population: resample the prompts too (resample.py).
      seed: of the resamples.

    Raises ValueError on input that cannot be fitted.
    """
    if grid not in ("auto", "paper"):
        raise ValueError(f"grid={grid!r}: must be 'auto' or 'paper'")
    if grid == "paper" and isinstance(initial_reward, str):
        raise ValueError("initial_reward='fit': the paper's grid holds R0 fixed; use grid='auto'")
    points = check_points(
        compute, reward, initial_reward=initial_reward, burn_in=burn_in, fit_until=fit_until, counts=counts, run=run
    )
    if midpoint_grid is not None:
        midpoint_grid = np.asarray(midpoint_grid, np.float64)
        if not np.all(midpoint_grid > 0):
            raise ValueError("midpoint_grid: must be above 0")
    data = squares_data(points)
    cells = least_squares.search_cells(data.log_compute, midpoint_grid if grid == "auto" else None)
    state = profile.likelihood(points, cells)
    word = trend.find_trend(state)
    if grid == "paper":
        falls = trend.sentence(trend.FALLING, points)
        estimate, ssr = paper_estimate(points, asymptote_grid, midpoint_grid, falls)
    else:
        estimate, ssr = least_squares_estimate(data, cells, least_squares.free())
    if word == trend.RISING and estimate[0] <= estimate[3]:  # the test lets a measured R0 move, the estimate does not
        word = trend.FALLING
    intervals = state.intervals(LEVEL, estimate)
    identified, needed, why, laws = False, np.inf, "", None
    if word == trend.RISING:
        laws = find_family(state)
        intervals["asymptote"] = profile.around(estimate[0], laws.interval(LEVEL))
        if grid == "auto":  # the paper has no such test
            why = find_misfit(points, laws.predict(points.compute))
        if not why:
            bounds = (*intervals["asymptote"], intervals["midpoint"][1])
            fitted = law.Sigmoid(*estimate).parameters
            reached = float(_curve(_widened(np.array([points.most])), **fitted)[0])
            identified = bool(identify.is_identified(*bounds, initial=estimate[3], most=points.most, reached=reached))
            needed = points.most if identified else identify.compute_to_identify(laws, estimate, intervals)
        verdict = identify.sentence(identified, intervals["asymptote"], most=points.most, needed=needed, misfit=why)
    else:
        verdict = trend.sentence(word, points)
    samples = None
    if bootstrap:
        samples = resample.bootstrap(points, data, cells, estimate, count=bootstrap, seed=seed, population=population)
    return SigmoidFit(
        *estimate,
        ssr=ssr + points.scatter,
        points=int(points.rows.sum()),
        intervals=intervals,
        identified=identified,
        verdict=verdict,
        used=points.used,
        dispersion=state.dispersion,
        state=state,
        samples=samples,
        trend=word,
        bins=None if points.binned is None else len(points.compute),
        compute_to_identify=needed,
        misfit=why,
        laws=laws,
    )


_curve = jax.jit(law.sigmoid_law)


def _widened(values: np.ndarray) -> np.ndarray:
    """values [M] padded with ones, so that few shapes are compiled."""
    return np.pad(
        values, (0, least_squares.padded(len(values), least=_CURVE_POINTS) - len(values)), constant_values=1.0
    )


def squares_data(points: Points) -> least_squares.Data:
    """Data for the paper's objective: residuals in units of the score, R0 fixed unless it is fitted."""
    free = points.initial_mode == "free"
    return least_squares.make_data(
        points.compute,
        points.reward,
        points.trials_weight,
        initial=points.initial,
        initial_weight=points.initial_trials_weight if free else np.inf,
    )


Estimate = tuple[float, float, float, float]  # A, B, C_mid, R0


def least_squares_estimate(data: least_squares.Data, cells, constraint) -> tuple[Estimate, float]:
    """The minimum over the whole plane of shapes, and its sum of squares."""
    with double_precision():
        solution = jax.device_get(least_squares.search_from_rows(cells, data, constraint))
    exponent, midpoint = np.exp(solution.shape)
    estimate = (float(solution.asymptote), float(exponent), float(midpoint), float(solution.initial_reward))
    return estimate, float(solution.cost)


def paper_estimate(points: Points, asymptote_grid, midpoint_grid, falls: str) -> tuple[Estimate, float]:
    """The best cell of the paper's grid (None: the paper's axes), and its sum of squares. falls: the error's text if no
    cell rises."""
    asymptotes = paper_grid.ASYMPTOTES if asymptote_grid is None else np.asarray(asymptote_grid, np.float64)
    midpoints = paper_grid.MIDPOINTS if midpoint_grid is None else midpoint_grid
    fitted = paper_grid.fit_cells(
        points.compute,
        points.reward,
        initial_reward=points.initial,
        weight=points.trials_weight,
        asymptotes=asymptotes,
        midpoints=midpoints,
    )
    cell = paper_grid.best_cell(fitted)
    if cell is None:
        raise ValueError(f"grid='paper': no cell has an exponent above 0; {falls}")
    row, column = cell
    estimate = (float(asymptotes[row]), float(fitted.exponent[cell]), float(midpoints[column]), points.initial)
    return estimate, float(fitted.ssr[cell])

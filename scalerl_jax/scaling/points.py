"""Prepares the evaluations of a run for a fit: checks them, cuts them to the window, separates R0 and the noise.

Very many evaluations are binned: replaced by means of neighbours in compute, weighted by their number of rows.

A fit computes with [shapes, points] numbers at once, and a million rows contain no more information for it than a
thousand means of them. So more than MOST_POINTS rows are binned, each run separately:

    edges    half evenly spaced in ln C (so that bins are narrow where the curve bends), half in the number of rows
    place    mean of ln C, weighted as the score
    score    mean, weighted by trials if there are any; passes and trials are summed, prompt by prompt
    weight   the number of rows, or the trials; the scatter of the rows around their mean is kept for the noise

A bin is at most 1/512 of the range of ln C wide: the law's curvature within it is far below the scatter of its rows.

The noise of an evaluation's score around the policy's true score comes from pass counts or from the scatter. With the
passes of every prompt, the sampling noise of a score on *these* prompts is known: each prompt contributes
p (1 - p) / (G - 1), without bias. With totals only, R (1 - R) / N is an upper bound, since the differences between
prompts are not known (prompts that always or never pass have no noise). Without counts only the residuals are used. In
all three cases the residuals contribute: the noise variance is that of the counts times a dispersion

    phi = (nu_0 + Q / variance) / (nu_0 + degrees of freedom)

i.e. the counts weigh as much as nu_0 residuals, and intervals use Student's t with both.
"""

import dataclasses

import numpy as np

PARAMETERS = 3  # A, B, C_mid
LEAST_VARIANCE = 1e-8  # of a score: 1e-4 is below what any evaluation resolves
BELIEF_PROMPTS = 10.0  # nu_0 with the passes of every prompt
BELIEF_TOTALS = 4.0  # nu_0 with totals only
MOST_POINTS = 2000  # rows above which points are binned
_BINS = 1024  # at most, for all runs together; for one run at least _LEAST
_LEAST = 8


@dataclasses.dataclass(frozen=True)
class Counts:
    """Passes and trials of each evaluation by prompt; a single column holds totals."""

    passes: np.ndarray  # [N, prompts]
    trials: np.ndarray  # [N, prompts]

    @property
    def per_prompt(self) -> bool:
        return self.passes.shape[1] > 1 and bool(np.all(self.trials[self.trials > 0] > 1))

    @property
    def total(self) -> np.ndarray:
        """Trials of each evaluation, [N]."""
        return self.trials.sum(axis=1)

    def rows(self, chosen: np.ndarray) -> "Counts":
        return Counts(self.passes[chosen], self.trials[chosen])

    def score(self) -> np.ndarray:
        """Mean over prompts of passes / trials, [N]; prompts without a trial do not count."""
        asked = self.trials > 0
        return np.sum(self.passes / np.where(asked, self.trials, 1), axis=1) / asked.sum(axis=1)

    def variance(self) -> np.ndarray:
        """Variance of the score of each evaluation with fixed prompts, [N], above 0."""
        total = self.total
        # Never 0, even if all passed: the rule of succession bounds what N trials without a failure still allow.
        shrunk = (self.passes.sum(axis=1) + 1) / (total + 2)
        floor = shrunk * (1 - shrunk) / total
        if not self.per_prompt:
            return floor
        asked = self.trials > 0
        trials = np.where(asked, self.trials, 2)
        rate = self.passes / trials
        fixed = np.sum(np.where(asked, rate * (1 - rate) / (trials - 1), 0.0), axis=1) / asked.sum(axis=1) ** 2
        return np.maximum(fixed, 0.05 * floor)


def read_counts(counts, points: int) -> Counts | None:
    """Accepts (passes, trials), each [N] or [N, prompts] (trials also a number), or an array [N, 2].

    Raises ValueError naming the row where passes and trials are inconsistent.
    """
    if counts is None or isinstance(counts, Counts):
        return counts
    if isinstance(counts, np.ndarray) and counts.ndim == 2 and counts.shape[1] == 2:
        counts = counts.T
    if len(counts) != 2:
        raise ValueError("counts: expected (passes, trials), or an array of two columns, passes and trials")
    passes, trials = counts
    passes = np.asarray(passes, np.float64)
    if passes.ndim not in (1, 2) or len(passes) != points:
        raise ValueError(f"counts: passes have shape {passes.shape}, but there are {points} points")
    trials = np.asarray(trials, np.float64)
    if trials.ndim == 1 and passes.ndim == 2 and len(trials) == points:
        trials = trials[:, None]
    if trials.ndim > passes.ndim:
        raise ValueError(f"counts: trials have shape {trials.shape}, passes {passes.shape}")
    passes, trials = np.broadcast_arrays(passes, trials)
    wrong = ~((passes >= 0) & (passes <= trials) & np.isfinite(trials))
    if wrong.any():
        row = int(np.argwhere(wrong)[0][0])
        raise ValueError(f"counts: row {row}: passes must be between 0 and the trials")
    if passes.ndim == 1:
        passes, trials = passes[:, None], trials[:, None]
    empty = trials.sum(axis=1) == 0
    if empty.any():
        raise ValueError(f"counts: row {int(np.argmax(empty))}: no trials")
    return Counts(np.array(passes), np.array(trials))


@dataclasses.dataclass(frozen=True)
class Bins:
    """M bins of N rows, by run and compute."""

    of_row: np.ndarray  # [N] int, 0 to M - 1
    rows: np.ndarray  # [M] number in each bin

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums of values [N] or [N, columns] over each bin."""
        if values.ndim == 1:
            return np.bincount(self.of_row, values, minlength=len(self.rows))
        return np.stack([self.sums(column) for column in values.T], axis=1)


def make_bins(compute: np.ndarray, run: np.ndarray) -> Bins:
    """Makes bins. compute [N] above 0; run [N] int, the run of each row."""
    log_compute = np.log(compute)
    each = max(_LEAST, _BINS // (int(run.max()) + 1))
    even = np.linspace(log_compute.min(), log_compute.max(), each // 2 + 1)
    filled = np.quantile(log_compute, np.linspace(0, 1, each - each // 2 + 1))
    edges = np.union1d(even, filled)
    place = np.clip(np.searchsorted(edges, log_compute, side="right") - 1, 0, max(len(edges) - 2, 0))
    _, of_row, rows = np.unique(run.astype(np.int64) * len(edges) + place, return_inverse=True, return_counts=True)
    return Bins(of_row.reshape(-1), rows)


def thinned(compute: np.ndarray, reward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most as many points as are visible in a plot: the points, or means of neighbours. compute [N] above 0."""
    if len(compute) <= MOST_POINTS:
        return compute, reward
    bins = make_bins(compute, np.zeros(len(compute), int))
    return np.exp(bins.sums(np.log(compute)) / bins.rows), bins.sums(reward) / bins.rows


class TooFewPoints(ValueError):
    """The window has too few points for the law; more evaluations would help."""


@dataclasses.dataclass(frozen=True)
class Points:
    """N points used, all with compute above 0, and the data on R0. A point is a row, or a bin of rows."""

    compute: np.ndarray  # [N]
    reward: np.ndarray  # [N]
    counts: Counts | None  # one row for each point
    run: np.ndarray  # [N] int, the run of each point
    used: np.ndarray  # [given] bool
    initial: float  # R0: given, or the mean of the rows at compute 0
    initial_mode: str  # exact: given as a number | measured: the rows at 0, held fixed | free: fitted
    initial_rows: int  # rows at compute 0
    initial_counts: Counts | None  # of those rows
    most: float  # compute of the last row used
    binned: np.ndarray | None = None  # [N] rows in each point, if binned
    scatter: float = 0.0  # sum of squares of the rows around the means of their bins, times trials_weight

    @property
    def rows(self) -> np.ndarray:
        """[N] number of rows in each point."""
        return np.ones(len(self.compute)) if self.binned is None else self.binned.astype(np.float64)

    @property
    def _mean_trials(self) -> float:
        """Mean trials of a row."""
        assert self.counts is not None
        return float(self.counts.total.sum() / self.rows.sum())

    @property
    def trials_weight(self) -> np.ndarray:
        """[N] weights: trials over their mean per row; equal evaluations all weigh 1, as in the paper."""
        return self.rows if self.counts is None else self.counts.total / self._mean_trials

    @property
    def initial_trials_weight(self) -> float:
        """Weight of the rows at compute 0 on the scale of trials_weight."""
        if self.counts is None or self.initial_counts is None:
            return float(self.initial_rows)
        return float(self.initial_counts.total.sum() / self._mean_trials)

    @property
    def variance(self) -> np.ndarray:
        """[N] variance of the scores with fixed prompts; without counts that of a row is 1."""
        return 1 / self.rows if self.counts is None else self.counts.variance()

    @property
    def noise_variance(self) -> np.ndarray:
        """[N] variance of the scores in their own units; without counts from differences of neighbours, which hardly
        depend on the law."""
        if self.counts is not None:
            return self.counts.variance()
        reward = self.reward[np.argsort(self.compute, kind="stable")]
        scatter = float(np.mean(np.diff(reward) ** 2)) / 2 if len(reward) > 1 else 0.0
        return np.maximum(scatter, LEAST_VARIANCE) / self.rows

    @property
    def initial_variance(self) -> float:
        """Variance of the measured R0 on the same scale: 0 if R0 is exact, infinite if it was not measured."""
        if self.initial_mode == "exact":
            return 0.0
        if not self.initial_rows:
            return np.inf
        if self.initial_counts is None:
            return 1.0 / self.initial_rows
        return float(np.sum(self.initial_counts.variance())) / self.initial_rows**2

    @property
    def belief(self) -> float:
        """The number of residuals that the counts' information on the noise is worth."""
        if self.counts is None:
            return 0.0
        return BELIEF_PROMPTS if self.counts.per_prompt else BELIEF_TOTALS

    @property
    def degrees(self) -> float:
        """Degrees of freedom of the residuals; the measured R0 is a point and a parameter."""
        without_rows = self.initial_mode == "free" and not self.initial_rows
        heard = len(self.compute) if self.counts is not None else self.rows.sum()
        return float(heard - PARAMETERS - without_rows)

    @property
    def inner_squares(self) -> float:
        """The contribution of the rows within bins to the sum of squares with weights 1 / variance.

        0 with counts: these give the noise, and the bins' scores are enough residuals.
        """
        return self.scatter if self.counts is None else 0.0

    def split(self, until: float) -> "tuple[Points, Points]":
        """The points with compute up to `until`, and the later ones. Raises TooFewPoints if the first are too few for a
        law, or there are no later ones."""
        early = self.compute <= until
        if len(np.unique(self.compute[early])) < PARAMETERS or early.all():
            raise TooFewPoints(f"{early.sum()} points up to {until:g} of {len(early)}")
        return self._of(early), self._of(~early)

    def _of(self, chosen: np.ndarray) -> "Points":
        return dataclasses.replace(
            self,
            compute=self.compute[chosen],
            reward=self.reward[chosen],
            counts=None if self.counts is None else self.counts.rows(chosen),
            run=self.run[chosen],
            most=float(self.compute[chosen].max()),
            binned=None if self.binned is None else self.binned[chosen],
            scatter=0.0,
        )


def check_points(
    compute, reward, *, initial_reward=None, burn_in: float = 0.0, fit_until=None, counts=None, run=None
) -> Points:
    """Arguments as in fit_sigmoid. Raises ValueError that names the row (from 0) or the argument."""
    compute = np.asarray(compute, np.float64)
    reward = np.asarray(reward, np.float64)
    if compute.ndim != 1 or compute.shape != reward.shape:
        shapes = f"have {compute.shape} and {reward.shape}"
        raise ValueError(f"compute and reward: expected two lists of one length, {shapes}")
    for name, values, wrong, what in (
        ("compute", compute, ~np.isfinite(compute), "is not a finite number"),
        ("reward", reward, ~np.isfinite(reward), "is not a finite number"),
        ("compute", compute, compute < 0, "is negative"),
        ("reward", reward, (reward < 0) | (reward > 1), "is outside [0, 1]"),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(f"{name}: row {row}: {values[row]} {what}")
    counts = read_counts(counts, len(compute))
    if counts is not None:
        apart = np.abs(counts.score() - reward)
        if apart.max() > 0.02:
            row = int(np.argmax(apart))
            both = f"passes / trials is {counts.score()[row]:.4f}, the reward {reward[row]:.4f}"
            raise ValueError(f"counts: row {row}: {both}")
    labels = np.zeros(len(compute), int)
    if run is not None:
        if len(run) != len(compute):
            raise ValueError(f"run: expected {len(compute)} labels, have {len(run)}")
        whole = isinstance(run, np.ndarray) and run.dtype.kind == "i"
        labels = np.unique(run if whole else [str(label) for label in run], return_inverse=True)[1].reshape(-1)

    if isinstance(fit_until, str):
        if fit_until != "half":
            raise ValueError(f"fit_until={fit_until!r}: must be a number or 'half'")
        fit_until = compute.max() / 2 if len(compute) else 0.0
    last = np.inf if fit_until is None else float(fit_until)
    start = compute == 0
    used = ~start & (compute >= burn_in) & (compute <= last)
    if len(np.unique(compute[used])) < PARAMETERS:
        raise TooFewPoints(
            f"{len(np.unique(compute[used]))} points of different compute above 0 are left to fit "
            f"(burn_in={burn_in:g}, fit_until={last:g}); the law has {PARAMETERS} parameters"
        )

    initial_counts = counts.rows(start) if counts is not None and start.any() else None
    rows = int(start.sum())
    if initial_reward is None or isinstance(initial_reward, str):
        if initial_reward not in (None, "fit"):
            raise ValueError(f"initial_reward={initial_reward!r}: must be a number, None or 'fit'")
        if initial_reward is None and not rows:
            raise ValueError("initial_reward: no row at compute 0 to take R0 from; give it as a number, or 'fit'")
        mode = "measured" if initial_reward is None else "free"
        weights = initial_counts.total if initial_counts is not None else None
        initial = float(np.average(reward[start], weights=weights) if rows else reward[used].min())
    else:
        mode, rows, initial = "exact", 0, float(initial_reward)
        if not 0 <= initial <= 1:
            raise ValueError(f"initial_reward={initial_reward}: is outside [0, 1]")
    points = Points(
        compute=compute[used],
        reward=reward[used],
        counts=None if counts is None else counts.rows(used),
        run=labels[used],
        used=used,
        initial=initial,
        initial_mode=mode,
        initial_rows=rows,
        initial_counts=initial_counts,
        most=float(compute[used].max()),
    )
    return points if len(points.compute) <= MOST_POINTS else _put_together(points)


def _put_together(points: Points) -> Points:
    bins = make_bins(points.compute, points.run)
    weight = points.trials_weight
    of_bin = bins.sums(weight)
    reward = bins.sums(weight * points.reward) / of_bin
    counts = None
    if points.counts is not None:
        counts = Counts(bins.sums(points.counts.passes), bins.sums(points.counts.trials))
    first = np.unique(bins.of_row, return_index=True)[1]
    return dataclasses.replace(
        points,
        compute=np.exp(bins.sums(weight * np.log(points.compute)) / of_bin),
        reward=reward,
        counts=counts,
        run=points.run[first],
        binned=bins.rows,
        scatter=float(np.sum(weight * (points.reward - reward[bins.of_row]) ** 2)),
    )

"""Many evaluations as few: means of neighbours in compute, as heavy as the rows behind them.

A fit computes with [shapes, points] numbers at once, and a million rows tell it no more than a thousand means of them.
So above MOST_POINTS rows are put together, runs apart:

    edges    half of them even in ln C (so that a bin is narrow where the curve bends), half even in the number of rows
    place    mean of ln C, weighted as the score
    score    mean, weighted by trials where there are some; passes and trials are summed, prompt by prompt
    weight   the number of rows, or the trials; what the rows scatter around their mean is kept for the noise

A bin is at most 1/512 of the range of ln C wide: what the law bends within it is far below what its rows scatter.
"""

import dataclasses

import numpy as np

MOST_POINTS = 2000  # rows up to which nothing is put together
_BINS = 1024  # at most, of all runs together; of a run at least _LEAST
_LEAST = 8


@dataclasses.dataclass(frozen=True)
class Bins:
    """M bins of N rows, by run and compute."""

    of_row: np.ndarray  # [N] int, 0 to M - 1
    rows: np.ndarray  # [M] how many there are in each

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Of values [N] or [N, columns], bin by bin."""
        if values.ndim == 1:
            return np.bincount(self.of_row, values, minlength=len(self.rows))
        return np.stack([self.sums(column) for column in values.T], axis=1)


def make_bins(compute: np.ndarray, run: np.ndarray) -> Bins:
    """compute [N] above 0; run [N] int, which run each row is of."""
    log_compute = np.log(compute)
    each = max(_LEAST, _BINS // (int(run.max()) + 1))
    even = np.linspace(log_compute.min(), log_compute.max(), each // 2 + 1)
    filled = np.quantile(log_compute, np.linspace(0, 1, each - each // 2 + 1))
    edges = np.union1d(even, filled)
    place = np.clip(np.searchsorted(edges, log_compute, side="right") - 1, 0, max(len(edges) - 2, 0))
    _, of_row, rows = np.unique(run.astype(np.int64) * len(edges) + place, return_inverse=True, return_counts=True)
    return Bins(of_row.reshape(-1), rows)


def thinned(compute: np.ndarray, reward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points as can be seen in a picture: themselves, or means of neighbours. compute [N] above 0."""
    if len(compute) <= MOST_POINTS:
        return compute, reward
    bins = make_bins(compute, np.zeros(len(compute), int))
    return np.exp(bins.sums(np.log(compute)) / bins.rows), bins.sums(reward) / bins.rows

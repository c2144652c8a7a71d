"""Rows of a run with the same compute: finds them, guesses the cause, and replaces them by one row.

the same score            the same row logged again
goes back in mid-run      a resumed run: rows logged after its checkpoint appear twice, and the later ones are valid
goes back to the start    several runs one after another in one file
a different score         several evaluations at one compute, unless their times show a resumed run
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling.points import Counts

_LISTED = "tell them apart with --run_column or --seed_column"


@dataclasses.dataclass(frozen=True)
class Ordered:
    """N rows ordered by compute, then by time of writing."""

    order: np.ndarray  # [N] positions in the rows as given
    starts: np.ndarray  # [M] into order: the first row of each compute
    repeated: np.ndarray  # [N] bool in this order: not the first row of its compute
    descents: int  # how often the compute goes back from a row to the next as given
    same_score: bool  # repeated computes always have repeated scores
    back_to_start: bool  # every descent goes to the least compute
    later: bool  # times show that repeated rows were written later

    @property
    def first_pair(self) -> tuple[int, int]:
        """Positions, as given, of the first repeated pair of rows: (earlier, later)."""
        again = np.flatnonzero(self.repeated)
        before = self.starts[np.searchsorted(self.starts, again, side="right") - 1]
        at = int(np.argmin(self.order[again]))
        first, second = sorted((int(self.order[before[at]]), int(self.order[again[at]])))
        return first, second

    def looks_like(self, x: str) -> str:
        """A hint on the cause and the remedy. x: the column's name."""
        if self.same_score:
            return "the same score each time looks like one row logged again: --duplicates=last keeps one of them"
        if self.descents and self.back_to_start:
            return f"{x!r} starts over, which looks like several runs in one file: {_LISTED}"
        if self.descents or self.later:
            how = f"{x!r} goes back and on again" if self.descents else "the same value, written later"
            return f"{how}, which looks like a resumed run: --duplicates=last keeps what it went on with"
        return (
            "another score beside it looks like several evaluations at one compute: --duplicates=mean takes their mean "
            f"(if they are several runs, {_LISTED})"
        )


def in_order(compute: np.ndarray, reward: np.ndarray, times: np.ndarray | None) -> Ordered:
    """Orders rows. compute, reward, times (or None): [N] in the file's order; a time may be NaN."""
    steps = np.diff(compute)
    descents = np.flatnonzero(steps < 0)
    if times is not None and np.isnan(times).any():
        times = None
    order = np.argsort(compute, kind="stable") if times is None else np.lexsort((times, compute))
    by_compute = compute[order]
    repeated = np.concatenate([[False], np.diff(by_compute) == 0])
    starts = np.flatnonzero(~repeated)
    same = np.diff(reward[order], prepend=np.nan)[repeated] == 0
    later = times is not None and bool(np.all(np.diff(times[order], prepend=-np.inf)[repeated] > 0))
    return Ordered(
        order=order,
        starts=starts,
        repeated=repeated,
        descents=len(descents),
        same_score=bool(same.all()),
        back_to_start=bool(np.all(compute[descents + 1] <= compute[0])) and bool(compute[0] == compute.min()),
        later=later,
    )


def without(
    found: Ordered, how: str, reward: np.ndarray, counts: Counts | None
) -> tuple[np.ndarray, np.ndarray, Counts | None]:
    """One row for each compute [M], with its score and counts.

    how: "last" uses the last row's; "mean" sums the counts and averages the scores, weighted by trials if any.
    """
    ends = np.append(found.starts[1:], len(found.order)) - 1
    last = found.order[ends]
    if how != "mean" or not found.repeated.any():
        return last, reward[last], None if counts is None else counts.rows(last)
    order = found.order
    weight = np.ones(len(order)) if counts is None else counts.total[order]
    weight = np.where(weight > 0, weight, 1e-300)  # a row without trials is refused later, by name
    mean = np.add.reduceat(weight * reward[order], found.starts) / np.add.reduceat(weight, found.starts)
    if counts is not None:
        counts = Counts(*(np.add.reduceat(part[order], found.starts) for part in (counts.passes, counts.trials)))
    return last, mean, counts

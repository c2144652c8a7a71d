"""Numbers as the page has them: five digits, only values that JSON allows, and no more points than are visible."""

from collections.abc import Iterable, Sequence

import numpy as np

MOST_POINTS = 400  # of a series; a chart is not much wider in pixels


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Five significant digits; None for a missing value, an infinity or NaN."""
    return [None if value is None or not np.isfinite(value) else float(f"{value:.5g}") for value in values]


def groups_of(count: int, most: int = MOST_POINTS) -> list[slice]:
    """`count` points as at most `most` groups of neighbours, each of the same size but the last."""
    size = max(1, -(-count // most))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def thinned(values: Sequence[float | None], groups: Sequence[slice]) -> dict[str, list[float | None]]:
    """Mean of each group, and its minimum and maximum if groups have more than one point. None without values."""
    numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    parts = [part[np.isfinite(part)] for part in (numbers[group] for group in groups)]
    out = {"mean": rounded(part.mean() if part.size else None for part in parts)}
    if any(group.stop - group.start > 1 for group in groups):
        out["low"] = rounded(part.min() if part.size else None for part in parts)
        out["high"] = rounded(part.max() if part.size else None for part in parts)
    return out

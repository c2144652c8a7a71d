"""What a complete run says of runs like it: how it bent and where it ended, by Richards' curve (laws.py)."""

from typing import NamedTuple


class Shape(NamedTuple):
    """Without the midpoint: not how fast it went."""

    exponent: float  # B
    skew: float  # nu
    asymptote: float  # A

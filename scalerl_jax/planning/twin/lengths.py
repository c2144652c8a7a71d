"""How many tokens completions have: what a run has sampled, or quantiles that somebody gives."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Lengths(Protocol):
    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """[count] int, tokens, each at least 1."""
        ...

    @property
    def mean(self) -> float:
        """Tokens."""
        ...


class Sampled:
    """Those of completions that there were. Each is drawn alone: what prompts do to their groups is left out."""

    def __init__(self, tokens: Sequence[int] | np.ndarray, *, mean: float = 0.0):
        """mean: of all completions, where `tokens` are a sample of them; they are scaled to it. 0: theirs."""
        found = np.asarray(tokens, np.float64)
        if found.ndim != 1 or not len(found) or not (np.isfinite(found) & (found >= 1)).all():
            raise ValueError("lengths must be numbers of tokens, at least one of them, and each at least 1")
        scale = mean / found.mean() if mean else 1.0
        self._tokens = np.maximum(1, found * scale)

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        drawn = random.choice(self._tokens, count)
        # Up or down by chance, so that a mean between two whole numbers is kept.
        return np.maximum(1, np.floor(drawn + random.random(count))).astype(np.int64)

    @property
    def mean(self) -> float:
        return float(self._tokens.mean())


class Quantiles:
    """Straight lines between quantiles: ((share, tokens), ...), rising, the last at share 1.

    Below the first share every completion has its tokens. Raises ValueError (one line) on what is no distribution.
    """

    def __init__(self, quantiles: Sequence[tuple[float, float]]):
        shares, tokens = np.array([q[0] for q in quantiles]), np.array([q[1] for q in quantiles])
        if not len(shares) or not np.isfinite(tokens).all() or tokens[0] < 1 or (np.diff(tokens) < 0).any():
            raise ValueError("tokens must be 1 or more and not fall")
        if not (np.diff(shares) > 0).all() or shares[0] < 0 or shares[-1] != 1:
            raise ValueError("shares must rise from 0 or more, and the last must be 1: the longest completion")
        self._shares, self._tokens = shares, tokens

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        drawn = np.interp(random.random(count), self._shares, self._tokens)
        return np.maximum(1, np.floor(drawn + random.random(count))).astype(np.int64)

    @property
    def mean(self) -> float:
        between = np.diff(self._shares) @ (self._tokens[1:] + self._tokens[:-1]) / 2
        return float(self._shares[0] * self._tokens[0] + between)


def parse_quantiles(text: str) -> Quantiles:
    """Of 'share:tokens,...', as in 0.5:4000,0.9:11000,1:14000. Raises ValueError (one line)."""
    pairs = []
    for part in text.split(","):
        share, colon, tokens = part.partition(":")
        try:
            pairs.append((float(share), float(tokens)))
        except ValueError:
            raise ValueError(f"{part!r} is not SHARE:TOKENS, as 0.5:4000") from None
        if not colon:
            raise ValueError(f"{part!r} is not SHARE:TOKENS, as 0.5:4000")
    return Quantiles(pairs)

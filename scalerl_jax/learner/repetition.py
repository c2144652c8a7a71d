"""Whether completions repeat themselves, by the tokens that were sampled.

    repeated(y)   = 1 - (distinct 4-grams of y) / (4-grams of y)      seq-rep-4 of Welleck et al. (arXiv 1908.04319)
    repetition    = mean over completions of repeated(y)
    repetitive    = share of completions whose last 512 tokens have repeated > 1/2: they end in a loop

Text that goes on has some of its 4-grams twice (the quickstart's chains of sums a tenth, and no completion a half); a
loop has nothing else within a few rounds. The end alone is looked at, since that is where loops are: a completion that
fell into one goes on until the budget cuts it.

4-grams are compared by a 64-bit hash, sorted: that two of a completion hash alike and differ has a chance below 1e-11.
"""

from collections.abc import Sequence

import numpy as np

NGRAM = 4
TAIL = 512  # tokens
LIMIT = 0.5
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits well mixed


def repetition_metrics(completions: Sequence[np.ndarray]) -> dict[str, float]:
    """completions: the sampled tokens of each, [tokens] int32."""
    whole = [repeated(tokens) for tokens in completions]
    ends = [repeated(tokens[-TAIL:]) if len(tokens) > TAIL else share for tokens, share in zip(completions, whole)]
    return {"repetition": float(np.mean(whole)), "repetitive": float(np.mean(np.array(ends) > LIMIT))}


def repeated(tokens: np.ndarray) -> float:
    """Share of the 4-grams that have been there before; 0 where there are none."""
    count = len(tokens) - NGRAM + 1
    if count < 1:
        return 0.0
    wide = tokens.astype(np.uint64)
    hashes = np.zeros(count, np.uint64)
    for place in range(NGRAM):
        hashes = (hashes + wide[place : place + count]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(32)
    hashes.sort()
    return float(np.count_nonzero(hashes[1:] == hashes[:-1]) / count)

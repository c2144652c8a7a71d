"""Random segments that the tests of the trainer share."""

import numpy as np

from scalerl_jax.learner.packing import Segment


def make_segments(lengths, *, vocabulary: int, seed: int = 0) -> list[Segment]:
    """One segment of each length (tokens). Two thirds of the tokens after the first two carry loss; weights sum to 1.

    Log-probs are those of a nearly uniform policy, which fresh parameters are, give or take 0.3 nats.
    """
    rng = np.random.default_rng(seed)
    loss = [(np.arange(n) >= 2) & (rng.random(n) < 0.67) for n in lengths]
    weights = [mask * rng.uniform(0.5, 1.5, len(mask)) for mask in loss]
    total = sum(w.sum() for w in weights)
    return [
        Segment(
            tokens=rng.integers(0, vocabulary, len(w)).astype(np.int32),
            weights=(w / total).astype(np.float32),
            advantages=np.full(len(w), rng.normal(), np.float32),
            generator_logprobs=(-np.log(vocabulary) + 0.3 * rng.normal(size=len(w))).astype(np.float32),
        )
        for w in weights
    ]

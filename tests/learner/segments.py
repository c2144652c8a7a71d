"""Random segments that the tests of the trainer share."""

import dataclasses

import numpy as np

from scalerl_jax.contract.codec import TeacherScores
from scalerl_jax.learner.packing import Segment
from scalerl_jax.model import DecoderConfig


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


def with_teacher(segment: Segment, *, vocabulary: int, k: int, seed: int = 0) -> Segment:
    """With a teacher whose distribution at each token is random; it names k tokens, of which some may be missing."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(segment.tokens), vocabulary))
    logprobs = (logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))).astype(np.float32)
    ids = np.argsort(-logprobs, axis=-1)[:, :k].astype(np.int32)
    ids[rng.random(ids.shape) < (0.2 if k < vocabulary else 0)] = -1
    top = np.where(ids >= 0, np.take_along_axis(logprobs, np.maximum(ids, 0), axis=-1), np.float32(0))
    own = np.take_along_axis(logprobs, segment.tokens[:, None], axis=-1)[:, 0]
    return dataclasses.replace(segment, teacher=TeacherScores(own, ids, top))


def with_experts(segments: list[Segment], decoder: DecoderConfig, *, seed: int) -> list[Segment]:
    """With random experts for each of their tokens."""
    rng, out = np.random.default_rng(seed), []
    for segment in segments:
        drawn = rng.random((len(segment.tokens) - 1, decoder.layers, decoder.experts)).argsort(axis=-1)
        out.append(dataclasses.replace(segment, experts=drawn[..., : decoder.experts_per_token].astype(np.uint8)))
    return out

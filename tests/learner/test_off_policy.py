"""Effective sample sizes and the 99th percentile against their definitions, in exact fractions and plain loops."""

import math
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.learner.batch import effective_share, off_policy_metrics
from scalerl_jax.learner.packing import Segment, plain
from scalerl_jax.learner.trainer import Layout
from scalerl_jax.model import Precision, init_params
from tests.learner.segments import make_segments
from tests.support.models import toy_decoder
from tests.support.trainers import trainer_of


def completions(seed, lengths, spread):
    """Segments with a prompt of three tokens and forced ones in between, and the trainer's log-probs."""
    rng = np.random.default_rng(seed)
    segments, logprobs = [], []
    for length in lengths:
        weights = (rng.random(length + 4) < 0.8).astype(np.float32) / 7
        weights[:3], weights[3] = 0, 1
        generator = -rng.random(length + 4).astype(np.float32)
        segments.append(Segment(np.zeros(length + 4, np.int32), weights, weights, generator))
        ours = generator + spread * rng.normal(size=length + 4).astype(np.float32)
        ours[weights == 0] = 1e9  # a token without loss has no part in it
        logprobs.append(ours)
    return segments, logprobs


def metrics(segments, logprobs):
    """Each segment is a completion."""
    return off_policy_metrics(segments, logprobs, [(0, i, 0) for i in range(len(segments))])


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_equal_the_definitions(seed, lengths):
    segments, logprobs = completions(seed, lengths, 0.2)
    found = metrics(segments, [*logprobs, np.zeros(5, np.float32)])  # and one beside, which is none of it
    ratios = [
        [math.exp(float(o) - float(g)) for o, g, w in zip(ours, s.generator_logprobs, s.weights) if w > 0]
        for s, ours in zip(segments, logprobs)
    ]
    products = [math.prod(row) for row in ratios]
    means = [math.prod(row) ** (1 / len(row)) for row in ratios]
    for name, weights in (("sequence", products), ("geometric", means)):
        expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
        assert found[f"effective_sample_size_{name}"] == pytest.approx(expected, rel=1e-4)
        assert 1 / len(weights) * 0.999 <= found[f"effective_sample_size_{name}"] <= 1 + 1e-9
    sizes = np.sort([abs(math.log(r)) for row in ratios for r in row])
    assert found["mismatch_p99"] == pytest.approx(np.quantile(sizes, 0.99), rel=1e-4, abs=1e-6)


def test_branches_of_a_completion_have_one_weight():
    segments, logprobs = completions(0, [9, 5, 7], 0.2)
    whole = metrics(segments, logprobs)
    one, ours = segments[0], logprobs[0]
    cut = [Segment(*(part[at] for part in (one.tokens, one.weights, one.advantages, one.generator_logprobs)))
           for at in (slice(0, 6), slice(6, None))]  # fmt: skip
    origins = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)]
    found = off_policy_metrics(
        [cut[0], *segments[1:], cut[1]], [ours[:6], *logprobs[1:], ours[6:]], origins
    )  # fmt: skip
    assert found == pytest.approx(whole, rel=1e-6)


def test_by_hand():
    """Ratios 1 and 3 of one token, 1/2 and 2 of another completion: weights 3 and 1, geometric means sqrt 3 and 1."""
    logs = [[0.0, math.log(3)], [-math.log(2), math.log(2)]]
    segments = [
        Segment(np.zeros(3, np.int32), np.array([0, 1, 1], np.float32), np.zeros(3), np.zeros(3, np.float32))
        for _ in logs
    ]
    found = metrics(segments, [np.array([0.0, *row], np.float32) for row in logs])
    assert found["effective_sample_size_sequence"] == pytest.approx((3 + 1) ** 2 / (2 * (9 + 1)))
    assert found["effective_sample_size_geometric"] == pytest.approx((3**0.5 + 1) ** 2 / (2 * (3 + 1)))


@given(st.lists(st.integers(-12, 12), min_size=1, max_size=9), st.integers(-(10**6), 10**6))
def test_a_common_factor_of_the_weights_changes_nothing(powers, shift):
    """Products of ten thousand ratios are far outside of every float; exact fractions know what is right."""
    weights = [Fraction(2) ** power for power in powers]
    expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    logs = (np.array(powers, np.float64) + shift) * math.log(2)
    assert effective_share(logs) == pytest.approx(float(expected), rel=1e-6)


def test_what_is_far_apart_and_what_is_alone():
    assert effective_share(np.array([0.0, 1e5, -1e5, 3.0])) == pytest.approx(1 / 4)
    assert effective_share(np.array([-7e4])) == effective_share(np.full(768, 123.0)) == pytest.approx(1)
    # One token that a side finds impossible is one bad token.
    segments, logprobs = completions(0, [50] * 4, 0.0)
    logprobs[2][3] = -1e30
    found = metrics(segments, logprobs)
    assert found["effective_sample_size_sequence"] == pytest.approx(3 / 4) and all(map(math.isfinite, found.values()))
    assert found["mismatch_p99"] == 0.0
    assert off_policy_metrics([], [], []) == {}


def test_long_completions_need_the_second_one():
    """Ratios of one spread: the product's share is exp(-length s^2), the other is 1 however long they are."""
    for length in (10, 1000):
        segments, logprobs = completions(1, [length] * 400, 0.05)
        tokens = np.mean([np.count_nonzero(s.weights) for s in segments])
        found = metrics(segments, logprobs)
        assert found["effective_sample_size_sequence"] == pytest.approx(math.exp(-tokens * 0.05**2), abs=0.15)
        assert found["effective_sample_size_geometric"] > 0.997


def test_of_a_real_update_they_agree_with_its_sums_however_it_is_packed():
    """The same in one micro-batch and in many, beside what is only scored; the mean of |d| is the device's."""
    decoder, found = toy_decoder(), []
    segments = make_segments([9, 30, 17, 40, 5, 22], vocabulary=decoder.vocab_size)
    for seq_len, rows, beside in ((64, 3, []), (64, 1, [plain(segments[1].tokens)]), (40, 2, [])):
        layout = Layout(seq_len=seq_len, rows=rows, logprob_chunk=8)
        trainer = trainer_of(decoder, layout, precision=Precision("float32", "float32", "default"))
        trainer.start(init_params(decoder, jax.random.key(0), trainer.mesh))
        pending = trainer.forward_backward(segments, beside=beside)
        logprobs = pending.logprobs()
        found.append(metrics(segments, logprobs))
        parts = [np.abs(ours - s.generator_logprobs)[s.weights > 0] for s, ours in zip(segments, logprobs)]
        sums = jax.device_get(pending.sums)
        assert float(sums["mismatch"] / sums["tokens"]) == pytest.approx(np.concatenate(parts).mean(), rel=1e-5)
        assert sums["tokens"] == sum(map(len, parts))
    assert all(other == pytest.approx(found[0], rel=1e-4) for other in found[1:])
    assert 1 / 6 < found[0]["effective_sample_size_sequence"] < found[0]["effective_sample_size_geometric"] < 1

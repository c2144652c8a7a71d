"""Lengths of completions: means that are kept, quantiles that are given, and what is none."""

import numpy as np
import pytest

from scalerl_jax.planning.twin.lengths import Quantiles, Sampled, parse_quantiles


def test_what_is_drawn_has_the_mean_and_the_ends_that_were_given():
    random = np.random.default_rng(0)
    quantiles = parse_quantiles("0:100,0.5:200,1:1000")
    drawn = quantiles.draw(random, 50_000)
    assert quantiles.mean == pytest.approx(0.5 * 150 + 0.5 * 600)
    assert drawn.mean() == pytest.approx(quantiles.mean, rel=0.02)
    assert drawn.min() >= 100 and drawn.max() <= 1000
    assert np.quantile(drawn, 0.5) == pytest.approx(200, rel=0.05)


def test_a_fixed_length_is_one_quantile():
    assert set(Quantiles([(1, 64)]).draw(np.random.default_rng(0), 100).tolist()) == {64}


def test_a_sample_is_scaled_to_the_mean_of_all_and_keeps_its_fractions():
    lengths = Sampled([10, 20, 30], mean=33.3)
    assert lengths.mean == pytest.approx(33.3)
    assert lengths.draw(np.random.default_rng(1), 100_000).mean() == pytest.approx(33.3, rel=0.01)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("0.5", "'0.5' is not SHARE:TOKENS"),
        ("0.5:many,1:9", "'0.5:many' is not SHARE:TOKENS"),
        ("0.5:10", "the last must be 1"),
        ("0.5:10,0.4:20,1:30", "shares must rise"),
        ("0.5:10,1:5", "not fall"),
        ("1:0", "1 or more"),
        ("1:nan", "1 or more"),
    ],
)
def test_quantiles_that_are_none_are_named(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        parse_quantiles(text)


def test_a_sample_of_nothing_is_none():
    for tokens in ([], [0.5], [float("inf")]):
        with pytest.raises(ValueError, match="at least"):
            Sampled(tokens)

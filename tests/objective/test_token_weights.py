"""One weight per loss token: the averages of the paper, written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.objective import token_weights

AGGREGATIONS = ["prompt", "sample", "token"]
seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, *, prompts: int = 6, group: int = 4):
    """(loss_tokens, counted [prompts, group], survives [prompts]); every survivor counts at least one completion."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 40, (prompts, group))
    counted = rng.random(tokens.shape) > 0.3
    return tokens, counted, (rng.random(prompts) > 0.4) & counted.any(axis=1)


def loop(tokens, counted, survives, aggregation) -> np.ndarray:
    """Weights from the definition: the share of each average that one token is."""
    out = np.zeros(tokens.shape)
    kept = {p: [i for i in range(tokens.shape[1]) if counted[p, i]] for p in range(len(tokens)) if survives[p]}
    for p, completions in kept.items():
        for i in completions:
            if aggregation == "prompt":  # mean over prompts of the mean over the prompt's tokens
                out[p, i] = 1 / len(kept) / sum(int(tokens[p, j]) for j in completions)
            elif aggregation == "sample":  # mean over prompts of the mean over completions of the mean over tokens
                out[p, i] = 1 / len(kept) / len(completions) / int(tokens[p, i])
            else:  # mean over all tokens
                out[p, i] = 1 / sum(int(tokens[q, j]) for q, js in kept.items() for j in js)
    return out


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=seeds)
def test_equal_the_averages(aggregation, seed):
    drawn = draw(seed)
    got = token_weights(*drawn, aggregation)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, loop(*drawn, aggregation), rtol=1e-14)
    total = (got * drawn[0]).sum()
    assert total == pytest.approx(1 if drawn[2].any() else 0)


@given(seed=seeds)
def test_what_each_average_makes_equal(seed):
    tokens, counted, survives = draw(seed)
    if not survives.any():
        return
    prompt, sample, token = (token_weights(tokens, counted, survives, kind) for kind in AGGREGATIONS)
    kept = counted & survives[:, None]
    np.testing.assert_allclose((prompt * tokens).sum(axis=1), survives / survives.sum())  # each prompt 1 / P
    for p in np.flatnonzero(survives):
        assert len(set(prompt[p, kept[p]])) == 1  # each token of a prompt the same
        np.testing.assert_allclose((sample * tokens)[p, kept[p]], 1 / survives.sum() / kept[p].sum())
    np.testing.assert_allclose(token[kept], 1 / tokens[kept].sum())
    for weights in (prompt, sample, token):
        assert not weights[~kept].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_completion_without_loss_tokens_has_no_mean_and_no_share(aggregation):
    """It is no part of an average over completions either, and a prompt of nothing else is none of P."""
    tokens, counted = np.array([[4, 0, 2], [0, 0, 0]]), np.ones((2, 3), bool)
    got = token_weights(tokens, counted, np.array([True, True]), aggregation)
    expected = {"prompt": [1 / 6, 0, 1 / 6], "sample": [1 / 8, 0, 1 / 4], "token": [1 / 6, 0, 1 / 6]}[aggregation]
    np.testing.assert_allclose(got, [expected, [0, 0, 0]])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_survives(aggregation):
    tokens, counted, _ = draw(0)
    got = token_weights(tokens, counted, np.zeros(len(tokens), bool), aggregation)
    np.testing.assert_array_equal(got, np.zeros(tokens.shape))


def test_an_unknown_aggregation_is_named():
    with pytest.raises(ValueError, match="'mean' is not prompt, sample or token"):
        token_weights(*draw(0), "mean")

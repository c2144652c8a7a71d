"""Packing, remat and bounds change nothing of what the decoder computes."""

import jax
import numpy as np
import pytest

from scalerl_jax.model import forward
from tests.support.models import toy_decoder
from tests.support.params import DECODER, packed, params_of, relative

run = jax.jit(forward, static_argnames=("config", "max_segment", "remat"))


def test_packed_rows_equal_separate_rows():
    params = params_of()
    lengths = [[9, 17, 4], [1, 22]]
    tokens, positions, segment_ids = packed(lengths, 33)
    hidden = np.asarray(run(params, DECODER, tokens, positions, segment_ids))
    single = np.zeros((5, 22), np.int32)
    places = [(r, sum(row[:i]), n) for r, row in enumerate(lengths) for i, n in enumerate(row)]
    for i, (row, start, length) in enumerate(places):
        single[i, :length] = tokens[row, start : start + length]
    ones = np.ones_like(single)
    alone = np.asarray(run(params, DECODER, single, np.arange(22, dtype=np.int32)[None].repeat(5, 0), ones))
    for i, (row, start, length) in enumerate(places):
        np.testing.assert_allclose(hidden[row, start : start + length], alone[i, :length], atol=4e-6)


def test_no_token_sees_a_later_one():
    params = params_of()
    tokens, positions, segment_ids = packed([[30]], 30)
    changed = tokens.copy()
    changed[0, 20:] = (changed[0, 20:] + 1) % DECODER.vocab_size
    first, second = (np.asarray(run(params, DECODER, t, positions, segment_ids)) for t in (tokens, changed))
    np.testing.assert_array_equal(first[0, :20], second[0, :20])
    assert (first[0, 20:] != second[0, 20:]).any(axis=-1).all()


def test_remat_and_max_segment_change_nothing():
    params = params_of()
    inputs = packed([[20, 31, 11], [31, 31]], 64)
    at = np.random.default_rng(0).normal(size=(2, 64, DECODER.hidden_size)).astype(np.float32)

    def gradient(**options):
        def loss(params):
            return (forward(params, DECODER, *inputs, **options) * at).sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    wanted = gradient(remat="none")
    for options in ({"remat": "block"}, {"remat": "none", "max_segment": 31}):
        value, got = gradient(**options)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
        assert relative(got, wanted[1]) < 2e-6, options


@pytest.mark.parametrize(("change", "words"), [({"heads": 3}, "3 query heads"), ({"head_dim": 7}, "head size 7")])
def test_a_config_says_what_it_cannot_be(change, words):
    with pytest.raises(ValueError, match=words):
        toy_decoder(**change)

"""Sampling on its own, against float64 numpy."""

import functools

import jax
import numpy as np
import pytest

from rollout_server.engines.jax.sampling import keep_likely, sample, uniforms

ROWS = 20_000


def kept(logits, temperature, top_k, top_p):
    """p [V] float64 by sorting: temperature, then the top_k largest, then the smallest set of mass top_p."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
    return p / p.sum()


# Computing takes longer here than compiling, so this is optimized, as no other test's program is.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


@functools.partial(jax.jit, static_argnames="filtered", compiler_options=OPTIMIZED)
def draw(logits, seeds, temperature, top_k, top_p, filtered):
    """One token per seed, all from the same logits [V]."""

    def full(x, dtype):
        return jax.numpy.full(ROWS, x, dtype)

    rows = jax.numpy.broadcast_to(logits, (ROWS, logits.shape[0]))
    u = uniforms(seeds, full(3, "int32")[None])[0]
    asked = full(temperature, "float32"), full(top_k, "int32"), full(top_p, "float32")
    return sample(rows, *asked, u, filtered=filtered)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "filtered"),
    [
        (1, 0, 1, False), (1, 0, 1, True), (0.6, 0, 1, False), (1.7, 5, 1, True), (1, 0, 0.8, True),
        (0.8, 20, 0.9, True), (1, 1, 1, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("vocabulary", [37, 320])
def test_frequencies_and_logprobs(vocabulary, temperature, top_k, top_p, filtered):
    logits = (2 * np.random.default_rng(vocabulary).normal(size=vocabulary)).astype(np.float32)
    seeds = np.stack([np.arange(ROWS), np.full(ROWS, 7)], axis=1).astype(np.uint32)

    tokens, logprobs = draw(logits, seeds, temperature, top_k, top_p, filtered)
    p = kept(logits, temperature, top_k, top_p)
    counts = np.bincount(tokens, minlength=vocabulary)
    assert (counts[p == 0] == 0).all()
    np.testing.assert_allclose(logprobs, np.log(p[tokens]), atol=1e-5)
    # Rare tokens are counted together, as chi-square wants at least a few of each.
    rare = p * ROWS < 10
    expected = np.append(p[~rare], p[rare].sum()) * ROWS
    observed = np.append(counts[~rare], counts[rare].sum())[expected > 0]
    expected = expected[expected > 0]
    freedom = len(expected) - 1
    # Wilson and Hilferty's normal approximation, at one in 10,000.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3 if freedom else 1e-6
    assert ((observed - expected) ** 2 / expected).sum() < limit


def test_rows_are_filtered_each_by_its_own():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 100)).astype(np.float32)
    top_k = rng.integers(0, 101, 40).astype(np.int32)
    top_p = np.where(rng.random(40) < 0.3, 1, rng.uniform(0.05, 1, 40)).astype(np.float32)
    got = np.isfinite(keep_likely(logits, top_k, top_p))
    for row in range(40):
        np.testing.assert_array_equal(got[row], kept(logits[row], 1.0, top_k[row], top_p[row]) > 0)


def test_filter_edges():
    def keeps(logits, top_k=0, top_p=1.0):
        out = keep_likely(
            np.asarray([logits], np.float32), np.asarray([top_k], np.int32), np.asarray([top_p], np.float32)
        )
        return np.isfinite(np.asarray(out))[0].tolist()

    assert keeps([1, 2, 2, 0], top_k=1) == [False, True, True, False]  # a tie with the last one kept
    assert keeps([0, 0, 0, 0], top_p=0.01) == [True] * 4
    assert keeps([0, -200, -1000, -3e38], top_p=1.0) == [True] * 4  # off is off, also in the far tail
    assert keeps([3, 2, 1], top_k=1000) == [True] * 3
    assert keeps([-5, -7, 5], top_k=2, top_p=0.999) == [False, False, True]
    assert keeps([-0.0, 0.0, -1.0], top_k=2) == [True, True, False]


def test_extreme_temperatures_and_logits_stay_finite():
    logits = np.array([[3e38, -3e38, 0, 1e38], [80, 79, -90, 5], [0, 0, 0, 0]], np.float32)
    for temperature in (1e-30, 1e30):
        rows = np.full(3, temperature, np.float32)
        u = np.full((3, 2), 1 - 2.0**-24, np.float32)
        tokens, logprobs = sample(logits, rows, np.zeros(3, np.int32), np.ones(3, np.float32), u, filtered=True)
        assert np.isfinite(logprobs).all() and (np.asarray(logprobs) <= 1e-6).all()
        if temperature < 1:
            assert np.asarray(tokens).tolist() == [0, 0, 3]


def test_uniforms_are_a_function_of_seed_and_position():
    seeds = np.array([[1, 2], [3, 4], [1, 2], [2, 1]], np.uint32)
    positions = np.array([[5, 5, 6, 5], [6, 6, 5, 6]], np.int32)
    u = np.asarray(uniforms(seeds, positions))
    assert u.shape == (2, 4, 2) and (u >= 0).all() and (u < 1).all()
    np.testing.assert_array_equal(u[0, 0], u[1, 2])
    np.testing.assert_array_equal(u[1, 0], u[0, 2])
    assert len({tuple(x) for x in u.reshape(-1, 2)}) == 6

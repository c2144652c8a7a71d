"""The divergences of distillation against those over the whole vocabulary, from the logits, and against enumeration."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.objective.losses import DIVERGENCES, Compared, policy_loss
from tests.objective.batches import NAMES

ROWS, LENGTH, VOCABULARY = 2, 7, 31
SHAPE = (ROWS, LENGTH)
forms = pytest.mark.parametrize("form", DIVERGENCES)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64"""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def both(seed: int = 0, scale: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """The student's logits and the teacher's log-probs: [rows, length, vocabulary] float64."""
    rng = np.random.default_rng(seed)
    student, teacher = scale * rng.normal(size=(2, *SHAPE, VOCABULARY))
    return student, log_softmax(teacher)


def by_formula(form: str, logits: np.ndarray, teacher: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divergence [rows, length] over `ids` and one bucket of all else, and its derivative by the logits; float64."""

    def bucketed(p: np.ndarray) -> np.ndarray:
        named = np.where(ids >= 0, np.take_along_axis(p, np.maximum(ids, 0), axis=-1), 0.0)
        return np.concatenate([named, 1 - named.sum(axis=-1, keepdims=True)], axis=-1)

    def divergence(logits: np.ndarray) -> np.ndarray:
        student, other = bucketed(np.exp(log_softmax(logits))), bucketed(np.exp(teacher))
        p, q = (other, student) if form == "topk_forward" else (student, other)
        there = p > 1e-12
        return np.where(there, p * np.log(np.where(there, p, 1) / np.where(there, q, 1)), 0.0).sum(axis=-1)

    slopes = np.zeros_like(logits)
    for v in range(VOCABULARY):
        step = np.zeros(VOCABULARY)
        step[v] = 1e-5
        slopes[..., v] = (divergence(logits + step) - divergence(logits - step)) / 2e-5
    return divergence(logits), slopes


def ours(form: str, logits: np.ndarray, teacher: np.ndarray, ids: np.ndarray, at: np.ndarray) -> tuple[Any, Any]:
    """The divergence of each token, and the derivative of their sum weighted by `at` by the logits."""
    logprobs = np.where(ids >= 0, np.take_along_axis(teacher, np.maximum(ids, 0), axis=-1), 0.0).astype(np.float32)

    gradient, value = compiled(form)(logits.astype(np.float32), logprobs, ids, at)
    return value, gradient


@functools.cache
def compiled(form: str) -> Any:
    def weighted(logits: jax.Array, teacher: jax.Array, ids: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        student = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(ids, 0), axis=-1)
        value, _ = DIVERGENCES[form](Compared(ids, student, teacher))
        return (value * at).sum(), value

    return jax.jit(jax.grad(weighted, has_aux=True))


@forms
@pytest.mark.parametrize("scale", [0.1, 1.5, 2.5])
def test_over_all_tokens_it_is_the_divergence_over_the_vocabulary(form: str, scale: float) -> None:
    logits, teacher = both(scale=scale)
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(VOCABULARY), (*SHAPE, 1)), axis=-1).astype(np.int32)
    student, other = np.exp(log_softmax(logits)), np.exp(teacher)
    away = log_softmax(logits) - teacher
    if form == "topk_forward":
        wanted, slope = -(other * away).sum(-1), student - other
    else:
        wanted = (student * away).sum(-1)
        slope = student * (away - wanted[..., None])
    value, gradient = ours(form, logits, teacher, ids, np.ones(SHAPE))
    assert wanted.mean() > 0.005
    np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


@forms
@pytest.mark.parametrize("k", [5, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 30))])
def test_the_others_are_one_bucket(form: str, k: int) -> None:
    """Whoever named the ids; and some of them may be none."""
    logits, teacher = both()
    ids = np.argsort(-(teacher if form == "topk_forward" else logits), axis=-1)[..., :k].astype(np.int32)
    ids[np.random.default_rng(2).random(ids.shape) < 0.2] = -1
    at = np.random.default_rng(3).uniform(0.1, 1, SHAPE)
    value, gradient = ours(form, logits, teacher, ids, at)
    wanted, slope = by_formula(form, logits, teacher, ids)
    np.testing.assert_allclose(value, wanted, atol=2e-6)
    np.testing.assert_allclose(gradient, at[..., None] * slope, atol=2e-6)
    full, _ = by_formula(form, logits, teacher, np.broadcast_to(np.arange(VOCABULARY), (*SHAPE, VOCABULARY)))
    assert (wanted <= full + 1e-12).all() and (wanted < full).any()


@forms
def test_a_teacher_that_is_the_student_changes_nothing(form: str) -> None:
    logits, _ = both()
    same = np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))
    for k in (5, VOCABULARY):
        value, gradient = ours(
            form, logits, same, np.argsort(-logits, axis=-1)[..., :k].astype(np.int32), np.ones(SHAPE)
        )
        np.testing.assert_array_equal(value, 0)
        np.testing.assert_allclose(gradient, 0, atol=0 if form == "student_topk" else 2e-7)


@forms
def test_without_ids_there_is_no_divergence(form: str) -> None:
    logits, teacher = both()
    value, gradient = ours(form, logits, teacher, np.full((*SHAPE, 5), -1, np.int32), np.ones(SHAPE))
    np.testing.assert_array_equal(value, 0)
    np.testing.assert_array_equal(gradient, 0)


@forms
def test_what_one_side_finds_impossible_stays_finite(form: str) -> None:
    """A token, or all others."""
    logits = np.zeros((1, 4, 4))
    logits[0, 1] = [60, 0, 0, 0]
    logits[0, 2] = [0, 0, -80, -80]
    teacher = np.array(
        [[-np.inf, 0, -80, -80], [-80, -80, np.log(0.5), np.log(0.5)], *[[np.log(0.5)] * 2 + [-80] * 2] * 2]
    )
    ids = np.broadcast_to(np.array([0, 1], np.int32), (1, 4, 2))
    value, gradient = ours(form, logits, teacher[None], ids, np.ones((1, 4)))
    assert np.isfinite(value).all() and np.isfinite(gradient).all()
    assert (np.asarray(value) > -1e-6).all() and value[0, 0] > 0.1 and abs(value[0, 2]) < 1e-5


def test_it_is_weighed_as_the_loss_and_counted_where_there_are_ids() -> None:
    """Beside the loss's own terms, which stay what they were; a masked token has its divergence all the same."""
    rng = np.random.default_rng(4)
    logits, teacher = both()
    ids = np.argsort(-teacher, axis=-1)[..., :3].astype(np.int32)
    ids[0, 2] = -1
    weights = np.where(rng.random(SHAPE) < 0.7, rng.uniform(0.1, 1, SHAPE), 0).astype(np.float32)
    weights[0, 2] = weights[1, 3] = 0.5
    values = (*rng.uniform(-3, -0.1, (2, *SHAPE)), rng.normal(size=SHAPE), weights)
    arrays: dict[str, Any] = {name: x.astype(np.float32) for name, x in zip(NAMES, values, strict=False)}
    arrays["segment_ids"] = np.ones(SHAPE, np.int32)
    student, other = (
        np.take_along_axis(x, np.maximum(ids, 0), axis=-1).astype(np.float32) for x in (log_softmax(logits), teacher)
    )
    compared = Compared(jnp.asarray(ids), jnp.asarray(student), jnp.asarray(other))
    plain, _ = jax.jit(lambda: policy_loss(**arrays, objective=ObjectiveConfig(icepop_low=0.5, icepop_high=2.0)))()
    objective = ObjectiveConfig(icepop_low=0.5, icepop_high=2.0, distill="topk_forward", distill_weight=0.3)
    loss, sums = jax.jit(lambda: policy_loss(**arrays, objective=objective, compared=compared))()
    wanted, _ = by_formula("topk_forward", logits, teacher, ids)
    assert 0 < sums["masked"] < sums["tokens"]
    np.testing.assert_allclose(float(loss - plain), 0.3 * (weights * wanted).sum(), rtol=1e-5)
    known = (weights > 0) & (ids >= 0).any(-1)
    assert sums["compared"] == known.sum() == sums["tokens"] - 1
    np.testing.assert_allclose(sums["teacher_divergence"], wanted[known].sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["teacher_tail"], (1 - np.exp(other).sum(-1))[known].sum(), rtol=1e-5)


def test_sampled_is_the_policy_gradient_of_the_reverse_kl() -> None:
    """Of all sequences of 2 tokens over 4: the expected gradient is that of each position's KL, over prefixes as they
    are sampled (a token answers for its own divergence alone)."""
    rng = np.random.default_rng(5)
    tables = rng.normal(size=(5, 4)), log_softmax(rng.normal(size=(5, 4)))  # logits after nothing, and after each token
    pairs = np.array(list(itertools.product(range(4), repeat=2)), np.int32)
    places = np.stack([np.zeros(16, np.int32), 1 + pairs[:, 0]], axis=1)
    student = log_softmax(tables[0])
    gen = student[places, pairs]
    chance = np.exp(gen.sum(axis=1, keepdims=True))  # of each sequence
    weight = 0.7
    arrays: dict[str, Any] = {
        "logp_gen": gen.astype(np.float32),
        "advantages": (-weight * (gen - tables[1][places, pairs])).astype(np.float32),
        "weights": np.broadcast_to(chance, (16, 2)).astype(np.float32),
        "segment_ids": np.ones((16, 2), np.int32),
    }

    def sampled(logits: jax.Array) -> jax.Array:
        return policy_loss(jax.nn.log_softmax(logits)[places, pairs], **arrays, objective=ObjectiveConfig())[0]

    away = student - tables[1]
    kl = (np.exp(student) * away).sum(axis=1, keepdims=True)
    reached = np.concatenate([[1.0], np.exp(student[0])])[:, None]
    wanted = weight * reached * np.exp(student) * (away - kl)
    np.testing.assert_allclose(jax.jit(jax.grad(sampled))(tables[0].astype(np.float32)), wanted, atol=1e-6)

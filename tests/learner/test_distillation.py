"""Distillation through a whole gradient: the divergence over the vocabulary, whatever is packed beside."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.contract.codec import TeacherScores
from scalerl_jax.learner.packing import Segment
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import forward, logits
from scalerl_jax.objective.losses import DIVERGENCES
from tests.learner.segments import make_segments, with_teacher
from tests.support.models import toy_decoder
from tests.support.params import flat, params_of, relative
from tests.support.trainers import trainer_of

DECODER = toy_decoder()
LENGTH, WEIGHT, VOCABULARY = 48, 0.7, toy_decoder().vocab_size

pytestmark = pytest.mark.slow
FORMS = [pytest.param(form, marks=[pytest.mark.long] * (form != "student_topk")) for form in DIVERGENCES]


@functools.cache
def started(k: int, *, rows: int = 2, **objective: Any) -> Trainer:
    trainer = trainer_of(DECODER, Layout(seq_len=LENGTH, rows=rows, logprob_chunk=16, teacher_k=k), **objective)
    trainer.start(params_of(DECODER))
    return trainer


def taught(k: int, *, advantages: float = 1.0) -> list[Segment]:
    given = make_segments((30, 17, 9, 9, 21), vocabulary=VOCABULARY)
    made = [with_teacher(one, vocabulary=VOCABULARY, k=k, seed=i) for i, one in enumerate(given)]
    return [Segment(**{**vars(one), "advantages": advantages * one.advantages}) for one in made]


def over_the_vocabulary(form: str, given: list[Segment]) -> Any:
    """(loss, gradient) of the divergence alone, each segment by itself, from its logits."""

    def loss(params: Any) -> jax.Array:
        total = jnp.zeros(())
        for segment in given:
            teacher = segment.teacher
            assert teacher is not None and teacher.ids is not None and teacher.top_logprobs is not None
            wanted = np.zeros((len(segment.tokens), VOCABULARY), np.float32)
            np.put_along_axis(wanted, teacher.ids, teacher.top_logprobs, axis=-1)
            ids = jnp.ones((1, len(segment.tokens) - 1), jnp.int32)
            hidden = forward(params, DECODER, segment.tokens[None, :-1], jnp.cumsum(ids, axis=1) - 1, ids)
            policy, other = jax.nn.log_softmax(logits(params, DECODER, hidden)[0]), wanted[1:]
            p, q = (other, policy) if form == "topk_forward" else (policy, other)
            total += WEIGHT * jnp.sum(segment.weights[1:, None] * jnp.exp(p) * (p - q))
        return total

    return jax.jit(jax.value_and_grad(loss))(params_of(DECODER))


@pytest.mark.parametrize("form", FORMS)
def test_with_all_ids_it_is_the_divergence_over_the_vocabulary(form: str) -> None:
    given = taught(VOCABULARY, advantages=0.0)
    pending = started(VOCABULARY, distill=form, distill_weight=WEIGHT).forward_backward(given)
    loss, gradient = over_the_vocabulary(form, given)
    assert float(loss) > 0.1
    assert float(pending.sums["loss"]) == pytest.approx(float(loss), rel=2e-6)
    assert relative(pending.grads, gradient) < 2e-6
    assert pending.sums["teacher_tail"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_packing_and_micro_batches_have_no_part(form: str) -> None:
    """Nor has a segment without a teacher, beside what it is without the others'."""
    given = taught(5)
    given[1] = Segment(**{**vars(given[1]), "teacher": None})
    objective = {"distill": form, "distill_weight": WEIGHT}
    wanted = started(5, **objective).forward_backward(given)
    assert 0 < wanted.sums["compared"] < wanted.sums["tokens"]
    for order in (1, -1):
        got = started(5, rows=1, **objective).forward_backward(given[::order])
        assert relative(got.grads, wanted.grads) < 1e-5
        for name in ("compared", "tokens"):
            assert got.sums[name] == wanted.sums[name]
        for name in ("loss", "teacher_divergence", "teacher_tail"):
            assert float(got.sums[name]) == pytest.approx(float(wanted.sums[name]), rel=1e-5)
    alone, without = started(5, **objective).forward_backward(given[1:2]), started(0).forward_backward(given[1:2])
    np.testing.assert_allclose(flat(alone.grads), flat(without.grads), atol=1e-6 * np.abs(flat(without.grads)).max())
    # The gradient is the sum of the two: what the rewards say is not touched.
    added = flat(wanted.grads) - flat(started(5).forward_backward(given).grads)
    by_teacher = started(5, **objective).forward_backward(
        [Segment(**{**vars(s), "advantages": 0 * s.advantages}) for s in given]
    )
    assert np.linalg.norm(added - flat(by_teacher.grads)) < 2e-5 * np.linalg.norm(flat(wanted.grads))


def test_soft_targets_are_a_sum_of_log_probs() -> None:
    """In loss, gradient and what is returned, from the logits; ids may come twice. Without a layout for them."""
    given = [
        Segment(**{**vars(one), "weights": np.minimum(1, 99 * one.weights), "advantages": 0 * one.advantages})
        for one in taught(3)
    ]
    for one in given:
        assert one.teacher is not None and one.teacher.ids is not None and one.teacher.top_logprobs is not None
        assert np.any(one.teacher.ids < 0)  # which are no target
        one.teacher.ids[:, 2] = one.teacher.ids[:, 0]
        one.teacher.top_logprobs[:] = np.random.default_rng(len(one.tokens)).normal(size=(len(one.tokens), 3))
    soft = ObjectiveConfig(loss="reinforce", distill="soft_targets")  # type: ignore[arg-type]

    def loss(params: Any) -> tuple[jax.Array, list[jax.Array]]:
        total, named = jnp.zeros(()), []
        for one in given:
            assert one.teacher is not None and one.teacher.ids is not None
            ids = jnp.ones((1, len(one.tokens) - 1), jnp.int32)
            hidden = forward(params, DECODER, one.tokens[None, :-1], jnp.cumsum(ids, axis=1) - 1, ids)
            policy = jax.nn.log_softmax(logits(params, DECODER, hidden)[0])
            named.append(jnp.take_along_axis(policy, one.teacher.ids[1:], axis=-1))
            weights = one.weights[1:, None] * np.where(one.teacher.ids[1:] >= 0, one.teacher.top_logprobs[1:], 0)
            total -= jnp.sum(weights * named[-1])
        return total, named

    (wanted, named), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params_of(DECODER))
    trainer = started(0)
    pending = trainer.forward_backward(given, objective=soft)
    assert float(pending.sums["loss"]) == pytest.approx(float(wanted), rel=2e-6)
    assert relative(pending.grads, gradient) < 2e-6
    for one, found, policy, own in zip(given, pending.logprobs(), named, trainer.score(given), strict=True):
        assert one.teacher is not None and one.teacher.ids is not None
        there = one.teacher.ids[1:] >= 0
        np.testing.assert_allclose(found[1:, 1:4][there], policy[there], atol=2e-6)
        np.testing.assert_allclose(found[:, 0], own, atol=2e-6)


def test_a_teacher_that_is_the_policy_changes_nothing() -> None:
    """By its reverse divergence: scored by the same trainer, over the policy's own top tokens."""
    given = taught(4, advantages=0.0)
    trainer = started(4, distill="student_topk")
    scored: list[Segment] = []
    for segment in given:
        tokens = len(segment.tokens)
        ids = jnp.ones((1, tokens - 1), jnp.int32)
        hidden = forward(trainer.state["params"], DECODER, segment.tokens[None, :-1], jnp.cumsum(ids, axis=1) - 1, ids)
        policy = np.asarray(jax.nn.log_softmax(logits(trainer.state["params"], DECODER, hidden)[0]))
        policy = np.concatenate([np.zeros((1, VOCABULARY), np.float32), policy])
        top = np.argsort(-policy, axis=-1)[:, :4].astype(np.int32)
        teacher = TeacherScores(segment.generator_logprobs, top, np.take_along_axis(policy, top, axis=-1))
        scored.append(Segment(**{**vars(segment), "teacher": teacher}))
    pending, other = trainer.forward_backward(scored), trainer.forward_backward(given)
    assert np.abs(flat(pending.grads)).max() < 1e-5 * np.abs(flat(other.grads)).max()
    assert abs(float(pending.sums["teacher_divergence"])) < 1e-6 * float(other.sums["teacher_divergence"])

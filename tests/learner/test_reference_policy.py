"""A KL to the policy that the run began with, and an entropy bonus, through a whole gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.learner import memory_estimate
from scalerl_jax.learner.packing import Segment, plain
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import Precision, forward, token_logprobs
from tests.learner.segments import make_segments
from tests.support.models import toy_decoder
from tests.support.params import flat, params_of, relative
from tests.support.trainers import trainer_of, update

DECODER = toy_decoder()
LENGTH, KL, BONUS = 48, 0.3, 0.2


def started(params: Any, *, reference: Any = None, rows: int = 2, sync: str = "float32", **objective: Any) -> Trainer:
    layout = Layout(seq_len=LENGTH, rows=rows, logprob_chunk=16)
    trainer = trainer_of(DECODER, layout, precision=Precision(sync=sync), **objective)
    trainer.start(params)
    if reference is not None:
        trainer.keep_reference(jax.tree.map(lambda p: jnp.asarray(p, sync), reference))
    return trainer


def moved(params: Any) -> Any:
    """Another policy."""
    return jax.tree.map(lambda p: p + 0.05 * jnp.std(p) * jnp.sin(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape),
                        params)  # fmt: skip


def segments() -> list[Segment]:
    return make_segments((30, 17, 9, 9, 21), vocabulary=DECODER.vocab_size)


def by_formula(params: Any, reference: Any, given: list[Segment]) -> Any:
    """The gradient of KL and bonus alone, each segment by itself."""

    def loss(params: Any) -> jax.Array:
        total = jnp.zeros(())
        for segment in given:
            tokens = segment.tokens[None]
            ids = jnp.ones((1, len(segment.tokens) - 1), jnp.int32)

            def scored(p: Any, tokens: np.ndarray = tokens, ids: jax.Array = ids) -> Any:
                hidden = forward(p, DECODER, tokens[:, :-1], jnp.cumsum(ids, axis=1) - 1, ids)
                return token_logprobs(p, DECODER, hidden, tokens[:, 1:], entropy=True, entropy_gradient=True)

            (logp, entropy), (wanted, _) = scored(params), scored(reference)
            away = jax.lax.stop_gradient(wanted) - logp
            total += jnp.sum(segment.weights[1:] * (KL * (jnp.exp(away) - 1 - away) - BONUS * entropy)[0])
        return total

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_formulas() -> None:
    policy, reference, given = params_of(DECODER), moved(params_of(DECODER)), segments()[:2]
    plain_one = started(policy).forward_backward(given)
    trainer = started(policy, reference=reference, reference_kl=KL, entropy_bonus=BONUS)
    pending = trainer.forward_backward(given)
    added = flat(pending.grads) - flat(plain_one.grads)
    wanted = flat(by_formula(policy, reference, given))
    assert np.linalg.norm(wanted) > 1e-3
    assert np.linalg.norm(added - wanted) < 2e-5 * np.linalg.norm(flat(pending.grads))
    # What is scored on the way is the policy's own, and the metric is of all loss tokens.
    for one, other in zip(pending.logprobs(), plain_one.logprobs(), strict=True):
        np.testing.assert_array_equal(one, other)
    scored = started(reference).score([plain(segment.tokens) for segment in given])
    away = np.concatenate(
        [(theirs - ours)[s.weights > 0] for theirs, ours, s in zip(scored, pending.logprobs(), given, strict=True)]
    )
    assert float(pending.sums["reference_kl"]) == pytest.approx((np.expm1(away) - away).sum(), rel=1e-4)


def test_packing_and_micro_batches_have_no_part() -> None:
    policy, reference, given = params_of(DECODER), moved(params_of(DECODER)), segments()
    objective: dict[str, Any] = {
        "reference_kl": KL,
        "entropy_bonus": BONUS,
        "cppo_threshold": 0.002,
        "cppo_budget": 0.0005,
    }
    wanted = started(policy, reference=reference, **objective).forward_backward(given)
    assert wanted.sums["masked"] > 3
    for order in (1, -1):
        got = started(policy, reference=reference, rows=1, **objective).forward_backward(given[::order])
        assert relative(got.grads, wanted.grads) < 1e-5
        for name in ("masked", "clipped", "tokens"):
            assert got.sums[name] == wanted.sums[name]


def test_the_policy_that_it_began_with_has_no_kl_to_itself() -> None:
    """Also where weights are sent rounded: the reference is kept as the forward pass rounds it."""
    policy, given = params_of(DECODER), segments()
    trainer = started(policy, reference=policy, sync="bfloat16", reference_kl=KL)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(trainer._reference))
    sums = update(trainer, given)
    assert sums["reference_kl"] == 0
    assert update(trainer, given)["reference_kl"] > 0  # it is the policy that has moved, and not the reference


def test_it_is_booked_and_nothing_is_compiled_later() -> None:
    policy, given = params_of(DECODER), segments()
    with_one = started(policy, reference=policy, reference_kl=KL)
    memory_estimate.check_memory(with_one, longest=LENGTH)
    without = started(policy)
    without.compile()
    more = memory_estimate.needs_of(with_one).device - memory_estimate.needs_of(without).device
    assert more >= sum(leaf.nbytes for leaf in jax.tree.leaves(policy))
    compiled = with_one._score_reference
    update(with_one, given)
    assert with_one._score_reference is compiled


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_step_is_at_the_learning_rate_that_it_is_given(scale: float) -> None:
    """Weight decay included; the moments are those of the gradient."""
    policy, given = params_of(DECODER), segments()
    ends = []
    for rate, given_rate in ((1e-2, 1e-2 * scale), (1e-2 * scale, None)):
        trainer = trainer_of(DECODER, Layout(seq_len=LENGTH, rows=2, logprob_chunk=16), learning_rate=rate)
        trainer.start(jax.tree.map(jnp.array, policy))
        trainer.optim_step(trainer.forward_backward(given), learning_rate=given_rate)
        ends.append(trainer.state)
    one, other = (flat(end["params"]) for end in ends)
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)
    assert np.abs(one - flat(policy)).max() > 1e-4
    moments = [flat(end["opt_state"]) for end in ends]
    np.testing.assert_array_equal(*moments)

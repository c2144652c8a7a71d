"""A batch that is broken off between two micro-batches leaves the policy as it is."""

import jax
import numpy as np
import pytest

from scalerl_jax.learner.step import IN_FLIGHT, Layout, Learner
from scalerl_jax.model import init_params
from tests.learner.segments import make_segments
from tests.support.learners import learner_of
from tests.support.params import DECODER

LENGTHS = (20, 31, 17, 29, 30, 8, 25, 32, 12, 28)


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def learner() -> Learner:
    made = learner_of(DECODER, Layout(seq_len=32, rows=1))
    made.start(init_params(DECODER, jax.random.key(0), made.mesh))
    made.compile()
    return made


def stopping_after(micro_batches: int, calls: list[int]):
    def look() -> None:
        calls.append(1)
        if len(calls) > micro_batches:
            raise Stop

    return look


@pytest.mark.parametrize("micro_batches", [0, 1, 3])
def test_the_next_gradient_is_that_of_a_learner_that_was_never_stopped(learner: Learner, micro_batches: int) -> None:
    segments = make_segments(LENGTHS, vocabulary=DECODER.vocab_size)
    calls: list[int] = []
    learner.before_micro_batch = stopping_after(100, calls)
    whole = learner.differentiate(segments)
    assert len(calls) == whole.batches > micro_batches + IN_FLIGHT
    before = jax.tree.map(np.asarray, learner.state)

    calls.clear()
    learner.before_micro_batch = stopping_after(micro_batches, calls)
    with pytest.raises(Stop):
        learner.differentiate(segments)
    assert len(calls) == micro_batches + 1

    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, learner.state), before)
    learner.before_micro_batch = lambda: None
    again = learner.differentiate(segments)
    jax.tree.map(np.testing.assert_array_equal, again.grads, whole.grads)
    assert [float(again.sums["loss"]), again.batches] == [float(whole.sums["loss"]), whole.batches]

"""A batch that is broken off between two micro-batches leaves the policy as it is."""

import jax
import numpy as np
import pytest

from scalerl_jax.learner.trainer import IN_FLIGHT, Layout, Trainer
from scalerl_jax.model import init_params
from tests.learner.segments import make_segments
from tests.support.params import DECODER
from tests.support.trainers import trainer_of

LENGTHS = (20, 31, 17, 29, 30, 8, 25, 32, 12, 28)


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    made = trainer_of(DECODER, Layout(seq_len=32, rows=1))
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
def test_the_next_gradient_is_that_of_a_trainer_that_was_never_stopped(trainer: Trainer, micro_batches: int) -> None:
    segments = make_segments(LENGTHS, vocabulary=DECODER.vocab_size)
    calls: list[int] = []
    whole = trainer.forward_backward(segments, before_micro_batch=stopping_after(100, calls))
    assert len(calls) == whole.batches > micro_batches + IN_FLIGHT
    before = jax.tree.map(np.asarray, trainer.state)

    calls.clear()
    with pytest.raises(Stop):
        trainer.forward_backward(segments, before_micro_batch=stopping_after(micro_batches, calls))
    assert len(calls) == micro_batches + 1

    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, trainer.state), before)
    again = trainer.forward_backward(segments)
    jax.tree.map(np.testing.assert_array_equal, again.grads, whole.grads)
    assert [float(again.sums["loss"]), again.batches] == [float(whole.sums["loss"]), whole.batches]

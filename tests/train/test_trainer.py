"""What the trainer writes down for people to read: whom it waited for, how each part of a mixture is doing."""

import contextlib
import types
import weakref

import numpy as np
import pytest

from scalerl_jax import trainer as trainer_lib
from scalerl_jax.config import Config
from scalerl_jax.environments import Row
from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.trainer import Waits, by_task


def test_a_wait_is_theirs_who_were_seen_to_hold_it_up():
    now = 100.0
    waits = Waits(clock=lambda: now)
    for seconds, held_by in ((5.0, ["a:1"]), (1.0, ["a:1", "b:2"]), (2.0, ["verifier"]), (0.5, []), (9.0, ["b:2"])):
        waits.look(held_by)
        now += seconds
    assert waits.take() == [("b:2", 9.5), ("a:1", 5.5), ("verifier", 2.0)]
    now += 7
    assert waits.take() == []  # nobody was waited for since


def group(task: str, *correct: bool) -> FinishedGroup:
    row = Row("1+1=", "2", task=task, index=0, token_ids=np.zeros(1, np.int32))
    return FinishedGroup(0, row, (), tuple(RIGHT if one else WRONG for one in correct), 0.0, 0.0)


def test_the_parts_of_a_mixture():
    groups = [group("hard", False, True), group("", True, True), group("hard", False, False)]
    assert by_task(groups) == {
        "hard": {"prompts": 2, "pass_rate": pytest.approx(0.25)},
        "other": {"prompts": 1, "pass_rate": pytest.approx(1.0)},
    }
    assert by_task(groups[::2]) == {}


class Gradient:
    """Stands for one on the device."""


class Done(Exception):
    pass


class Batches:
    """Fleet, scrutiny and learner as `train_on` sees them: the first batch is asked for again, the second counts."""

    def __init__(self):
        self.gradients = []
        self.config = Config()

    def batch(self, number, wait):
        assert all(gradient() is None for gradient in self.gradients)  # before the wait for what is asked for again
        return [group("", True)]

    def look(self, groups, batch):
        assert all(gradient() is None for gradient in self.gradients)
        gradient = Gradient()
        self.gradients.append(weakref.ref(gradient))
        return len(self.gradients) > 1, gradient

    def apply(self, pending):
        raise Done


def test_the_gradient_of_a_batch_that_does_not_count_is_let_go_of(monkeypatch):
    """Before the batch is waited for again: the device may not have room for two."""
    monkeypatch.setattr(trainer_lib, "build", lambda groups, *args, **kwargs: None)
    parts = Batches()
    trainer = object.__new__(trainer_lib.Trainer)
    trainer.fleet = trainer.scrutiny = trainer.learner = parts
    trainer.config, trainer._waits, trainer._end_of_thinking = parts.config, Waits(), []
    trainer.ledger = types.SimpleNamespace(trainer=lambda what: contextlib.nullcontext())
    with pytest.raises(Done):
        trainer.train_on(0)
    assert len(parts.gradients) == 2

"""What the trainer writes down for people to read: whom it waited for, how each part of a mixture is doing."""

import numpy as np
import pytest

from scalerl_jax.rollouts.book import FinishedGroup
from scalerl_jax.tasks.prompts import Prompt
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


def group(task: str, *verdicts: bool) -> FinishedGroup:
    prompt = Prompt(0, "1+1=", np.zeros(1, np.int32), "2", task)
    return FinishedGroup(0, prompt, (), verdicts, 0.0, 0.0)


def test_the_parts_of_a_mixture():
    groups = [group("hard", False, True), group("", True, True), group("hard", False, False)]
    assert by_task(groups) == {
        "hard": {"prompts": 2, "pass_rate": pytest.approx(0.25)},
        "other": {"prompts": 1, "pass_rate": pytest.approx(1.0)},
    }
    assert by_task(groups[::2]) == {}

"""What the trainer writes down for people to read: whom it waited for, how each part of a mixture is doing."""

import numpy as np
import pytest

from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row
from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.rollouts.status import WaitTimes
from scalerl_jax.run.pass_rates import evaluation_row, of_groups


def test_a_wait_is_theirs_who_were_seen_to_hold_it_up():
    now = 100.0
    waits = WaitTimes(clock=lambda: now)
    for seconds, held_by in ((5.0, ["a:1"]), (1.0, ["a:1", "b:2"]), (2.0, ["verifier"]), (0.5, []), (9.0, ["b:2"])):
        waits.hold(held_by)
        now += seconds
    assert waits.drain()["waited_for"] == [("b:2", 9.5), ("a:1", 5.5), ("verifier", 2.0)]
    now += 7
    assert waits.drain()["waited_for"] == []  # nobody was waited for since


def test_what_is_waited_and_what_is_computed_add_up_until_they_are_taken():
    now, worked_by_cores = 100.0, 40.0
    waits = WaitTimes(clock=lambda: now, processor=lambda: worked_by_cores)
    for waited, worked in ((3.0, 1.5), (2.0, 0.25)):  # a batch that came once more
        with waits.waiting():
            waits.hold(["a:1"])
            now += waited
        with waits.working():
            now += worked
            worked_by_cores += 2 * worked
    now += 10  # neither
    worked_by_cores += 0.5
    taken = waits.drain()
    assert taken == {
        "waited_seconds": 5.0, "waited_for": [("a:1", 5.0)], "update_seconds": 1.75, "cpu_seconds": 4.0
    }  # fmt: skip
    assert waits.drain() == {"waited_seconds": 0.0, "waited_for": [], "update_seconds": 0.0, "cpu_seconds": 0.0}


def group(part: str, *correct: bool) -> FinishedGroup:
    row = Row("1+1=", "2", task=part, environment=part and f"of {part}", index=0, token_ids=np.zeros(1, np.int32))
    completions = [
        Completion(1, "eval/0/0", i, np.ones(2, np.int32), np.zeros(2, np.float32), ((0, 0, 2),), (), "stop")
        for i in range(len(correct))
    ]
    return FinishedGroup(0, row, tuple(completions), tuple(RIGHT if one else WRONG for one in correct), 0.0, 0.0)


def test_the_parts_of_a_mixture():
    groups = [group("hard", False, True), group("", True, True), group("hard", False, False)]
    row = evaluation_row(of_groups(groups))
    assert row["tasks"] == {
        "hard": {"prompts": 2, "pass_rate": pytest.approx(0.25)},
        "(none)": {"prompts": 1, "pass_rate": pytest.approx(1.0)},
    }
    assert row["passes"] == [1, 2, 0] and row["pass_rate"] == pytest.approx(0.5)
    assert {name: part["passes"] for name, part in row["environments"].items()} == {"of hard": [1, 0], "(none)": [2]}
    assert (
        evaluation_row(of_groups(groups[::2]))["tasks"] == evaluation_row(of_groups(groups[::2]))["environments"] == {}
    )

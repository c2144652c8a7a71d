"""Whom the trainer waits for: the one that has the oldest missing group, whatever holds it up there."""

from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.rollouts.status import BatchWait, waits_for
from tests.rollouts.test_group_buffer import ask, deliver, make

WAITS = BatchWait(batch=0, since=0.0)


def test_who_has_the_oldest_missing_group():
    groups = make()
    assert waits_for(None, groups) == []
    assert waits_for(WAITS, groups) == ["new weights"]  # nothing may be opened yet
    first, second = ask(groups, "b:2", room=1), ask(groups, "a:1", room=1)
    later = ask(groups, "c:3")
    assert [one.group.number for one in (first, second, later)] == [0, 0, 1]
    assert waits_for(WAITS, groups) == ["a:1", "b:2"]

    zero = groups.in_flight[0]
    came = [trajectory for one in (first, second) for trajectory in deliver(groups, one, scored=False)]
    assert waits_for(WAITS, groups) == ["verifier"]
    groups.scored(zero, came[0], RIGHT, now=1.0)
    groups.scored(zero, came[1], WRONG, now=1.0)
    assert waits_for(WAITS, groups) == ["c:3"]
    groups.returned(later)
    assert waits_for(WAITS, groups) == ["a free server"]
    assert waits_for(BatchWait(batch=1, since=0.0), groups) == ["a free server"]

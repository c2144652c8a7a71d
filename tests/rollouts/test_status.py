"""Whom the trainer waits for: the one that has the oldest missing group, whatever holds it up there."""

from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.rollouts.status import BatchWait, WaitTimes, waits_for
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

"""Honest statuses are believed, whatever happens to machines and networks; each lie is found at once."""

import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.rollouts.servers import validate_status
from scalerl_jax.rollouts.servers.validate_status import StatusCheck


def status(**fields) -> pb.StatusReply:
    made = {
        "server_id": "a",
        "devices": 2,
        "slots": 8,
        "queue_capacity": 16,
        "busy_slots": 8,
        "queued": 16,
        "up_seconds": 100.0,
        "busy_seconds": 60.0,
        "pause_seconds": 1.0,
        "versions_applied": 3,
        "sampled_tokens": 50_000,
        "forced_tokens": 100,
        "prefill_tokens": 2000,
        **fields,
    }
    return pb.StatusReply(version=codec.version_to_proto(codec.Version(1, made.pop("step", 7))), **made)


class Machine:
    """An honest server: its clock stands still while it sleeps, its counters grow in steps that end late."""

    def __init__(self, name: str, draw):
        self.name, self.draw = name, draw
        self.up = self.busy = self.unbooked = 0.0
        self.tokens = self.step = 0

    def goes_on(self, seconds: float, *, asleep: bool) -> None:
        if asleep:
            return
        drift = self.draw(st.floats(-0.004, 0.004))
        self.up += seconds * (1 + drift)
        self.unbooked += seconds * (1 + drift) * self.draw(st.sampled_from([0.0, 0.5, 1.0]))
        if self.unbooked < 60 and self.draw(st.booleans()):  # a step goes on
            return
        self.busy += self.unbooked
        self.tokens += int(self.unbooked * self.draw(st.floats(0, 2e6)))
        self.unbooked = 0.0

    def says(self) -> pb.StatusReply:
        return status(
            server_id=self.name,
            up_seconds=self.up,
            busy_seconds=self.busy,
            pause_seconds=self.busy / 50,
            sampled_tokens=self.tokens,
            forced_tokens=self.tokens // 9,
            prefill_tokens=self.tokens * 3,
            versions_applied=self.step,
            step=self.step,
        )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_an_honest_server_is_always_believed(data):
    draw = data.draw
    now, restarts = 1e5, 0
    check, machine = StatusCheck(), Machine("process 0", draw)
    machine.goes_on(draw(st.floats(0, 1e6)), asleep=False)
    machine.unbooked, machine.busy = 0.0, min(machine.busy, machine.up)
    for _ in range(draw(st.integers(1, 25))):
        happens = draw(st.sampled_from(["waits", "waits", "sleeps", "frozen", "restarts", "newer"]))
        if happens == "restarts":
            restarts += 1
            machine = Machine(f"process {restarts}", draw)
        machine.step += happens == "newer"
        seconds = draw(st.floats(0, 3600 if happens in ("sleeps", "frozen") else 20))
        machine.goes_on(seconds, asleep=happens == "sleeps")
        now += seconds
        # A slow network: the status is of some moment between question and answer.
        before, after = draw(st.floats(0, 5)), draw(st.floats(0, 5))
        asked_at = now
        machine.goes_on(before, asleep=False)
        said = machine.says()
        machine.goes_on(after, asleep=False)
        now += before + after
        found = check.check(said, asked_at=asked_at, heard_at=now, newest=machine.step)
        assert found == validate_status.Found()


def after(seconds: float = 1.0, **lies):
    """What is found of a status that comes `seconds` after an honest one, in all else as honest."""
    check = StatusCheck()
    assert check.check(status(), asked_at=10.0, heard_at=10.1, newest=9) == validate_status.Found()
    now = 10.0 + seconds
    grown = {"up_seconds": 100.0 + seconds, "busy_seconds": 60.0 + seconds, "sampled_tokens": 50_100}
    return check.check(status(**{**grown, **lies}), asked_at=now, heard_at=now + 0.1, newest=9)


def test_what_the_lies_below_are_told_beside_is_believed():
    assert after() == validate_status.Found()


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        ({"busy_seconds": math.nan}, "busy_seconds is nan"),
        ({"up_seconds": math.inf}, "up_seconds is inf"),
        ({"pause_seconds": -1.0}, "pause_seconds is -1"),
        ({"up_seconds": 1e12, "busy_seconds": 1e12}, "up_seconds is 1e\\+12"),
        ({"up_seconds": 400.0}, "up_seconds grew by 300 in 1.1 s"),
        ({"busy_seconds": 1e6}, "busy_seconds is 1e\\+06, and it is up for 101 s"),
        ({"busy_seconds": 210.0}, "busy_seconds grew by 150 in 1.1 s"),
        ({"up_seconds": 90.0}, "up_seconds fell from 100 to 90"),
        ({"busy_seconds": 59.0}, "busy_seconds fell"),
        ({"sampled_tokens": 2**63}, "sampled_tokens is 9223372036854775808 after 101 s on 2 devices"),
        ({"sampled_tokens": 4 * 10**9}, "sampled_tokens grew by 3999950000"),
        ({"sampled_tokens": 49_999}, "sampled_tokens fell"),
        ({"forced_tokens": 2**62}, "forced_tokens is"),
        ({"prefill_tokens": 2**64 - 1}, "prefill_tokens is"),
        ({"versions_applied": 2}, "versions_applied fell"),
        ({"devices": 4}, "devices is 4, it was 2"),
        ({"devices": 10**9}, "devices is 1000000000"),
        ({"devices": 0}, "devices is 0"),
        ({"slots": 0, "queue_capacity": 0}, "slots is 0"),
        ({"slots": 2**31}, "slots is 2147483648"),
        ({"queue_capacity": 2**31}, "queue_capacity 2147483648"),
        ({"busy_slots": 9}, "9 slots are busy"),
        ({"queued": 17}, "17 completions wait, of 24 places"),
        ({"server_id": ""}, "server_id has 0 characters"),
        ({"server_id": "a" * 10**6}, "server_id has 1000000 characters"),
        ({"step": 10}, "version 10, and the newest there is is 9"),
        ({"step": -1}, "version -1"),
    ],
)
def test_each_lie_is_found(lie, named):
    found = after(**lie)
    assert found.lie and re.search(named, found.lie), found.lie
    assert "\n" not in found.lie and len(found.lie) < 200


def test_what_a_lie_covers_is_not_booked():
    check = StatusCheck()
    times = [{"asked_at": float(n), "heard_at": n + 0.1} for n in range(10, 14)]
    check.check(status(), **times[0])
    assert check.check(status(up_seconds=5000.0), **times[1]).lie
    # It goes on from what it claimed: never again implausible, and never booked.
    assert check.check(status(up_seconds=5001.0), **times[2]) == validate_status.Found(from_here=True)
    assert check.check(status(up_seconds=5002.0), **times[3]) == validate_status.Found()


def test_a_clock_that_is_a_little_too_fast_at_each_look():
    """Three seconds of its own in one of ours, at looks so close together that each of them alone could be slack."""
    check = StatusCheck()
    lies = [
        check.check(status(up_seconds=100 + 0.6 * n), asked_at=0.2 * n, heard_at=0.2 * n + 0.01).lie for n in range(200)
    ]
    found = [n for n, lie in enumerate(lies) if lie]
    assert 4 <= found[0] <= 6 and all("up_seconds grew" in lies[n] for n in found)
    assert len(found) > 30  # it never gains more than the slack


def test_a_new_process_at_each_look_gains_nothing():
    check = StatusCheck()
    check.check(status(), asked_at=10.0, heard_at=10.1)
    claimed = check.check(status(server_id="b"), asked_at=11.0, heard_at=11.1)
    assert claimed == validate_status.Found(from_here=True)  # up for 100 s on an address where "a" was a second ago
    young = status(server_id="c", up_seconds=0.5, busy_seconds=0.2)
    assert check.check(young, asked_at=12.0, heard_at=12.1) == validate_status.Found()


@pytest.mark.parametrize("lie", [{"busy_seconds": math.nan}, {"devices": 0}, {"step": 10}])
def test_what_lies_before_the_status_after_one_that_says_nothing_is_not_booked(lie):
    check = StatusCheck()
    times = [{"asked_at": float(n), "heard_at": n + 0.1, "newest": 9} for n in range(10, 15)]
    check.check(status(), **times[0])
    assert check.check(status(**{"up_seconds": 101.0, **lie}), **times[1]).lie
    assert check.check(status(up_seconds=102.0), **times[2]) == validate_status.Found(from_here=True)
    assert check.check(status(up_seconds=103.0), **times[3]) == validate_status.Found()
    check.check(status(up_seconds=103.5, devices=0), **times[3])
    assert check.check(status(server_id="b", up_seconds=0.5, busy_seconds=0.5), **times[4]).from_here


def test_a_process_that_was_busy_for_longer_than_it_is_up_is_met_anew():
    check = StatusCheck()
    for n in range(10):
        claimed = status(server_id=str(n), up_seconds=0.2, busy_seconds=120.0, sampled_tokens=0)
        found = check.check(claimed, asked_at=10 + n / 4, heard_at=10.1 + n / 4)
        assert found == validate_status.Found(from_here=True)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no such clock here")
def test_the_clock_counts_sleep():
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= validate_status.clock() <= time.clock_gettime(time.CLOCK_BOOTTIME)

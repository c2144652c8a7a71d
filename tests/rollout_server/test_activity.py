"""What a server's log says: who comes and goes, versions, work done; and how little, whatever is sent to it."""

import logging
from collections.abc import Callable

import pytest

from rollout_server import activity as activity_lib
from rollout_server import guard
from rollout_server.activity import Activity
from rollout_server.engines.engine import EngineStatus
from rollout_server.guard import QuietLog
from scalerl_jax.contract.codec import Version
from tests.rollout_server.client import INCARNATION, group, random_weights, serving
from tests.support.replay.engine import ReplayEngine


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def status(tokens: int) -> EngineStatus:
    return EngineStatus(Version(7, 3), 4, 2, tokens, 0, 0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def from_info_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_trainer_comes_and_goes(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    activity = Activity(clock=clock)
    activity.welcome(7, "ipv4:10.0.0.1:4000")
    activity.welcome(7, "ipv4:10.0.0.1:4000")
    activity.completed(7)
    activity.applied(7)
    assert caplog.messages == ["trainer 7 comes: its first call is from ipv4:10.0.0.1:4000"]
    for _ in range(5):  # it only asks for the status: it is there
        clock.now += 0.9 * activity_lib.AWAY_SECONDS
        activity.called("ipv4:10.0.0.1:4000")
        activity.called("ipv4:10.0.0.2:4000")  # who never brought anything
        activity.tick(status(0))
    caplog.clear()
    clock.now += 1.1 * activity_lib.AWAY_SECONDS
    activity.tick(status(0))
    (line,) = [message for message in caplog.messages if "gone" in message]
    assert line.startswith("trainer 7 is gone, no call for 60 s; it had 1 completions, 1 versions")
    activity.called("ipv4:10.0.0.1:4000")
    activity.welcome(7, "ipv4:10.0.0.1:4001")
    assert "trainer 7 comes" in caplog.messages[-1]


def test_the_heartbeat_is_quiet_where_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    activity = Activity(clock=clock)
    for tokens in (0, 0, 600, 600, 600, 1200):
        clock.now += activity_lib.BEAT_SECONDS
        if tokens == 1200:
            activity.completed(7)
        activity.tick(status(tokens))
        activity.tick(status(tokens))
    assert caplog.messages == [
        "in 60 s: 0 completions, 600 tokens (10 a second); now 4 slots busy, 2 queued, step 3",
        "in 60 s: 1 completions, 600 tokens (10 a second); now 4 slots busy, 2 queued, step 3",
    ]


def test_made_up_trainers_cost_little(caplog: pytest.LogCaptureFixture) -> None:
    activity = Activity(clock=Clock())
    for number in range(10_000):
        activity.welcome(number + 1, f"ipv4:10.0.0.1:{number}\nforged: all is well")
    assert len(caplog.messages) <= guard.MOST
    assert all(len(message.splitlines()) == 1 for message in caplog.messages)
    assert len(activity._trainers) == activity_lib.MOST_TRAINERS
    assert len(activity._connections) == activity_lib.MOST_CONNECTIONS


def test_lines_that_were_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    quiet = QuietLog(logging.getLogger("test"), clock=clock)
    for number in range(100):
        quiet.log("a", logging.WARNING, "line %d", number)
    quiet.log("b", logging.WARNING, "another kind")
    assert len(caplog.messages) == guard.MOST + 1
    clock.now += guard.WINDOW_SECONDS
    quiet.log("a", logging.WARNING, "later")
    assert caplog.messages[-2:] == [f"{100 - guard.MOST} lines like the next one were left out", "later"]


async def test_the_lines_of_a_short_run(
    make_replay: Callable[..., ReplayEngine], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(make_replay()) as served:
        for step in range(3):
            await served.push(Version(INCARNATION, step), random_weights(served.engine, step))
        assert len(await served.generate(group())) == 4
        assert (await served.refusal(group(incarnation=3))).name == "FAILED_PRECONDITION"  # a trainer that is not ours
    comes = [message for message in caplog.messages if "comes" in message]
    assert len(comes) == 1 and comes[0].startswith(f"trainer {INCARNATION} comes: its first call is from ")
    applied = [message for message in caplog.messages if "is applied: dense" in message]
    assert [message.split(" of ")[0] for message in applied] == ["step 0", "step 1", "step 2"]

"""A server that comes and goes, over real gRPC beside an honest one: neither fills the log nor stays for ever. And one
whose trainer does, which is no fault of the server's."""

import asyncio
import itertools

import grpc
import pytest

from tests.rollouts.liar import never
from tests.rollouts.small_trainer import Trainer, config
from tests.rollouts.test_fleet import states_seen
from tests.rollouts.test_liars import logged, quick_end
from tests.support.waiting import eventually


def test_words_that_are_others_each_time_are_told_now_and_then(liar, honest, caplog, told_once):
    """Of a server that was never met, and looks like one that does not trust us."""
    numbers = iter(range(10**9))
    liar.status = lambda reply: (grpc.StatusCode.UNAVAILABLE, f"handshake failed OPENSSL_internal:\x1b {next(numbers)}")
    with Trainer(config(), [liar, honest]) as trainer:
        trainer.update_until(lambda: liar.calls["Status"] > 30)
        trainer.update()
        trainer.check()
        assert len(states_seen(trainer, liar)) <= 1 and 1 <= len(logged(caplog, liar)) <= 2
        assert "handshake failed" in trainer.server(liar)["reason"]


def lost_at_every_second_status():
    numbers = iter(range(10**9))
    return lambda reply: (grpc.StatusCode.UNAVAILABLE, "restarting") if next(numbers) % 2 else reply


def superseded_at_every_second_status():
    numbers = iter(range(10**9))

    def status(reply):
        if next(numbers) % 2:
            reply.version.incarnation = 2**64 - 1
        return reply

    return status


def another_at_every_status():
    numbers = iter(range(10**9))

    def status(reply):
        reply.server_id = f"one of two, {next(numbers) % 2}"
        return reply

    return status


LOST, REFUSED = "is lost repeatedly", "weight update failed"


@pytest.mark.parametrize(
    ("made", "kinds"),
    [
        (lost_at_every_second_status, [LOST]),
        (superseded_at_every_second_status, [LOST]),
        # What it says between two statuses is also another process's answer to the weights that were sent to the first.
        (another_at_every_status, [LOST, REFUSED]),
    ],
)
def test_a_server_that_comes_and_goes_is_sent_away(liar, honest, monkeypatch, made, kinds):
    """What it delivers in between would count for it, so it delivers nothing."""

    quick_end(monkeypatch)
    with Trainer(config(), [liar, honest]) as trainer:
        trainer.admit_until(lambda: honest.address in trainer.admitted)
        liar.status, liar.generate = made(), never

        def sent_away() -> bool:
            seen = states_seen(trainer, liar)
            return any(state == "rejected" and any(kind in reason for kind in kinds) for state, reason in seen)

        trainer.update_until(sent_away)
        trainer.update()
        trainer.check()


def test_the_fleet_tells_whether_a_server_is_admitted_and_goes_on_telling_it(liar):
    with Trainer(config(), [liar]) as trainer:
        eventually(lambda: trainer.states()[liar.address] == "candidate")
        trainer.admit_all()
        liar.status = lambda reply: (grpc.StatusCode.UNAVAILABLE, "restarting")
        eventually(lambda: trainer.states()[liar.address] == "connecting")
        told = len(trainer.serving)
        eventually(lambda: len(trainer.serving) > told + 4)  # nothing changes
        liar.status = lambda reply: reply
        trainer.admit_until(lambda: len(trainer.admitted) == 2)
    assert [serving for serving, _ in itertools.groupby(trainer.serving)] == [False, True, False, True]


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "not answered"])
def test_a_trainer_that_was_stopped_holds_it_against_nobody(liar, clock, caplog, answered):
    """Its clock goes on by hours between a question and the answer, while a server samples a group."""
    stopped, go_on = [], asyncio.Event()

    async def later(request, context, honest):
        await go_on.wait()
        await honest(request, context)

    def stop(reply):
        if stopped:
            return reply
        stopped.append(True)
        clock.ahead += 1e4
        return reply if answered else (grpc.StatusCode.DEADLINE_EXCEEDED, "")

    def looks(more: int) -> None:
        seen = liar.calls["Status"]
        eventually(lambda: liar.calls["Status"] >= seen + more)

    liar.generate = later
    with Trainer(config(), [liar]) as trainer:
        trainer.admit_all()
        eventually(lambda: trainer.server(liar)["in_flight"])
        looks(3)
        liar.status = stop
        looks(6)
        assert stopped and trainer.states()[liar.address] == "active" and trainer.server(liar)["in_flight"]
        liar._loop.call_soon_threadsafe(go_on.set)
        trainer.update()
        trainer.check()
    assert not logged(caplog, liar, "asked for")
    assert [state for state, _ in states_seen(trainer, liar)].count("connecting") == 0

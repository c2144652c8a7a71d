"""Servers that appear in a watched file and vanish from it in mid-run; a list that cannot be read; who is asked."""

import os

import numpy as np
import pytest

from scalerl_jax.environments.episode import Reply
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.servers.discovery import Discovery
from scalerl_jax.rollouts.servers.pool import dispatch
from tests.rollouts.small_trainer import Trainer, config
from tests.rollouts.test_fleet import SLOW, assert_holds, states_seen
from tests.rollouts.test_group_buffer import deliver, make
from tests.support.waiting import eventually


def write(path, *servers) -> None:
    path.with_suffix(".new").write_text("".join(f"{server.address}\n" for server in servers))
    os.replace(path.with_suffix(".new"), path)


def watching(path) -> dict:
    listed = Discovery(f"file:{path}")
    return {"addresses": listed.resolve(), "resolve": listed.resolve}


def test_servers_join_and_leave_with_the_file(start, tmp_path, caplog):
    one, two, three = servers = start(SLOW, SLOW, SLOW)
    path = tmp_path / "servers"
    write(path, one)
    made = config(fleet_discovery_seconds=0.1)
    with Trainer(made, servers, **watching(path)) as trainer:
        trainer.update()
        assert list(trainer.states()) == [one.address]

        # 1. Two join: they are brought to the version the run has reached, met, and asked.
        write(path, one, two, three)
        trainer.update_until(lambda: len(trainer.admitted) == 3)
        for server in servers:
            assert_holds(server, trainer.version)

        # 2. One leaves with work in its hands: it is asked for nothing more, and what it has is not lost.
        trainer.update_until(lambda: trainer.server(one)["in_flight"] > 0)
        write(path, two, three)
        trainer.update_until(lambda: one.address not in trainer.states())
        seen = [state for state, _ in states_seen(trainer, one)]
        assert seen[-1] == "leaving" and "connecting" not in seen
        assert f"server {one.address} has left: it is no longer listed" in caplog.messages
        trainer.update()

        # 3. A list that is gone, or empty, or wrong, changes nothing, and is said once.
        for text in (None, "", "nonsense\n"):
            caplog.clear()
            path.unlink() if text is None else path.write_text(text)
            eventually(lambda: any("the servers stay as they are" in r.message for r in caplog.records))
            trainer.update()
            assert sum("the servers stay as they are" in r.message for r in caplog.records) == 1
            assert sorted(trainer.states()) == sorted([two.address, three.address])

        # 4. It returns, and is met as a new one.
        write(path, one, two)
        trainer.update_until(lambda: trainer.admitted.count(one.address) == 2 and three.address not in trainer.states())
        assert_holds(one, trainer.version)
        trainer.check()


def test_the_only_server_is_replaced(start, tmp_path):
    one, two = start(SLOW, SLOW)
    path = tmp_path / "servers"
    write(path, one)
    made = config(fleet_discovery_seconds=0.1)
    with Trainer(made, [], **watching(path)) as trainer:
        trainer.update()
        one.kill()
        write(path, two)
        # Batches that were ready before come first.
        trainer.update_until(lambda: list(trainer.states()) == [two.address] and two.address in trainer.admitted)
        trainer.update()
        trainer.check()
        assert list(trainer.states()) == [two.address]


# ---- A group that a server did not deliver is left to another one that may be asked for it now ----------------------

NOW = 1000.0


class Server:
    """What dispatch sees of a connection. One group at a time, which it never delivers."""

    def __init__(self, address: str, *, step: int = 0, free_at: float = 0.0):
        self.address, self.step, self.free_at = address, step, free_at
        self.process = Process(address, "1")
        self.asked: list[int] = []
        self.requests: list = []

    @property
    def load(self) -> float:
        return float(len(self.requests))

    def capacity(self, *, group_size: int, typical_seconds: float, now: float) -> tuple[int, bool]:
        return (0 if self.requests else group_size), False

    def ask(self, request) -> None:
        self.asked.append(request.group.number)
        self.requests.append(request)

    def fail(self, buffer) -> None:
        buffer.returned(self.requests.pop())


def run(buffer, *servers: Server, now: float = NOW) -> None:
    for server, request in dispatch(servers, lambda server: buffer, typical_seconds=1.0, now=now):
        server.ask(request)


def failed_once(buffer, server: Server) -> int:
    """The group that it was asked for and did not deliver."""
    run(buffer, server)
    server.fail(buffer)
    return server.asked[-1]


@pytest.mark.parametrize(
    "other", [Server("b:2", free_at=NOW + 600), Server("b:2", step=-5)], ids=["in back-off", "with older weights"]
)
def test_a_group_does_not_wait_for_who_cannot_have_it(other):
    buffer, server = make(), Server("a:1")
    number = failed_once(buffer, server)
    run(buffer, server, other)
    assert server.asked[-1] == number and not other.asked


def test_a_group_is_left_to_another_one_that_may_have_it():
    buffer, server, other = make(), Server("a:1"), Server("b:2", free_at=NOW)
    number = failed_once(buffer, server)
    run(buffer, server, other)
    assert other.asked == [number] and server.asked[-1] != number


def test_a_turn_does_not_wait_for_a_server_that_evaluates():
    """Though that has its keys and values, and capacity."""
    buffer, evaluation, server, other = make(), make(), Server("a:1"), Server("b:2")
    run(buffer, server)
    first = server.requests.pop()
    for trajectory in deliver(buffer, first, scored=False):
        buffer.replied(first.group, trajectory, Reply(np.ones(1, np.int32)))
    buffers = {server: evaluation, other: buffer}
    for asked, request in dispatch([*buffers], buffers.__getitem__, typical_seconds=1.0, now=NOW):
        asked.ask(request)
    assert [request.buffer for request in server.requests] == [evaluation]
    assert [request.group for request in other.requests] == [first.group]

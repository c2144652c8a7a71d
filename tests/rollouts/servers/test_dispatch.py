"""A group that a server did not deliver is left to another one, where there is one that may be asked for it now."""

import pytest

from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.servers.pool import dispatch
from tests.rollouts.test_group_buffer import make

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

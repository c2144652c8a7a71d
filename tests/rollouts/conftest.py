import json

import pytest

from scalerl_jax.contract import peer_text
from tests.rollouts.clock import Clock
from tests.rollouts.liar import BRISK, Liar
from tests.rollouts.small_trainer import ReplayServer

# What makes a server behave differently the longer it lives.
ONCE = {"crash_after", "hang_after", "lie_after", "full_every", "faults"}


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Servers that a test has left as it found them, by their options: every trainer is a new incarnation to them."""
    idle: dict[str, list[ReplayServer]] = {}
    yield idle
    for servers in idle.values():
        for server in servers:
            server.close()


@pytest.fixture
def start(pool, tmp_path_factory):
    """Starts replay servers, one per dict of options; ends them after the test."""
    started: list[tuple[str, ReplayServer]] = []

    def begin(*options):
        assert not started
        for wanted in options:
            key = json.dumps(wanted, sort_keys=True)
            free = pool.get(key)
            folder = str(tmp_path_factory.mktemp("server"))
            started.append((key, free.pop() if free else ReplayServer(folder, "server", **wanted)))
        servers = [server.wait() for _, server in started]
        for server in servers:
            server.forget()
        return servers

    yield begin
    for key, server in started:
        if server.touched or ONCE & set(json.loads(key)):
            server.close()
        else:
            pool.setdefault(key, []).append(server)


@pytest.fixture
def told_once(monkeypatch):
    """What is said now and then is said once: on a loaded machine a test may take longer than the time between."""
    monkeypatch.setattr(peer_text, "LOG_SECONDS", 1e6)


@pytest.fixture
def clock(monkeypatch):
    return Clock().install(monkeypatch)


@pytest.fixture
def honest(start):
    """A genuine server beside one that lies."""
    return start(BRISK)[0]


@pytest.fixture
def liar():
    with Liar() as liar:
        yield liar

"""Servers that appear in a watched file and vanish from it in mid-run; a list that cannot be read."""

import os

from scalerl_jax.rollouts.servers.discovery import Discovery
from tests.rollouts.small_trainer import Trainer, config
from tests.rollouts.test_fleet import SLOW, assert_holds, states_seen
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

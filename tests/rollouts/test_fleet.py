"""The fleet against real servers in processes of their own, over real gRPC: nothing is lost, nothing is old."""

import collections
import concurrent.futures

import numpy as np
import pytest

from scalerl_jax.rollouts.servers import client
from tests.rollouts.small_trainer import Trainer, config, row, weights
from tests.support.waiting import eventually

SLOW = {
    "token_seconds": 0.01,
    "mean_tokens": 12.0,
}  # a completion takes about 0.2 s: there is something to lose at any moment


def assert_holds(server, version: int) -> None:
    """Bit by bit."""
    eventually(lambda: server.held()[0].step == version)
    tensors = server.held()[1]
    assert tensors.keys() == weights(version).keys()
    for name, tensor in weights(version).items():
        np.testing.assert_array_equal(tensors[name].view(np.uint32), tensor.view(np.uint32))


def states_seen(trainer: Trainer, server) -> list[tuple[str, str]]:
    """(state, reason) in order."""
    return [
        (e["state"], e["reason"]) for kind, e in trainer.events if kind == "server" and e["server"] == server.address
    ]


@pytest.mark.parametrize("kind", ["pipeline", "phased"])
def test_batches_by_number_with_current_weights(start, kind):
    servers = start({}, {})
    with Trainer(config(pacing_kind=kind, pacing_max_off_policy_steps=3, max_steps=9), servers) as trainer:
        trainer.admit_all()
        for _ in range(9):
            trainer.update()
        trainer.check()
        assert sorted(trainer.admitted) == sorted(s.address for s in servers)
        for server in servers:
            assert_holds(server, 9)
        if kind == "phased":
            for batch, groups in enumerate(trainer.batches):
                steps = {int(s) for g in groups for c in g.completions for s in c.token_steps()}
                assert steps == {batch // 3 * 3}
        assert not any(evaluating for _, evaluating in trainer.observed)
        assert {status.server_id for status, _ in trainer.observed}
        eventually(lambda: trainer.observed[-1][0].sampled_tokens > 0)


def test_a_resumed_run_begins_with_its_first_group(start):
    with Trainer(config(), start({}), start=5) as trainer:
        for _ in range(3):
            trainer.update()
        trainer.check()
        assert [group.number for group in trainer.batches[0]] == [20, 21, 22, 23]


def test_a_killed_server_loses_nothing_and_comes_back(start):
    servers = start(SLOW, SLOW, SLOW)
    with Trainer(config(), servers) as trainer:
        trainer.admit_all()
        trainer.update()
        trainer.update_until(lambda: trainer.server(servers[0])["in_flight"] > 0)
        servers[0].kill()
        trainer.update()
        eventually(lambda: trainer.states()[servers[0].address] == "connecting")
        trainer.update()
        servers[0].start()
        servers[0].wait()
        trainer.update_until(lambda: trainer.admitted.count(servers[0].address) == 2)
        assert_holds(servers[0], trainer.version)
        # It works: no other server is left to.
        servers[1].kill()
        servers[2].kill()
        trainer.update()
        trainer.check()


def test_a_frozen_server_is_given_up_and_let_back_in(start):
    servers = start(SLOW, SLOW)
    with Trainer(config(fleet_status_seconds=0.5, fleet_silence_seconds=1.0), servers) as trainer:
        trainer.admit_all()
        seen = 0  # so short a silence may have ended it before

        def works() -> bool:
            nonlocal seen
            seen = len(states_seen(trainer, servers[0]))
            return trainer.server(servers[0])["in_flight"] > 0

        trainer.update_until(works)
        servers[0].freeze()
        # What it was asked for may have been on its way when it froze: then the updates go on without it for a while.
        trainer.update_until(lambda: any("no answer for" in why for _, why in states_seen(trainer, servers[0])[seen:]))
        trainer.update()
        admitted = trainer.admitted.count(servers[0].address)
        servers[0].thaw()
        trainer.update_until(lambda: trainer.admitted.count(servers[0].address) > admitted)
        assert_holds(servers[0], trainer.version)
        trainer.check()


def test_a_server_that_answers_but_no_longer_decodes(start, monkeypatch):
    told = "it answers, but has sampled nothing for"
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 0.5)
    # Two groups and the probe's completions, then silence in the middle of the third.
    servers = start({"hang_after": 18}, {})
    with Trainer(config(fleet_stall_seconds=0.6), servers) as trainer:
        trainer.admit_all()
        trainer.update_until(lambda: any(told in reason for _, reason in states_seen(trainer, servers[0])))
        for _ in range(4):
            trainer.update()
        trainer.check()


def test_a_crash_and_a_full_queue_in_mid_run(start):
    servers = start({"crash_after": 30}, {"full_every": 3}, {"queue": 0, "slots": 3, "token_seconds": 0.001})
    with Trainer(config(), servers) as trainer:
        trainer.admit_all()
        for _ in range(8):
            trainer.update()
        trainer.update_until(lambda: servers[0].process.poll() is not None)
        for _ in range(4):
            trainer.update()
        trainer.check()


def test_a_slow_server_gets_less(start):
    servers = start({"token_seconds": 0.02, "mean_tokens": 8.0}, {"token_seconds": 0.001, "mean_tokens": 8.0})
    with Trainer(config(pacing_max_buffered_batches=2.0), servers) as trainer:
        trainer.admit_all()

        def tokens() -> np.ndarray:
            return np.array([trainer.server(s)["sampled_tokens"] for s in servers])

        began = tokens()
        for _ in range(8):
            trainer.update()

        def less() -> bool:
            slow, quick = tokens() - began
            return 0 < slow < quick / 2

        trainer.update_until(less)
        trainer.check()


def test_a_server_that_breaks_the_contract_is_turned_away(start):
    servers = start({"lie_after": 20}, {})
    with Trainer(config(), servers) as trainer:
        trainer.admit_all()
        trainer.update_until(lambda: trainer.states()[servers[0].address] == "rejected")
        for _ in range(4):
            trainer.update()
        trainer.check()
        state, reason = states_seen(trainer, servers[0])[-1]
        assert state == "rejected"
        assert "breaks the contract" in reason
        assert "log-probabilities" in reason


def test_all_servers_lost_it_says_so_and_waits(start, caplog):
    (server,) = start({"token_seconds": 0.001, "mean_tokens": 12.0})
    with Trainer(config(), [server]) as trainer:
        trainer.update()
        held = (
            trainer.fleet.status()["next_group"] + 16
        )  # of a batch that comes later; it is asked for, and never comes
        server.hold_back(f"train/{held}")
        texts = []

        def wait():
            texts.append(trainer.fleet.waiting())
            asked = f"oldest train/{held} (0 of 4" in texts[-1] and f"on {server.address}" in texts[-1]
            if asked and len(trainer.admitted) == 1:
                server.kill()
                server.let_go()
            elif "on no server" in texts[-1] and server.process.poll() is not None:
                server.start()
            trainer.wait()

        while len(trainer.admitted) == 1:
            trainer.update(wait)
        server.wait()
        assert any("groups missing; oldest train/" in text and "1 connecting" in text for text in texts)
        assert any(server.address in text and "the connection is broken" in text for text in texts)
        assert sum("every rollout server is lost" in r.message for r in caplog.records) == 1
        assert trainer.fleet.waiting() == ""


def test_the_store_stays_short_while_the_trainer_is_busy(start):
    with Trainer(config(), start({})) as trainer:
        trainer.update()
        size = trainer.config.rollout.prompts_per_step

        def idle() -> bool:
            status = trainer.fleet.status()
            full = "finished groups wait for the trainer" in status["held_back"]
            return full and status["in_flight"] == status["pending"] == status["unscored"] == 0

        eventually(idle)
        finished = trainer.fleet.status()["groups_ready"]
        # The next batch, one stored beyond it, and the groups in flight when the store was full; not the 32 of k.
        assert 2 * size <= finished <= 2 * size + 8


@pytest.mark.parametrize("kind", ["pipeline", "phased"])
def test_generators_stop_at_the_pacing_limit(start, kind):
    """A trainer that does not come back, and a store without bound: k decides."""
    k = 3
    with Trainer(
        config(pacing_kind=kind, pacing_max_off_policy_steps=k, pacing_max_buffered_batches=100.0), start({}, {})
    ) as trainer:
        trainer.admit_all()
        size = trainer.config.rollout.prompts_per_step
        # Batches 0 to k from version 0; a phase is k batches.
        limit = (k + 1 if kind == "pipeline" else k) * size

        def stopped() -> bool:
            status = trainer.fleet.status()
            return status["in_flight"] == status["pending"] == status["unscored"] == 0

        eventually(lambda: stopped() and trainer.fleet.status()["groups_ready"] == limit)
        seen = len(trainer.observed)
        eventually(lambda: len(trainer.observed) >= seen + 6)  # three heartbeats of each, and nothing more is asked
        status = trainer.fleet.status()
        assert stopped() and status["next_group"] == limit
        assert f"k is {k}" in status["held_back"]
        assert status["waiting"] == "" and status["waits_for"] == []
        trainer.update()
        if kind == "pipeline":  # one batch more may be asked for
            eventually(lambda: trainer.fleet.status()["next_group"] == limit + size)
        trainer.check()


def test_the_trainer_waits_for_slow_servers_and_names_them(start):
    slow, quick = start({"token_seconds": 0.05, "mean_tokens": 8.0}, {"mean_tokens": 8.0})
    with Trainer(config(), [slow, quick]) as trainer:
        trainer.admit_all()
        seen = collections.Counter()

        def wait() -> None:
            status = trainer.fleet.status()
            seen.update(status["waits_for"])
            if slow.address in status["waits_for"]:
                assert "groups missing; oldest train/" in status["waiting"] and slow.address in status["waiting"]
            trainer.wait()

        for _ in range(6):
            trainer.update(wait)

        def as_it_should() -> bool:
            trainer.update(wait)
            return seen[slow.address] > 0 and seen[slow.address] >= seen[quick.address]

        eventually(as_it_should)


def test_no_prompt_is_left(start):
    def draw(number):
        if number >= 10:
            raise ValueError("every prompt is retired")
        return row(number)

    with Trainer(config(), start({}), draw=draw) as trainer:
        trainer.update()
        trainer.update()
        with pytest.raises(ValueError, match="every prompt is retired"):
            trainer.update()


def test_a_failing_scorer_stops_the_run(start):
    def scorer(row, completion):
        future = concurrent.futures.Future()
        future.set_exception(RuntimeError("the verifier is broken"))
        return future

    with Trainer(config(), start({}), scorer=scorer) as trainer:
        with pytest.raises(RuntimeError, match="the verifier is broken"):
            trainer.update()


def test_completions_are_the_same_whoever_is_asked(start):
    """One server and three faulty ones give the same tokens for every id: ids and seeds do not depend on the fleet."""
    seen: dict[tuple[str, int], bytes] = {}
    servers = start({}, {"crash_after": 25}, {"full_every": 3})
    for fleet in (servers[:1], servers):
        with Trainer(config(max_steps=5), fleet) as trainer:
            trainer.admit_all()
            for _ in range(5):
                for group in trainer.update():
                    for c in group.completions:
                        assert seen.setdefault((c.group_id, c.index), c.token_ids.tobytes()) == c.token_ids.tobytes()
            trainer.check()
    counts = collections.Counter(group_id for group_id, _ in seen)
    assert set(counts.values()) == {4}


def test_a_server_whose_connection_is_closed_is_asked_for_nothing(start):
    """What it had is handed back as the fleet closes, and there are groups to be asked for."""
    with Trainer(config(), start(SLOW, SLOW)) as trainer:
        trainer.admit_all()
        clients = trainer.fleet._pool.clients
        assert any(c.capacity(group_size=1, typical_seconds=0.0, now=0.0)[0] + c.in_flight > 0 for c in clients)
    assert [(c.in_flight, c.capacity(group_size=1, typical_seconds=0.0, now=0.0)) for c in clients] == [
        (0, (0, False)), (0, (0, False))
    ]  # fmt: skip

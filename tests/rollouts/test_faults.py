"""Each thing that can go wrong between trainer and server, done on purpose over real gRPC: the right completions are
trained on, once each, and a server that lied is named and sent away."""

import numpy as np
import pytest

from scalerl_jax.rollouts.group_buffer import Process, RolloutRequest
from scalerl_jax.rollouts.requests import Requests
from tests.rollouts.clock import waits_for_one
from tests.rollouts.small_trainer import VOCABULARY, ByteTokenizer, Trainer, config
from tests.rollouts.test_fleet import assert_holds, states_seen
from tests.support.replay.scripts import Scripted
from tests.support.waiting import eventually

BRISK = {"token_seconds": 0.002, "mean_tokens": 12.0}
AFTER = 24  # completions: the eight of the probe, and four groups


def run(trainer: Trainer, updates: int) -> None:
    trainer.admit_all()
    for _ in range(updates):
        trainer.update()
    trainer.check()
    check_against_the_script(trainer)


def check_against_the_script(trainer: Trainer) -> None:
    """Every completion trained on is the one that an honest server gives, bit by bit."""
    script = Scripted(vocabulary=VOCABULARY, mean_tokens=BRISK["mean_tokens"])
    requests = Requests(trainer.config, ByteTokenizer())
    for groups in trainer.batches:
        for group in groups:
            opened = requests.train(group.number, group.row)
            rollout = RolloutRequest(
                None, opened, Process("", ""), 0, None, {wanted.index for wanted in opened.requests}
            )
            asked = requests.of(rollout, incarnation=1)
            for wanted, completion in zip(asked.completions, group.completions, strict=True):
                rollout = script.rollout(asked, wanted)
                np.testing.assert_array_equal(completion.token_ids, rollout.token_ids)
                np.testing.assert_array_equal(completion.logprobs, rollout.logprobs)
                assert completion.forced == rollout.forced


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("nan_logprobs", "log-probabilities that are not finite"),
        ("stale_version", "was sampled by version -1, older than"),
        ("wrong_group", "came for 'train/"),
        ("truncated_stream", "ended without 1 of the completions asked for"),
        ("wrong_tokenizer", "its tokenizer (another toke) is not the trainer's"),
    ],
)
def test_a_server_that_begins_to_lie_is_named_and_sent_away(start, caplog, fault, named):
    servers = start({**BRISK, "faults": f"{fault}:{AFTER}"}, BRISK)
    with Trainer(config(), servers) as trainer:
        run(trainer, 8)
        trainer.update_until(lambda: states_seen(trainer, servers[0])[-1][0] == "rejected")
        reason = states_seen(trainer, servers[0])[-1][1]
        assert servers[0].address in reason and named in reason
        assert any(servers[0].address in r.message and named in r.message for r in caplog.records)
        trainer.update()  # by the other one
        trainer.check()
        check_against_the_script(trainer)
        assert trainer.states()[servers[0].address] == "rejected"


@pytest.mark.parametrize("fault", ["truncated_stream", "nan_logprobs", "wrong_tokenizer"])
def test_a_server_that_lies_from_the_start_is_never_admitted(start, fault):
    servers = start(BRISK, {**BRISK, "faults": f"{fault}:0"})
    with Trainer(config(), [servers[0]]) as trainer:
        trainer.update()
        trainer.fleet._thread.call(trainer.fleet._pool.update, [s.address for s in servers])
        eventually(lambda: trainer.states()[servers[1].address] == "rejected")
        trainer.update()
        trainer.check()
        assert trainer.admitted == [servers[0].address]


def test_repeated_and_reordered_completions_count_once(start, caplog):
    servers = start({**BRISK, "faults": "duplicate:0,reorder:0"}, {**BRISK, "faults": "duplicate:0"})
    with Trainer(config(), servers) as trainer:
        run(trainer, 8)

        def said(server) -> int:
            return sum(server.address in r.message and "came twice" in r.message for r in caplog.records)

        trainer.update_until(lambda: all(map(said, servers)))
        trainer.update()
        trainer.check()
        assert set(trainer.states().values()) == {"active"}
    assert [said(server) for server in servers] == [1, 1]


def test_a_server_that_slows_down_gets_less_and_stays(start):
    servers = start({**BRISK, "faults": f"delay:{AFTER}:0.2"}, BRISK)
    # With a store for it the other one need not wait at every batch.
    with Trainer(config(pacing_max_buffered_batches=3.0), servers) as trainer:
        run(trainer, 20)

        def slower() -> bool:
            slow, fast = (trainer.server(server)["completions_per_second"] for server in servers)
            return 0 < slow < fast / 2

        trainer.update_until(slower)
        assert trainer.states()[servers[0].address] == "active"


def test_corrupted_chunks_are_sent_again(start):
    servers = start({**BRISK, "faults": "corrupt_chunk:0"}, BRISK)
    with Trainer(config(), servers) as trainer:
        run(trainer, 4)
        for server in servers:
            assert_holds(server, 4)
        resent = {s.address: 0 for s in servers}
        for kind, fields in trainer.events:
            if kind == "push":
                resent[fields["server"]] += fields["resent_chunks"]
        assert resent[servers[0].address] > 0 == resent[servers[1].address]


def test_a_late_answer_after_its_call_was_ended_changes_nothing(start, clock, caplog):
    """Asked for again elsewhere under the same ids; what the slow server still sends belongs to a call that is over."""
    servers = start({**BRISK, "faults": f"delay:{AFTER}:20"}, BRISK)
    made = config(fleet_stall_seconds=60.0, fleet_slowest_tokens_per_second=10_000.0)
    with Trainer(made, servers) as trainer:
        trainer.wait = waits_for_one(trainer, *servers, clock)
        run(trainer, 8)
        # It is known by the completions that do not come, or by its standing still.
        told = ("does not finish completions that it was asked for", "answers, but samples nothing")

        def said() -> bool:
            of_it = [m for m in caplog.messages if servers[0].address in m]
            return any(words in message for message in of_it for words in told)

        trainer.update_until(said)
        trainer.check()
        check_against_the_script(trainer)


CLAIMS = {
    "nan_status": "busy_seconds is nan",
    "many_devices:1e9": "devices is 1000000000",
    "many_seconds:1e12": "up_seconds is 1e+12",
    "many_tokens:9223372036854775808": "sampled_tokens is 9223372036854775808",
    "no_slots": "slots is 0, queue_capacity 0",
    "many_slots:4294967295": "slots is 4294967295",
}


def claim(kind: str, after: int) -> dict[str, str]:
    name, *value = kind.split(":")
    return {"faults": ":".join([name, str(after), *value])}


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_status_that_cannot_be_is_dropped_and_counts_against_the_server(start, caplog, told_once, kind):
    servers = start({**BRISK, **claim(kind, AFTER)}, BRISK)
    with Trainer(config(), servers) as trainer:
        run(trainer, 8)

        def said() -> list[str]:
            lines = [r.message for r in caplog.records if CLAIMS[kind] in r.message]
            assert all(servers[0].address in line for line in lines)
            return lines

        trainer.update_until(said)
        told = trainer.server(servers[0])
        trainer.update()
        trainer.check()
        assert len(said()) == 1  # once, not at each heartbeat
    # Nobody has seen any of it: neither the ledger nor what the fleet says of its servers.
    for status, _ in trainer.observed:
        assert 0 <= status.busy_seconds < 1e6 and status.sampled_tokens < 1e9
        assert status.devices == 1 and status.slots == 8
    assert told["busy_seconds"] < 1e6 and told["slots"] == 8


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_server_whose_first_status_cannot_be_is_turned_away(start, kind):
    servers = start(BRISK, {**BRISK, **claim(kind, 0)})
    with Trainer(config(), [servers[0]]) as trainer:
        trainer.update()
        trainer.fleet._thread.call(trainer.fleet._pool.update, [s.address for s in servers])
        eventually(lambda: trainer.states()[servers[1].address] == "rejected")
        reason = states_seen(trainer, servers[1])[-1][1]
        assert servers[1].address in reason and CLAIMS[kind] in reason
        trainer.update()
        trainer.check()


@pytest.mark.slow
def test_a_server_that_was_turned_away_costs_nothing_any_more(start):
    servers = start({**BRISK, "faults": f"nan_logprobs:{AFTER}"}, BRISK)
    with Trainer(config(), servers) as trainer:
        run(trainer, 8)
        trainer.update_until(lambda: trainer.states()[servers[0].address] == "rejected")
        (liar,) = {s.server_id for s, _ in trainer.observed} - {
            trainer.fleet._pool.named(servers[1].address).status.server_id
        }
        booked = len(trainer.observed)
        eventually(lambda: len(trainer.observed) > booked + 20)  # the other one's, at each heartbeat
        assert liar not in {status.server_id for status, _ in trainer.observed[booked:]}

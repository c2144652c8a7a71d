"""Servers that do not do what they were asked, over real gRPC beside an honest one: the run goes on, every group is
trained once, the offender is named, asked less and less, and in the end sent away."""

import asyncio

import grpc
import pytest

from scalerl_jax.contract import limits
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.rollouts.servers import offences
from scalerl_jax.rollouts.servers.validate_status import FleetError
from tests.rollouts.clock import waits_for_one
from tests.rollouts.liar import Liar, is_probe, never
from tests.rollouts.small_trainer import Trainer, config
from tests.rollouts.test_fleet import states_seen
from tests.support.waiting import eventually


def logged(caplog, server, *words: str) -> list[str]:
    return [m for m in caplog.messages if server.address in m and all(word in m for word in words)]


def until_said(trainer: Trainer, caplog, server, *words: str) -> list[str]:
    """Updates until a line names the server with these words."""
    trainer.update_until(lambda: logged(caplog, server, *words))
    trainer.update()
    trainer.check()
    return logged(caplog, server, *words)


def quick_end(monkeypatch) -> None:
    """Offences follow each other at once, so that a test sees where they end."""
    monkeypatch.setattr(offences, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(offences, "LONGEST_SECONDS", 0.02)
    monkeypatch.setattr(offences, "REFUSAL_SECONDS", (0.001, 0.002))
    monkeypatch.setattr(offences, "REFUSALS", 3)
    monkeypatch.setattr(offences, "BANISHED_AT", 3)


def until_sent_away(trainer: Trainer, server) -> str:
    """Why it was, in one line that the trainer's people read."""
    trainer.update_until(lambda: trainer.states()[server.address] == "rejected")
    trainer.update()
    trainer.check()
    return states_seen(trainer, server)[-1][1]


def gets_on():
    """Statuses of a server whose other slots sample all the time."""
    tokens = iter(range(10**6, 10**9))

    def status(reply):
        reply.sampled_tokens = next(tokens)
        return reply

    return status


# ---- Slow, and lost ------------------------------------------------------------------------------------------------


STEP_SECONDS = 5.0  # by which the clock goes on from one status to the next: less than a trainer is excused


def test_slow_completions_are_waited_for_while_the_server_gets_on(liar, clock):
    """They take longer than stall_seconds. Asked for once, delivered once."""
    # Its budgets and the phrase are at most 51 tokens: ten minutes for one completion.
    made = config(fleet_stall_seconds=60.0, fleet_slowest_tokens_per_second=0.1, fleet_heartbeat_seconds=0.02)
    tokens, go_on, held = gets_on(), asyncio.Event(), []

    def status(reply):
        if held:
            clock.ahead += STEP_SECONDS
        if clock.ahead > 5 * made.fleet.stall_seconds:
            go_on.set()
        return tokens(reply)

    async def slowly(request, context, honest):
        held.append(request.group_id)
        await go_on.wait()
        await honest(request, context)

    liar.status, liar.generate = status, slowly
    with Trainer(made, [liar]) as trainer:
        trainer.update()
        trainer.check()
        assert held and clock.ahead > 5 * made.fleet.stall_seconds
    asked = [(r.group_id, c.index) for r in liar.asked if not is_probe(r) for c in r.completions]
    assert len(asked) == len(set(asked))


def test_one_lost_completion_is_asked_for_again(liar, clock, caplog):
    """The server goes on with everything else and never sends this one."""
    lost, others, stuck = [], [], []

    async def lose_one(request, context, honest):
        if lost:
            others.append(request)
            try:
                return await honest(request, context)
            finally:  # its client leaves as soon as all is there
                others.remove(request)
        lost.append((request.group_id, request.completions[0].index))
        del request.completions[0]
        await honest(request, context)
        stuck.append(True)
        await asyncio.Event().wait()

    def asked_again():
        return [r for r in liar.asked if r.group_id == lost[0][0]][1:]

    tokens = gets_on()

    def status(reply):
        if stuck and not others and not asked_again():
            clock.ahead += STEP_SECONDS
        return tokens(reply)

    liar.status, liar.generate = status, lose_one
    # Its budgets and the phrase are at most 51 tokens: half a second of a minute for one completion.
    made = config(fleet_stall_seconds=60.0, fleet_slowest_tokens_per_second=100.0, fleet_heartbeat_seconds=0.02)
    with Trainer(made, [liar]) as trainer:
        for _ in range(3):
            trainer.update()
        trainer.check()
    assert [[c.index for c in r.completions] for r in asked_again()] == [[lost[0][1]]]
    assert logged(caplog, liar, "does not finish completions that it was asked for", f"(1 of {lost[0][0]}, none in")


def test_a_server_that_only_pretends_to_sample_is_sent_away(liar, honest, clock, monkeypatch, caplog):
    quick_end(monkeypatch)
    liar.status, liar.generate = gets_on(), never
    made = config(fleet_stall_seconds=60.0, fleet_slowest_tokens_per_second=1000.0)
    with Trainer(made, [liar, honest]) as trainer:
        trainer.admit_all()
        trainer.wait = waits_for_one(trainer, liar, honest, clock)
        reason = until_sent_away(trainer, liar)
    assert liar.address in reason and "does not finish completions that it was asked for" in reason


# ---- Claims --------------------------------------------------------------------------------------------------------


def claim(slots: int, queue: int):
    def status(reply):
        reply.slots, reply.queue_capacity = slots, queue
        return reply

    return status


def test_a_server_without_slots_is_named_and_sent_away(liar, honest, caplog):
    liar.status = claim(0, 0)
    with Trainer(config(), [liar, honest]) as trainer:
        assert "slots is 0" in until_sent_away(trainer, liar)
    assert liar.calls["Generate"] == 0


def test_the_last_slot_goes_in_mid_run(liar, honest, monkeypatch):
    quick_end(monkeypatch)
    with Trainer(config(), [liar, honest]) as trainer:
        trainer.admit_all()
        trainer.update()
        liar.status = claim(0, 0)
        assert "slots is 0" in until_sent_away(trainer, liar)


def test_a_claim_is_not_believed_before_something_is_delivered(liar, honest):
    """4,096 slots and no answers: it holds one group, the others are trained without it."""
    liar.status, liar.generate = claim(4096, 4096), never
    with Trainer(config(pacing_max_buffered_batches=100.0), [liar, honest]) as trainer:
        trainer.admit_all()
        eventually(lambda: trainer.server(liar)["in_flight"])

        def held_back():
            held, busy = trainer.fleet.status()["held_back"], trainer.server(honest)["in_flight"]
            return f"k is {trainer.pacing.k}" in held and not busy

        eventually(held_back)  # the other one has done all that may be done
        assert trainer.server(liar)["in_flight"] == trainer.config.rollout.group_size


def test_what_a_server_holds_grows_until_it_has_what_it_claims():
    with Liar(slots=64, queue=128, token_seconds=0.002) as server:
        most = 0

        def wait() -> None:
            nonlocal most
            most = max(most, trainer.server(server)["in_flight"])
            trainer.wait()

        with Trainer(config(rollout_prompts_per_step=64, pacing_max_buffered_batches=8.0), [server]) as trainer:
            for _ in range(3):
                trainer.update(wait)
            trainer.update_until(lambda: wait() or most > 64)


# ---- Answers that are none -----------------------------------------------------------------------------------------


def refusing(code: grpc.StatusCode, words: str):
    """Every call but the probe's ends so."""

    async def generate(request, context, honest):
        await context.abort(code, words)

    return generate


always_full = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
broken = refusing(grpc.StatusCode.INTERNAL, "out of order\nWARNING forged\x1b[2J")
another_version = refusing(grpc.StatusCode.FAILED_PRECONDITION, "another version")
long_words = refusing(grpc.StatusCode.INTERNAL, "x" * 20_000)  # what gRPC makes of it says RESOURCE_EXHAUSTED


async def long_message(request, context, honest):
    await context.write(bytes(2 * 2**20))


class _Changed:
    """A call's context that changes what is written."""

    def __init__(self, context, change):
        self._context, self._change = context, change

    def __getattr__(self, name):
        return getattr(self._context, name)

    async def write(self, message):
        for one in self._change(message):
            await self._context.write(one)


def aborted(message):
    message.finish_reason = pb.FINISH_REASON_ABORTED
    return [message]


async def all_aborted(request, context, honest):
    await honest(request, _Changed(context, aborted))


async def the_same_again_and_again(request, context, honest):
    """Nothing but the first one, for ever."""
    first = []

    def keep(message):
        first.append(message)
        return []

    await honest(request, _Changed(context, keep))
    while True:
        await context.write(first[0])


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (always_full, "rejects requests although it reports free slots"),
        (broken, r"fails at what it is asked for"),
        (another_version, "does not sample with the version that it says it holds"),
        (long_words, "answers with more than a message may hold"),
        (long_message, "answers with more than a message may hold"),
        (all_aborted, "returns unfinished completions"),
        (the_same_again_and_again, "sends the same completions again and again"),
    ],
)
class TestAnswersThatAreNone:
    def test_it_is_named_in_one_line_and_asked_less_and_less(
        self, liar, honest, caplog, monkeypatch, told_once, answer, named
    ):
        monkeypatch.setattr(limits, "CHANNEL_OPTIONS", (("grpc.max_receive_message_length", 2**20),))
        monkeypatch.setattr(offences, "REFUSALS", 4)
        liar.generate = answer
        with Trainer(config(), [liar, honest]) as trainer:
            trainer.admit_all()
            lines = until_said(trainer, caplog, liar, named, "times; not asked for")
            # The probe's two, then those of one group at a time, each after a wait; one offence, or more where it took
            # long to come here.
            asked = liar.calls["Generate"]
            assert asked <= 2 + 4 * offences.REFUSALS * trainer.fleet._pool.named(liar.address).record._strikes
        assert len(lines) == 1 and "\n" not in lines[0] and "\x1b" not in lines[0] and len(lines[0]) < 1300

    def test_it_is_sent_away_in_the_end(self, liar, honest, monkeypatch, caplog, answer, named):
        monkeypatch.setattr(limits, "CHANNEL_OPTIONS", (("grpc.max_receive_message_length", 2**20),))
        quick_end(monkeypatch)
        liar.generate = answer
        with Trainer(config(), [liar, honest]) as trainer:
            trainer.admit_all()
            reason = until_sent_away(trainer, liar)
            assert liar.address in reason and named in reason and "times" in reason
            # Calls of one connection arrive in order: what was asked for before it was sent away is there.
            seen = liar.calls["Status"]
            eventually(lambda: liar.calls["Status"] >= seen + 2)
            asked = liar.calls["Generate"]
            for _ in range(3):
                trainer.update()
            assert liar.calls["Generate"] == asked
        assert all("\n" not in m and len(m) < 1300 for m in logged(caplog, liar))


def test_the_call_ends_when_all_is_there(liar, honest, caplog):
    """Whatever else would come, and however long."""
    ended, more = [], []

    async def go_on(request, context, honest):
        written = []

        def keep(message):
            written.append(message)
            return [message]

        try:
            await honest(request, _Changed(context, keep))
            while True:
                more.append(1)
                await context.write(written[0])
        finally:
            ended.append(request.group_id)

    liar.generate = go_on
    with Trainer(config(), [liar, honest]) as trainer:
        trainer.admit_all()
        trainer.update_until(lambda: len(ended) >= 8)
        trainer.check()
        assert trainer.states()[liar.address] == "active"
        assert not logged(caplog, liar, "came twice")


# ---- What cannot be read -------------------------------------------------------------------------------------------

UNDECODABLE = b"\xff\xff\xff"


async def garbage(request, context, honest):
    await context.write(UNDECODABLE)


def test_completions_that_cannot_be_decoded(liar, honest, caplog):
    liar.generate = garbage
    with Trainer(config(), [liar, honest]) as trainer:
        trainer.admit_all()
        assert "breaks the contract: a completion that cannot be decoded" in until_sent_away(trainer, liar)
    assert "deserializing" not in caplog.text


def test_samples_that_cannot_be_decoded(liar, honest, caplog):
    liar.probe = garbage
    with Trainer(config(), [liar, honest]) as trainer:
        assert "breaks the contract: a completion that cannot be decoded" in until_sent_away(trainer, liar)
    assert "deserializing" not in caplog.text


def test_statuses_that_cannot_be_decoded(liar, honest, caplog, monkeypatch):
    quick_end(monkeypatch)
    with Trainer(config(), [liar, honest]) as trainer:
        trainer.admit_all()
        liar.status = lambda reply: UNDECODABLE
        assert "sends a status that cannot be decoded" in until_sent_away(trainer, liar)
    assert "deserializing" not in caplog.text


def test_replies_to_versions_that_cannot_be_decoded(liar, honest, caplog, monkeypatch):
    quick_end(monkeypatch)

    async def push(context, honest):
        await context.write(UNDECODABLE)

    with Trainer(config(), [liar, honest]) as trainer:
        trainer.admit_all()
        liar.push = push
        assert "weight update failed" in until_sent_away(trainer, liar)
    assert "deserializing" not in caplog.text


# ---- Others --------------------------------------------------------------------------------------------------------


def test_words_of_any_length_about_a_version(liar, honest, caplog, monkeypatch):
    quick_end(monkeypatch)

    async def push(context, honest):
        await context.write(pb.WeightReply(refused="\nforged" * 100_000))

    liar.push = push
    with Trainer(config(), [liar, honest]) as trainer:
        reason = until_sent_away(trainer, liar)
        assert "weight update failed" in reason and "forged" in reason and "\n" not in reason
    assert sum(map(len, caplog.messages)) < 100_000


def test_a_model_config_of_any_length(liar, honest, caplog):
    def status(reply):
        reply.model_config = '"\n\x1b[2J' * 10**6
        return reply

    liar.status = status
    with Trainer(config(), [liar, honest]) as trainer:
        reason = until_sent_away(trainer, liar)
        assert "model config" in reason and "the trainer's is {}" in reason and len(reason) <= 1024
    assert sum(map(len, caplog.messages)) < 100_000 and "\x1b" not in caplog.text


def test_another_process_at_every_status(liar, honest, caplog):
    """It is met a few times, then less and less often; the trainer does not wait for it."""
    numbers = iter(range(10**9))

    def status(reply):
        reply.server_id = f"process {next(numbers)}"
        reply.devices, reply.up_seconds, reply.busy_seconds = 4096, 0.2, 120.0
        return reply

    liar.status = status
    with Trainer(config(), [liar, honest]) as trainer:
        trainer.update_until(lambda: liar.calls["Status"] > 30)
        trainer.update()
        trainer.check()
        met = sum(state == "updating" for state, _ in states_seen(trainer, liar))
        assert met <= 3 * offences.FREE_MEETINGS
        # What no clock allows is not booked, nor is who has to wait for being met.
        booked = [
            from_here
            for (said, _), from_here in zip(trainer.observed, trainer.from_here, strict=True)
            if said.devices == 4096
        ]
        assert all(booked) and len(booked) <= met + 1


def test_the_only_server_lies_and_the_run_ends_with_its_name(liar, monkeypatch):
    liar.status = claim(0, 0)
    with pytest.raises(ValueError, match=f"server {liar.address}: .* slots is 0"), Trainer(config(), [liar]) as trainer:
        trainer.update()


def test_all_servers_are_sent_away_in_mid_run(liar, monkeypatch):
    quick_end(monkeypatch)
    with Trainer(config(), [liar]) as trainer:
        trainer.update()
        liar.generate = all_aborted
        with pytest.raises(FleetError, match=r"every rollout server was turned away; the last one: .* unfinished"):
            trainer.update_until(lambda: False)


@pytest.mark.slow
def test_what_a_server_that_is_turned_away_said_is_cut(liar, honest, caplog):
    """A megabyte in place of a group's name, in every completion for the probe."""

    async def another_name(request, context, honest):
        await context.write(pb.Completion(incarnation=request.incarnation, group_id="x" * 1_000_000))

    liar.probe = another_name
    with Trainer(config(), [liar, honest]) as trainer:
        trainer.admit_until(lambda: trainer.states()[liar.address] == "rejected")
        trainer.check()
        assert len(trainer.server(liar)["reason"]) < 2000
    assert any("turned away" in record.getMessage() for record in caplog.records)
    assert max(len(record.getMessage()) for record in caplog.records) < 2000

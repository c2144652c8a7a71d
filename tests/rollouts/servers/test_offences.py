"""The record of one server process: back-off that grows, an end, trust that grows with what was delivered."""

from scalerl_jax.contract.peer_text import LOG_SECONDS, LogLimit
from scalerl_jax.rollouts.servers.offences import (
    BANISHED_AT,
    FREE_MEETINGS,
    GOOD,
    GROWTH,
    KEPT_PROCESSES,
    LONGEST_SECONDS,
    PROOF_TOKENS,
    REFUSALS,
    WORTH,
    Record,
    Records,
    backoff,
)


def test_each_offence_costs_more_until_it_is_sent_away():
    record, now, waits = Record(), 0.0, []
    while not record.banished:
        consequence = record.offend("it lies", now=now)
        waits.append(consequence.until - now)
        now = consequence.until
    assert len(waits) == BANISHED_AT
    assert waits == [backoff(n + 1) for n in range(BANISHED_AT)] == sorted(set(waits))
    assert backoff(10**6) == LONGEST_SECONDS
    assert record.counts["it lies"] == BANISHED_AT


def test_what_happens_together_is_one_offence():
    record = Record()
    first = record.offend("it lies", now=10.0)
    for _ in range(10_000):
        again = record.offend("it lies", now=10.0 + 0.5 * backoff(1))
        assert (again.until, again.banished, again.log_times) == (first.until, False, 0)
    # Logged with the count of all that were not.
    later = record.offend("it lies", now=10.0 + LOG_SECONDS)
    assert (first.log_times, later.log_times) == (1, 10_001)


def test_good_work_outweighs():
    record, now = Record(), 0.0
    for _ in range(3 * BANISHED_AT):
        for _ in range(GOOD):
            record.deliver()
        now = record.offend("it lies", now=now).until
    assert not record.banished


def test_what_it_may_hold_grows_with_what_it_delivers():
    record = Record()
    sizes = [record.allowance(8)]
    for _ in range(3):
        for _ in range(sizes[-1]):
            record.deliver()
        sizes.append(record.allowance(8))
    assert sizes == [8 * (1 + GROWTH) ** n for n in range(4)]
    record.offend("it hoards", now=0.0)
    assert record.allowance(8) == 8
    record.offend("it hoards", now=record.until)
    assert record.allowance(8) == 4
    for _ in range(BANISHED_AT):
        record.offend("it hoards", now=record.until)
    assert record.allowance(8) == 1


def test_what_it_may_hold_grows_while_it_samples_long_completions():
    """At 10 tokens a second each, 256 slots are in use within a quarter of a minute, and not after half an hour."""
    record, held, seconds = Record(), 16, 0
    while held < 256:
        seconds += 1
        record.sample(10 * held, held=held)
        held = min(256, record.allowance(16))
        assert seconds < 60
    assert seconds == 16
    record.offend("it lies", now=0.0)
    assert record.allowance(16) == 16


def test_what_it_may_hold_does_not_grow_with_tokens_of_others():
    """Of a process that holds nothing of ours."""
    record = Record()
    record.sample(10**9, held=0)
    record.sample(PROOF_TOKENS * 8 - 1, held=8)
    assert record.allowance(8) == 8
    record.sample(1, held=8)
    assert record.allowance(8) == 16


def test_refusals_in_a_row_become_an_offence():
    record, now = Record(), 0.0
    for number in range(1, 2 * REFUSALS + 1):
        now = max(now, record.refuse("it takes nothing", now=now).until)
        assert record.counts["it takes nothing"] == number // REFUSALS * REFUSALS
    # Many at once count once; and what is taken in between ends the row.
    record = Record()
    for _ in range(10 * REFUSALS):
        record.refuse("it takes nothing", now=0.0)
    assert not record.counts
    for _ in range(10 * REFUSALS):
        record.refuse("it takes nothing", now=record.until)
        record.deliver()
    assert not record.counts
    # One kind does not make up for another.
    for _ in range(REFUSALS):
        record.refuse("it takes nothing", now=record.until)
        record.forgive("it takes no version")
    assert record.counts["it takes nothing"] == REFUSALS


def test_processes_that_keep_going_are_met_less_and_less_often():
    records, now = Records(), 0.0
    waits = []
    for number in range(30):
        record = records.of("a:1", f"process {number}", now=now)
        assert record is records.of("a:1", f"process {number}", now=now)
        waits.append(max(0.0, record.until - now))
    assert waits[: FREE_MEETINGS + 1] == [0.0] * (FREE_MEETINGS + 1)
    assert waits == sorted(waits) and waits[-1] == LONGEST_SECONDS
    assert records.of("b:1", "process 0", now=now).until == 0.0
    # One that delivers is welcome, and so is the next one there.
    for _ in range(WORTH):
        record.deliver()
    assert records.of("a:1", "another", now=now).until == 0.0


def test_waiting_is_for_who_did_not_waste_it():
    records = Records()
    record = records.of("a:1", "process", now=0.0)
    assert [record.meet() for _ in range(FREE_MEETINGS + 2)] == [True] * FREE_MEETINGS + [False] * 2
    record.deliver()
    assert record.meet()
    for number in range(FREE_MEETINGS + 2):
        record = records.of("a:1", f"process {number}", now=0.0)
    assert not record.meet()


def test_records_are_kept_for_a_bounded_number_of_processes():
    records = Records()
    first = records.of("a:1", "first", now=0.0)
    first.offend("it lies", now=0.0)
    records.of("a:1", "second", now=0.0)
    assert records.of("a:1", "first", now=0.0) is first
    for number in range(KEPT_PROCESSES):
        records.of("a:1", f"{number} " + "x" * 10**6, now=0.0)
    assert records.of("a:1", "first", now=0.0) is not first
    assert sum(len(name) for name in records._processes["a:1"]) < 300 * KEPT_PROCESSES


def test_processes_are_told_apart_by_their_whole_id():
    records, name = Records(), "x" * 127
    assert records.of("a:1", name + "1", now=0.0) is not records.of("a:1", name + "2", now=0.0)


def test_each_kind_is_told_by_itself():
    telling = LogLimit()
    assert [telling.happened(kind, now=0.0) for kind in ("a", "b", "a", "a")] == [1, 1, 0, 0]
    assert telling.happened("a", now=LOG_SECONDS) == 3

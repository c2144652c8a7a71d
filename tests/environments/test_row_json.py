"""Rows as they go to the processes that score."""

import contextlib
import datetime
import os
import signal
import tracemalloc

import pytest

from scalerl_jax.environments import Completion, Row, scorer_pool
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.scorer_pool import ScorerError, ScorerPool
from tests.environments import odd


@pytest.fixture
def pool():
    config = odd.config(verifier_seconds=60.0)
    with contextlib.closing(ScorerPool(config, {"": make_environment(config)})) as made:
        made.prepare()
        yield made


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (datetime.date(2026, 1, 2), "date is not JSON serializable"),
        ({("a", 1): 2}, "keys must be str"),
        ({1, 2}, "set"),
    ],
)
def test_a_row_that_json_has_no_form_for_is_named(pool, value, said):
    row = Row("?", "1", name="mine.py:Odd train row 7", extra={"level": 3, "when": value})
    with pytest.raises(ScorerError, match=rf"^mine\.py:Odd train row 7: column 'when': JSON has no form.*{said}"):
        pool.submit(row, Completion("1")).result(600)
    assert pool.submit(Row("?", "1", extra={"bonus": 1.0}), Completion("1")).result(600).correct


def test_what_waits_and_what_is_known_do_not_cost_the_size_of_the_row(pool, monkeypatch):
    """The row is written out once for its digest and once for each question that a worker gets."""
    written, real = [], scorer_pool.row_json
    monkeypatch.setattr(scorer_pool, "row_json", lambda row: written.append(row) or real(row))
    try:
        row = Row("?", "1", extra={"bonus": 1.0, "tests": "x" * 4_000_000})
        assert pool.submit(row, Completion("1")).result(600).correct
        assert len(written) == 2
        os.kill(pool._workers[0]._running.process.pid, signal.SIGSTOP)
        tracemalloc.start()
        waiting = [pool.submit(row, Completion(f"{n}")) for n in range(2, 40)]
        known = [pool.submit(row, Completion("1")) for _ in range(100)]
        assert all(score.done() for score in known) and not any(score.done() for score in waiting)
        assert len(written) <= 3 and tracemalloc.get_traced_memory()[0] < 16_000_000
        tracemalloc.stop()
        os.kill(pool._workers[0]._running.process.pid, signal.SIGCONT)
        assert [score.result(600).metrics["length"] for score in waiting] == [1.0] * 8 + [2.0] * 30
        assert len(written) == 2 + len(waiting)
        # The same row read again is the same to what is remembered.
        assert pool.submit(Row(row.text, row.answer, extra=dict(row.extra)), Completion("1")).done()
        assert not pool.submit(Row(row.text, "2", extra=dict(row.extra)), Completion("1")).result(600).correct
    finally:
        tracemalloc.stop()

"""Whatever goes wrong on the loop's thread is raised by the next call from outside, and nobody waits for ever."""

import asyncio
import concurrent.futures
import time
import types

import pytest

from scalerl_jax.rollouts.loop_thread import LoopThread


@pytest.fixture
def thread():
    made = LoopThread("fleet")
    yield made
    made.close()


def broken(*_):
    raise AssertionError("no such server")


def raised_by_calls(thread: LoopThread, message: str) -> None:
    def call_until_it_fails() -> None:
        while True:  # what was reported may take a moment to be known
            thread.call(lambda: None)

    with pytest.raises(AssertionError, match=message):
        call_until_it_fails()


def test_what_is_posted_fails(thread):
    thread.start(list)
    thread.post(broken)
    raised_by_calls(thread, "no such server")


def test_what_runs_soon_fails(thread):
    """As the fleet's pump: the loop would log it, and go on without it."""
    thread.start(list)
    thread.post(lambda: asyncio.get_running_loop().call_soon(thread.guarded(broken)))
    raised_by_calls(thread, "no such server")


def test_what_runs_all_the_time_fails(thread):
    async def run():
        broken()

    thread.start(lambda: [run()])
    raised_by_calls(thread, "no such server")


def test_the_beginning_fails(thread):
    thread.start(broken)
    raised_by_calls(thread, "no such server")


def test_the_first_failure_counts(thread):
    thread.start(list)
    thread.post(broken)
    thread.post(lambda: thread.fail(KeyError("a later one")))
    raised_by_calls(thread, "no such server")


def test_a_process_that_was_stopped_during_a_call_goes_on(thread, monkeypatch):
    """Its clock is hours ahead when it goes on, and the loop has not answered yet."""
    ahead, now, look = [0.0], time.monotonic, concurrent.futures.wait

    def stopped(futures, timeout):
        if ahead[-1]:
            return look(futures, timeout)
        ahead.append(1e4)
        return types.SimpleNamespace(done=set())

    monkeypatch.setattr(time, "monotonic", lambda: now() + ahead[-1])
    monkeypatch.setattr(concurrent.futures, "wait", stopped)
    thread.start(list)
    assert thread.call(lambda: 7) == 7 and ahead[-1]
